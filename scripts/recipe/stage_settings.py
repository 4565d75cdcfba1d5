"""A stage's settings: as a recipe has them, and resolved, as ``config.yaml`` has them.

A backend's ``settings.py`` maps algorithms to classes of settings (``STAGES``), one each. The marks of the fields
(scripts.recipe.effect) say what a resolved config has: all settings that may change weights, and no others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from scripts.files import canonical_json, sha256_text
from scripts.installed import backend_names
from scripts.recipe.blend import Blend
from scripts.recipe.criteria import ROLLOUTS, Criterion
from scripts.recipe.effect import RESOLVED, Fact, NeededInRecipe, WithoutEffect
from scripts.recipe.environment import EnvironmentName
from scripts.recipe.expand import SWEEP_SCHEMA, Start
from scripts.recipe.lost_texts import TextKind
from scripts.recipe.model import PretrainedModel, RandomModel, ThoughtMarks
from scripts.recipe.source import Share
from scripts.recipe.stop_when import StopWhen
from scripts.recipe.strict import Memory, Name, Strict, invalid, refuse_misnamed

DEFAULT_BACKEND = "trl"
KINDS = {"sft": "demonstrations", "grpo": "prompts", "distillation": "prompts", "kto": "unpaired"}
KINDS |= dict.fromkeys(("dpo", "mpo", "reward"), "preferences")


METRICS_OF_BEST = {
    "train:reward_mean": "reward_mean",
    "train:loss": "loss",
    "val:loss": "validation_loss",
    "val:validation_loss": "validation_loss",
    "val:accuracy": "validation_accuracy",
}
"""The columns of metrics.parquet by which the best checkpoints are kept."""


PLACE_IN_ROWS = "the checkpoint's place in the rows is counted in steps of the other size"
ROWS_LEFT_OUT = "it decides which rows are too long, so the checkpoint's place in the rows would be another"
BY_OTHER_SHAPE = "the checkpoint holds weights of the other shape"
AMENDING = {
    "release": "",
    "environments": "",
    "backend": "a backend reads its own checkpoints alone",
    "algorithm": "it is another training",
    "model": BY_OTHER_SHAPE,
    "seed": "the order of the rows and all random numbers follow from it",
    "template_sha256": "the rows would be other tokens",
    "thoughts": "the rows would be other tokens",
    "template_date": "the rows would be other tokens",
}
"""`StageSettings.amending` of every backend."""


class Checkpointing(Strict):
    """When a run directory gets a checkpoint. Changes no weight."""

    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step always has a checkpoint."""
    keep_last_k: PositiveInt | None = None
    """Newest checkpoints to keep; none: all."""
    keep_top_k: NonNegativeInt = 0
    """Best checkpoints to keep besides the newest."""
    metric_name: Literal[*METRICS_OF_BEST] = "train:reward_mean"
    """The metric, at the checkpoint's step, of the best; of val: where held-out rows are measured at such steps."""
    higher_is_better: bool = True
    keep_steps: list[PositiveInt] = Field([])
    """More steps to keep checkpoints of; multiples of save_period."""

    def _refuse_misfits(self) -> None:
        if unsaved := [step for step in self.keep_steps if step % self.save_period]:
            says = f"step {unsaved[0]} is no multiple of save_period {self.save_period}, so it would not be saved"
            raise invalid(says, key="keep_steps")


class Resources(Strict):
    """A stage's request to its site. Changes no weight."""

    nodes: PositiveInt = 1
    runtime: PositiveInt = 60
    """Minutes of an allocation."""
    mem_mb: Memory = 4000
    """Memory of a node, in MB or as 64G; 0: all of a whole node's, else the partition's."""
    step_seconds: PositiveFloat | None = None
    """Expected seconds of a step until measured; none: all steps fit an allocation."""


class Quantize(Strict):
    """A quantised export beside the stage's, in the format of compressed-tensors. Changes no weight of the stage."""

    format: Literal["fp8", "int4", "nvfp4"]
    """fp8: weights, and while serving activations; int4 and nvfp4: weights."""
    group_size: Literal[32, 64, 128] = 128
    """Weights that share a scale, of int4."""


