"""Settings of backend `nemo_rl`: a config of NeMo-RL's, the recipe's settings over the config, and the nodes.

``sft``, ``grpo``, ``dpo``, ``mpo``, ``rm``, ``loss_fn``, ``policy``, ``teacher``, ``data``, ``env`` and ``logger`` have
NeMo-RL's keys and reach the driver unchanged, and ``distillation`` without `ROUTING`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt

from scripts.backends.nemo_rl.judges import Judge, JudgeName
from scripts.backends.nemo_rl.loops import LOOPS, Loop, loop_of
from scripts.backends.nemo_rl.releases import load_releases, release_of
from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.recipe.effect import Fact, Later, NeededInRecipe, WithoutEffect
from scripts.recipe.expand import Start
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.sampling import OWN
from scripts.recipe.stage_settings import PLACE_IN_ROWS, ROWS_LEFT_OUT, StageSettings, Surroundings, Teaching
from scripts.recipe.strict import Name, Strict, invalid, nearest, refuse_misnamed

PREFETCHED_STEPS = 2
ROUTING = ("of", "default")
"""Keys of ``distillation`` that NeMo-RL does not have."""
READS = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}
"""Defaults of ``data`` in NeMo-RL's sft.yaml: how SFT tokenizes a conversation."""
PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""NeMo-RL's template for ``chat_template: null``."""


class NemoRlCluster(Strict):
    """How many nodes NeMo-RL gets, in NeMo-RL's words; without effect on weights."""

    num_nodes: PositiveInt = Field(description="cluster.num_nodes of its config.")
    judge_nodes: NonNegativeInt = 0
    """Nodes of Gym's judge models (of num_nodes or besides, by release)."""
    generation_nodes: NonNegativeInt = 0
    """Of num_nodes, those that only generate (asynchronous training); 0: all do both."""
    teacher_nodes: NonNegativeInt = 0
    """Of num_nodes, those of each distinct teacher, where each row is taught by its environment's (MOPD)."""


class FirstModel(Strict):
    """The model of a stage without a parent."""

    name: str
    revision: str | None = None