class Probe(Strict):
    """How a stage's reward is tried on answers made from its rows before training. Changes no weight."""

    gone: ClassVar = {
        "seconds_per_check": "leave the key out: a verifier may take 30 seconds for a response",
        "ask_judges": "name the judge's server of NeMo-Gym in gym",
        **dict.fromkeys(
            ("rollouts", "prompts", "generations", "zero_variance_share", "truncation_rate"),
            "look at zero_variance_share and truncation_rate of the first steps, which gates can bound (docs/gates.md)",
        ),
    }

    rows: PositiveInt = 8
    """Rows of each environment to make answers from."""
    tolerated_share: float = Field(0.25, ge=0, lt=1)
    """Share of rows in which an empty answer, the prompt or another row's answer may pay as well."""
    action: Literal["stop", "warn"] = "stop"
    """What a reward that cannot be trained on leads to."""


class Teaching(Strict):
    """Which teacher teaches a row, by the row's environment (multi-teacher on-policy distillation, MOPD).

    Every environment of the blend has a role of `teachers`, and every role teaches.
    """

    of: dict[EnvironmentName, Name] = Field({})
    """The role of `teachers` by environment."""
    default: Name | None = None
    """The role for all other environments; none: only a sole teacher teaches what `of` does not name."""

    def role_of(self, environment: str, roles: Iterable[str]) -> str | None:
        """Return the role among `roles` that teaches an environment's rows; None: no role does."""
        return self.of.get(environment) or self.default_among(roles)

    def default_among(self, roles: Iterable[str]) -> str | None:
        """Return the role of environments that `of` does not name: as stated, or a sole teacher's; None without one."""
        sole = [*roles]
        return self.default or (sole[0] if not self.of and len(sole) == 1 else None)

    def check_in(self, around: "Surroundings", blend_name: str, roles: Iterable[str]) -> None:
        """Raise PydanticCustomError for an environment without a teacher, or a teacher without an environment."""
        at, blend = f"{around.at}.distillation", around.blend
        if not roles:
            raise invalid("is empty; name a stage by role, as {teacher: rlhf}", f"{around.at}.teachers")
        for key, role in {**{f"of.{each}": role for each, role in self.of.items()}, "default": self.default}.items():
            refuse_misnamed(f"{at}.{key}", "teacher", role, roles)
        for environment in self.of:
            refuse_misnamed(f"{at}.of.{environment}", "environment", environment, blend.environments)
        taught = {environment: self.role_of(environment, roles) for environment in blend.environments}
        if untaught := [environment for environment, role in taught.items() if role is None]:
            raise invalid(
                f"no teacher covers {', '.join(untaught)} of blend {blend_name}; name one of {', '.join(roles)} for "
                "each, or a default",
                f"{at}.of",
            )
        if idle := [role for role in roles if role not in taught.values()]:
            says = f"teaches no environment of blend {blend_name}; name it in distillation.of, or leave it out"
            raise invalid(says, f"{around.at}.teachers.{idle[0]}")


@dataclass(frozen=True)
class Surroundings:
    """What a recipe has around a stage, against which the stage's settings are checked."""

    name: str
    """The stage's name."""
    release: str | None
    """The recipe's release of NeMo-RL."""
    model: RandomModel | PretrainedModel
    """The recipe's model."""
    blend: Blend | None
    """The rows of the stage; None for a stage without rows."""
    is_fresh: bool
    """Whether the stage makes its model, as no export is there to start from."""
    parent: "StageSettings | None"
    """The settings of the stage that it starts from; None without one."""
    continued: tuple["StageSettings", ...]
    """The parent's settings, where its training goes on."""
    roles: Mapping[str, "StageSettings | None"]
    """The settings of the stages that it needs besides, by role; None for a pretrained model."""

    @property
    def at(self) -> str:
        """The key of the stage."""
        return f"stages.{self.name}"