class NemoRlSettings(StageSettings):
    """A stage that NeMo-RL trains."""

    gone: ClassVar = {
        "pretrained_checkpoint": "leave it out; the stage starts from its parent's export in Hugging Face's format"
    }
    ROLES: ClassVar[tuple[str, ...]] = ("teachers",)
    default_seed = None
    is_converted = True
    is_rewarded_here = False
    site_sets_nodes = False
    amending: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("loss_fn", "env", "environment", "judges", "grpo", "distillation", "dpo", "mpo"), ""),
        "max_num_steps": "",
        **dict.fromkeys(("grpo.num_prompts_per_step", "distillation.num_prompts_per_step"), PLACE_IN_ROWS),
        **dict.fromkeys(("grpo.num_generations_per_prompt", "distillation.num_generations_per_prompt"), PLACE_IN_ROWS),
        "grpo.async_grpo": PLACE_IN_ROWS,
        "grpo.seed": "the order of the rows and all random numbers follow from it",
        "policy": "NeMo-RL takes model, optimizer and schedule with their settings from the checkpoint",
        "policy.train_global_batch_size": PLACE_IN_ROWS,
        "policy.max_total_sequence_length": ROWS_LEFT_OUT,
        "data": "the rows would be other ones, or come in another order",
        "overrides": "an override may change anything; name the setting in its own section",
    }

    backend: Literal["nemo_rl"]
    algorithm: Literal[*LOOPS]
    reward: Literal["verifier", "judge", "pairs"] | None = None
    """Where the reward comes from; none, and only there: SFT, and distillation, which may have rewards to look at."""
    config: str = Field(description="The config's path in NeMo-RL's checkout.")
    entry: str = Field("examples/nemo_gym/run_grpo_nemo_gym.py", description="The driver's path in the checkout.")
    max_num_steps: PositiveInt | None = None
    """The planned step; none: as many as the training rows are enough for."""
    sft: dict[str, Any] = Field({})
    grpo: dict[str, Any] = Field({})
    dpo: dict[str, Any] = Field({})
    mpo: dict[str, Any] = Field({})
    rm: Later[dict[str, Any]] = Field({})
    distillation: Later[dict[str, Any]] = Field(
        {}, description="The teacher's role by environment (of), that of all others (default), and NeMo-RL's keys."
    )
    on_policy_distillation: Later[dict[str, Any]] = Field({})
    teacher: Later[dict[str, Any]] = Field(
        {}, description="Settings of the teacher, as policy's, for run_distillation.py."
    )
    loss_fn: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    data: dict[str, Any] = Field({})
    env: dict[str, Any] = Field({})
    add: dict[str, Any] = Field({}, description="Settings like those above that the release's config does not have.")
    judges: Later[dict[JudgeName, Judge]] = Field({})
    """Judges outside the Ray cluster, by names of your own. No GPU tried them. (Gym's own take cluster.judge_nodes.)"""
    sandbox: bool = Field(False, description="A sandbox container beside every node's, for code and Lean.")
    sif: bool = Field(False, description="The rows run in containers of their own (site's nemo_rl.sif).")
    environment: dict[str, str] = Field({}, description="Variables of the driver. No secrets.")
    overrides: list[str] = Field([], description="Further Hydra overrides; they come last and win.")
    image: WithoutEffect[str] = Field("train", description="The container, by its name in the release or the site.")
    cluster: NeededInRecipe[NemoRlCluster] = None
    logger: WithoutEffect[dict[str, Any]] = Field({})
    teachers: WithoutEffect[dict[Name, Start]] = Field({})
    """The start of each teacher by its role, for distillation."""
    launcher: WithoutEffect[str | None] = None
    """A launcher of upstream's by its name in the release: the driver gets its variables."""
    model: Fact[FirstModel | None] = None
    mtp: Fact[bool] = False
    """A setting of earlier recipes, which stays in identities."""

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Return the recipe's ``policy.tokenizer``."""
        added = self.add.get("policy", {}).get("tokenizer", {})
        return {**(self.policy.get("tokenizer") or {}), **(added or {})}

    @property
    def chat_template(self) -> str | None:
        """Return the recipe's chat template: a path (.jinja) or the text; None for the tokenizer's."""
        named = self.tokenizer.get("chat_template", OWN)
        if named is None:
            return PASSTHROUGH
        return None if named.lower() == OWN else named

    @property
    def reads(self) -> dict[str, bool]:
        """Return SFT's options of beginnings and ends: the recipe's ``data`` over `READS`."""
        return {name: self.data.get(name, value) for name, value in READS.items()}

    @property
    def loop(self) -> Loop:
        """Return the training loop of the algorithm's driver."""
        return loop_of(self.algorithm, self.entry)

    @property
    def answers_prompts(self) -> bool:
        """Whether the trained model answers prompts; a reward model scores answers."""
        return not self.loop.makes_head

    @property
    def section(self) -> Any:
        """Return the settings of the training loop."""
        return getattr(self, self.loop.section)

    @property
    def rows_per_step(self) -> int:
        """Return the training rows of one step."""
        return self.loop.rows_per_step(self)

    @property
    def max_length(self) -> int:
        """Return the most tokens of prompt and response together."""
        return self.policy["max_total_sequence_length"]

    @property
    def longest_row(self) -> int:
        """Return the most tokens of a row."""
        return self.loop.longest_row(self.max_length)

    @property
    def samples_per_step(self) -> int:
        """Return the training rows of one step, or the completions sampled for the rows."""
        return self.rows_per_step * self.loop.samples_of_row(self)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether rollouts are generated during training, in one pass over the data."""
        return bool(self.grpo.get("async_grpo", {}).get("enabled", False))

    def planned_step(self, train_rows: int | None) -> int | None:
        """Return the step at which the stage is done; None where the rows are unknown.

        By default ``max_num_epochs`` passes over the training rows, without partial batches. Asynchronous training
        generates ahead and waits for ever at the end of the data, so the planned step lies two steps before the end;
        a resumed training may end earlier (scripts.stage.progress).
        """
        if self.max_num_steps is not None or train_rows is None:
            return self.max_num_steps
        batches = train_rows // self.rows_per_step
        if self.is_asynchronous:
            return max(0, batches - PREFETCHED_STEPS)
        return batches * self.section.get("max_num_epochs", 1)

    def release_in(self, release: str | None) -> dict[str, str]:
        """Return name and commit of the release."""
        return {"name": release, "revision": release_of(release).revision}

    def values_with_effect(self) -> dict[str, Any]:
        """Return the settings with effect on weights, with the hash of a chat template in a file."""
        values = super().values_with_effect() | {"mtp": False}
        for name in self.loop.passes_over:
            del values[name]
        if self.chat_template and self.chat_template.endswith(".jinja") and Path(self.chat_template).is_file():
            values["template_sha256"] = sha256_file(Path(self.chat_template))
        return values

    @property
    def shuffles_rows(self) -> bool:
        """Whether rows are taken in a random order; unsaid, NeMo-RL's config decides."""
        return bool(self.data.get("shuffle", True))

    def first_model(self, model: RandomModel | PretrainedModel) -> dict[str, Any]:
        """Return the model's name and revision."""
        return model.model_dump(mode="json", include={"name", "revision"})

    def check_in(self, around: Surroundings) -> None:
        """Raise PydanticCustomError where the recipe's release, model or blend does not fit the stage."""
        if around.release is None:
            raise invalid("names no NeMo-RL release", "release")
        refuse_misnamed("release", "release", around.release, load_releases())
        if self.parent is None and not isinstance(around.model, PretrainedModel):
            raise invalid("NeMo-RL starts from a pretrained model: give its name", "model")
        around.blend.check_val_size(self.data.get("val_size"), self.blend, f"{around.at}.data.val_size")

    def completed(self, release: str | None, name: str, key: Callable[..., str]) -> Self:
        """Return the stage with the nodes of its cluster; UserError for a launcher unknown to the release."""
        pinned = release_of(release)
        program = self.loop.program(self.entry)
        if program in pinned.lacks:
            able = [each.name for each in load_releases().values() if program not in each.lacks]
            raise UserError(
                f"{key('stages', name, 'entry')}: {release} has no {program}, which trains the stage; these "
                f"releases have it: {', '.join(able)}"
            )
        if self.launcher is not None and self.launcher not in pinned.launchers:
            at, known = key("stages", name, "launcher"), nearest(self.launcher, pinned.launchers)
            raise UserError(f"{at}: {release} has no launcher {self.launcher}{known}")
        if self.judges and "external_judges" not in pinned.can:
            able = [each.name for each in load_releases().values() if "external_judges" in each.can]
            raise UserError(
                f"{key('stages', name, 'judges')}: {release} has no judges outside the Ray cluster; name "
                f"release {' or '.join(able)}, or serve judges by NeMo-Gym (cluster.judge_nodes)"
            )
        besides = 0 if "judges_within_num_nodes" in pinned.can else self.cluster.judge_nodes
        nodes = {"nodes": self.cluster.num_nodes + besides}
        return self.model_copy(update={"resources": self.resources.model_copy(update=nodes)})

    @property
    def nodes_beside(self) -> int:
        """Return the nodes of all pools of judges; a server elsewhere has no replicas."""
        return sum((judge.replicas or 0) * judge.nodes_per_replica for judge in self.judges.values())

    @property
    def teaching(self) -> Teaching:
        """Return the routing of ``distillation``, whose other keys are NeMo-RL's."""
        return Teaching.model_construct(**{key: self.distillation[key] for key in self.distillation.keys() & ROUTING})

    @property
    def default_teacher(self) -> str | None:
        """Return the role for environments that ``distillation.of`` does not name: as stated, or a sole teacher's."""
        return self.teaching.default_among(self.teachers)

    @property
    def taught_by(self) -> set[str]:
        """Return the roles of the teachers that teach."""
        return {*self.distillation.get("of", {}).values(), self.default_teacher} - {None}

    @property
    def nodes_of_teachers(self) -> int:
        """Return the nodes of all distinct teachers; the same start in two roles is one teacher."""
        return self.cluster.teacher_nodes * len({self.teachers[role] for role in self.taught_by})

    def _refuse_misfits(self) -> None:
        self._fits_its_algorithm()
        self.loop.refuse_misfits(self)
        self.loop.refuse_teachers(self)
        self._judges_are_asked_and_nodes_add_up()

    def _fits_its_algorithm(self) -> None:
        loop = self.loop
        if self.reward is None and None not in loop.rewards:
            raise invalid(f"reward is missing, which says where that of {self.algorithm} comes from")
        if self.reward not in loop.rewards:
            raise invalid(
                f"{self.algorithm} does not fit a reward from {self.reward}: static preference pairs are for dpo, mpo "
                "or reward; a deterministic check (verifier) or a judge is for grpo or distillation; sft has none"
            )
        if loop.drivers and self.entry.rpartition("/")[2] not in loop.drivers:
            raise invalid(f"entry must end in {' or '.join(loop.drivers)} to train {self.algorithm}, not {self.entry}")
        for section, key in loop.needed:
            value = getattr(self, section).get(key)
            if not isinstance(value, int) or value <= 0:
                raise invalid(f"{section}.{key} must be stated" + f", above 0, not {value}" * (value is not None))
        try:
            _ = (self.chat_template, self.is_asynchronous, self.loss_fn | self.add.get("loss_fn", {}))
        except (AttributeError, TypeError):
            raise invalid("add, policy.tokenizer and grpo.async_grpo hold settings, chat_template a text") from None
        of, default = self.distillation.get("of", {}), self.distillation.get("default")
        if not isinstance(of, dict) or not all(isinstance(role, str) for role in (*of.values(), default or "")):
            raise invalid("distillation.of names a role for each environment, and distillation.default one role")

    def _judges_are_asked_and_nodes_add_up(self) -> None:
        if self.judges and "nemo_gym" not in self.entry:
            raise invalid(f"judges: {self.entry} asks no server of NeMo-Gym; leave judges out")
        servers = [judge.server for judge in self.judges.values()]
        if doubled := next((server for server in servers if servers.count(server) > 1), None):
            raise invalid(f"judges: several have the server {doubled}; name each server once")
        if self.cluster.generation_nodes + self.nodes_of_teachers >= self.cluster.num_nodes:
            kinds = "generation_nodes and teachers leave" if self.nodes_of_teachers else "generation_nodes leaves"
            raise invalid(f"cluster.{kinds} no node to train on")
        if self.resources.nodes != 1:
            raise invalid("resources.nodes follows from cluster here; leave it out")


STAGES = dict.fromkeys(LOOPS, NemoRlSettings)