class StageSettings(Strict):
    """A stage's settings: in a recipe, or resolved (`of_config`), where fields without effect are at their defaults.

    A resolved config is all that may change the weights. `release` pins the trainer's versions, `environments` holds
    the SHA-256 of the user's environments, `template_sha256` of a chat template whose text is not in the config;
    `model` is set for stages without a parent. `thoughts` and `template_date` are the recipe's model's, where it has
    them.
    """

    gone: ClassVar = {
        "halving": "leave it out, and all variants of sweep train to the end; what halving trained is gone on with"
    }
    rows_per_step: ClassVar[int]
    """Rows of the training split in a step."""
    max_length: ClassVar[int]
    """Most tokens of a row's prompt and response together."""
    is_asynchronous: ClassVar[bool] = False
    """Whether rollouts are generated while the policy trains, in one pass over the data."""
    chat_template: ClassVar[str | None] = None
    """The named chat template; None: the template of the stage's start."""
    sampling_given: ClassVar[frozenset[str] | None] = None
    """The settings of rollouts that earlier commits never took from the start's folder; None: they took none."""
    figures: ClassVar[tuple[str, ...]] = ()
    """What is measured of held-out rows of written answers besides their loss, by column of metrics.parquet."""
    amending: ClassVar[dict[str, str]] = {}
    """Why an amendment may not change a setting of the config, by dotted key; empty where it may.

    A key speaks for all keys below it that are not there themselves.
    """
    default_seed: ClassVar[int | None] = 0
    rule: ClassVar[str] = "train"
    """The rule whose jobs make its checkpoint."""
    takes_model: ClassVar[bool] = False
    """Whether without a parent it starts from the export of the recipe's pretrained model, where that is one."""
    answers_prompts: ClassVar[bool] = True
    """Whether the trained model answers prompts; a reward model scores answers."""
    is_converted: ClassVar[bool] = False
    """Whether its checkpoints are converted to Hugging Face's format on a node of their own; else they are in it."""
    is_rewarded_here: ClassVar[bool] = True
    """Whether scripts.rewards rewards its rollouts; else the backend has environments of its own."""
    site_sets_nodes: ClassVar[bool] = True
    """Whether a site may say on how many nodes it trains; else they are part of its parallelism."""
    nodes_beside: ClassVar[int] = 0
    """The nodes of a second component of its Slurm job, besides those of `resources`."""
    unlikely_values: ClassVar[list[str]] = []
    """What is likely a mistake in the settings, whatever the model."""
    READS: ClassVar[tuple[str, ...]] = ()
    """What the recipe's model tells of thoughts and dates (`reading`) that may change the weights."""
    ROLES: ClassVar[tuple[str, ...]] = ()
    """Fields that name starts besides the parent: a name, names by key, or shares by name."""

    backend: Literal[*backend_names()] = DEFAULT_BACKEND
    algorithm: str
    parent: WithoutEffect[Start | None] = None
    """The stage to start from, or variants or checkpoints of a stage; none: the recipe's model."""
    sweep: WithoutEffect[Annotated[None, WithJsonSchema(SWEEP_SCHEMA)]] = None
    """Make variants of the stage, named by the settings that differ (docs/sweeps.md)."""
    best: WithoutEffect[Annotated[None, WithJsonSchema({"type": "string"})]] = None
    """Choose the best variant by this score, also where no stage starts from it."""
    continues: WithoutEffect[Name | None] = None
    """The parent whose optimizer, schedule and count of steps go on, on this stage's data from their first row."""
    blend: NeededInRecipe[Name] = None
    seed: int | None = None
    """Instead of the recipe's."""
    max_truncated_share: WithoutEffect[Share] = 0.05
    """Refuse the stage when a larger share of its training rows is too long."""
    max_lost_share: WithoutEffect[dict[TextKind, Share]] = Field({})
    """Share of the texts of a kind that the chat template may leave out of training rows; others: none."""
    checkpointing: WithoutEffect[Checkpointing] = Checkpointing()
    resources: WithoutEffect[Resources] = Resources()
    template_change: WithoutEffect[bool] = False
    """Chat template, special tokens and vocabulary may differ from the parent's."""
    quantize: WithoutEffect[Quantize | None] = None
    """Also export the stage quantised, with scores beside the stage's own."""
    gate: WithoutEffect[list[Criterion]] = Field([])
    """The success criteria, beside the default gate's."""
    default_gate: WithoutEffect[bool] = True
    """Also judge SFT by its loss, rollouts by what failed, and scores by a collapse (docs/gates.md)."""
    release: Fact[dict[str, str]] = Field({})
    environments: Fact[dict[str, str]] = Field({})
    template_sha256: Fact[str | None] = None
    thoughts: Fact[ThoughtMarks | Literal["none"] | None] = None
    template_date: Fact[date | None] = None
    model: Fact[Any] = None

    @model_validator(mode="before")
    @classmethod
    def _is_complete(cls, data: Any, info: ValidationInfo) -> Any:
        """Refuse a resolved config without the facts that every one has."""
        if info.context == RESOLVED and isinstance(data, dict):
            missing = [name for name in ("release", "seed") if name not in data]
            if missing:
                raise invalid("is missing", key=missing[0])
        return data

    def values(self) -> dict[str, Any]:
        """Return the plain values of a resolved config, whose hash is part of the stage's identity."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def content(self) -> str:
        """The hash of the values."""
        return sha256_text(canonical_json(self.values()))

    def why_not_amended(self, key: str) -> str:
        """Return why a training may not go on under a new value of a setting, by dotted key; empty if permitted."""
        reasons = AMENDING | self.amending
        parts = key.split(".")
        around = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        known = next((each for each in around if each in reasons), None)
        return "it was trained under the other value from its first step" if known is None else reasons[known]

    @model_validator(mode="before")
    @classmethod
    def _starts_where_it_continues(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("continues") is None:
            return data
        if data.get("parent") not in (None, data["continues"]):
            raise invalid(f"continues names the parent; leave parent: {data['parent']} out")
        return data | {"parent": data["continues"]}

    @property
    def kind(self) -> str | None:
        """Return the kind of rows (scripts.rows.kinds) that the algorithm trains on; None for no rows."""
        return KINDS[self.algorithm]

    @property
    def made_by(self) -> str:
        """Return the package of scripts/backends that makes the stage: the backend's, but for a merge."""
        return self.backend

    @property
    def section(self) -> Any:
        """Return the settings under the algorithm's name."""
        return getattr(self, self.algorithm)

    @property
    def samples_per_step(self) -> int:
        """Rows, or completions sampled for them, in a step."""
        return self.rows_per_step

    @property
    def longest_row(self) -> int:
        """Most tokens of a row of the split: of its prompt where responses are sampled."""
        return self.max_length

    @property
    def stopping(self) -> StopWhen | None:
        """What ends the stage early; None: it trains to the planned step."""
        return None

    @property
    def validates(self) -> bool:
        """Whether the training measures held-out rows of written answers, as eval.json then tells."""
        return False

    def planned_step(self, train_rows: int | None) -> int | None:
        """Return the last step of the stage; None where it depends on unknown training rows."""
        raise NotImplementedError

    @property
    def kept_by_continuing(self) -> dict[str, Any]:
        """Return the settings, by key, that a stage shares with the stage that it continues."""
        return {"backend": self.backend, "algorithm": self.algorithm}

    @property
    def roles(self) -> dict[str, str]:
        """Return the starts besides the parent by role: a field of `ROLES`, or ``field.key`` of several."""
        found = {}
        for field in self.ROLES:
            value = getattr(self, field)
            for key, start in value.items() if isinstance(value, dict) else [("", value)]:
                name = start if isinstance(start, str) else key
                found |= {f"{field}.{key}".rstrip("."): name} if start is not None else {}
        return found

    @property
    def before(self) -> str | None:
        """The start whose scores are those before the stage; None: the recipe's model."""
        return self.parent

    @property
    def running_gate(self) -> list[Criterion]:
        """Return the criteria of a stage in training: the gate, and default bounds on rollouts that it leaves open."""
        stated = {criterion.metric for criterion in self.gate}
        return self.gate + [bound for bound in ROLLOUTS if self.default_gate and bound.metric not in stated]

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return the pinned versions that decide the weights, by name; `release` is the recipe's of NeMo-RL."""
        raise NotImplementedError

    def first_model(self, model: RandomModel | PretrainedModel) -> dict[str, Any]:
        """Return the config's `model` of a stage that starts from no export, by the recipe's model."""
        return model.model_dump(mode="json")

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are taken in another order than the file's."""
        return True

    def draws_by_seed(self, is_fresh: bool, parent: "StageSettings | None" = None) -> bool:
        """Whether the stage's weights follow from its seed: whether anything but a model's dropout is drawn.

        `is_fresh`: the stage makes its model. `parent`: the settings of the stage that it starts from, if it is one.
        """
        return True

    def check_in(self, around: Surroundings) -> None:
        """PydanticCustomError, with the key as `at` in its context, where recipe and stage do not fit."""

    def completed(self, release: str | None, name: str, key: Callable[..., str]) -> Self:
        """Return the stage with the additions of its backend's files; UserError at `key` for a misfit."""
        return self

    def python_on(self, vllm_python: str | None) -> str:
        """Return the Python that trains the stage; `vllm_python` is the site's with vLLM."""
        return "python"
