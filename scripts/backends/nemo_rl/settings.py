"""The settings of backend `nemo_rl`: stages that NeMo-RL trains, and their scoring."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from scripts.backends.nemo_rl.megatron import content_of, iteration_of
from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.errors import UserError
from scripts.recipe.evaluation import EvaluationBase
from scripts.recipe.model import PretrainedModel
from scripts.recipe.stage import StageSettings, Training, TrainingConfig
from scripts.recipe.strict import Strict, nearest

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe

PREFETCHED_STEPS = 2


class NemoRlCluster(Strict):
    """How many nodes NeMo-RL gets, in its own words. May change no weight."""

    num_nodes: PositiveInt = Field(description="cluster.num_nodes of its config.")
    judge_nodes: int = Field(0, ge=0, description="Nodes of Gym's judge models (of num_nodes or besides, by release).")
    generation_nodes: int = Field(
        0, ge=0, description="Of num_nodes, those that only generate (asynchronous training); 0: all do both."
    )


class NemoRlTraining(Training):
    """What NeMo-RL trains, by a config of its own and what is said here over it, in its own keys.

    ``grpo``, ``dpo``, ``mpo``, ``loss_fn``, ``policy``, ``data``, ``env`` and ``logger`` go to the driver as they are.
    """

    backend: Literal["nemo_rl"]
    algorithm: Literal["grpo", "dpo", "mpo"]
    reward: Literal["verifier", "judge", "pairs"] = Field(description="Where the reward comes from.")
    config: str = Field(description="The config's path in NeMo-RL's checkout.")
    entry: str = Field("examples/nemo_gym/run_grpo_nemo_gym.py", description="The driver's path in the checkout.")
    max_num_steps: PositiveInt | None = Field(
        None, description="The planned step; none: as many as the training rows are enough for."
    )
    grpo: dict[str, Any] = Field({})
    dpo: dict[str, Any] = Field({})
    mpo: dict[str, Any] = Field({})
    loss_fn: dict[str, Any] = Field({})
    policy: dict[str, Any] = Field({})
    data: dict[str, Any] = Field({})
    env: dict[str, Any] = Field({})
    add: dict[str, Any] = Field({}, description="Settings like those above that the release's config does not have.")
    sandbox: bool = Field(False, description="A sandbox container beside every node's, for code and Lean.")
    sif: bool = Field(False, description="The rows run in containers of their own (site's nemo_rl.sif).")
    environment: dict[str, str] = Field({}, description="Variables of the driver. No secrets.")
    overrides: list[str] = Field([], description="Further Hydra overrides; they come last and win.")

    @property
    def section(self) -> dict[str, Any]:
        """The settings of its algorithm."""
        return getattr(self, self.algorithm)

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        if self.algorithm == "grpo":
            return self.grpo["num_prompts_per_step"]
        return self.policy["train_global_batch_size"]

    @property
    def max_length(self) -> int:
        """Tokens of a row's prompt and response together, at most."""
        return self.policy["max_total_sequence_length"]

    @property
    def rollouts_per_step(self) -> int | None:
        """Completions of one step; None where none are generated."""
        if self.algorithm != "grpo":
            return None
        return self.grpo["num_prompts_per_step"] * self.grpo["num_generations_per_prompt"]

    @property
    def is_asynchronous(self) -> bool:
        """Whether rollouts are generated while the policy trains, in one pass over the data."""
        return bool(self.grpo.get("async_grpo", {}).get("enabled", False))

    def planned_step(self, train_rows: int | None) -> int | None:
        """The step at which the stage is done.

        Where the recipe leaves it open, the training rows decide: one pass over the data (NeMo-RL drops the last,
        partial batch), or ``max_num_epochs``. Asynchronous training generates ahead and waits for ever when the data
        end before its last step, so it ends two steps before them. That is for training without interruption;
        scripts.stage.reach says where a resumed one ends.
        """
        if self.max_num_steps is not None or train_rows is None:
            return self.max_num_steps
        batches = train_rows // self.rows_per_step
        if self.is_asynchronous:
            return max(0, batches - PREFETCHED_STEPS)
        return batches * self.section.get("max_num_epochs", 1)

    @model_validator(mode="after")
    def _fits_its_reward(self) -> "NemoRlTraining":
        fitting = {"pairs": ("dpo", "mpo"), "verifier": ("grpo",), "judge": ("grpo",)}[self.reward]
        if self.algorithm not in fitting:
            raise PydanticCustomError(
                "unfit_reward",
                "{algorithm} does not fit a reward from {reward}: static preference pairs are for dpo or mpo; a "
                "deterministic check (verifier) or a judge is for grpo",
                {"algorithm": self.algorithm, "reward": self.reward},
            )
        return self

    @model_validator(mode="after")
    def _batches_add_up(self) -> "NemoRlTraining":
        needed = [("policy", "train_global_batch_size"), ("policy", "max_total_sequence_length")]
        if self.algorithm == "grpo":
            needed += [("grpo", "num_prompts_per_step"), ("grpo", "num_generations_per_prompt")]
        for section, key in needed:
            if not isinstance(getattr(self, section).get(key), int):
                raise PydanticCustomError("unstated", "{name} must be stated", {"name": f"{section}.{key}"})
        if self.algorithm != "grpo":
            return self
        product = self.rollouts_per_step
        batch = self.policy["train_global_batch_size"]
        loss = self.loss_fn | self.add.get("loss_fn", {})
        if loss.get("force_on_policy_ratio") and batch != product:
            raise PydanticCustomError(
                "batch",
                "loss_fn.force_on_policy_ratio wants policy.train_global_batch_size ({batch}) to be "
                "grpo.num_prompts_per_step x num_generations_per_prompt = {product}",
                {"batch": batch, "product": product},
            )
        if product % batch:
            raise PydanticCustomError(
                "batch",
                "grpo.num_prompts_per_step x num_generations_per_prompt = {product} is no multiple of "
                "policy.train_global_batch_size, {batch}",
                {"batch": batch, "product": product},
            )
        return self


class MegatronWeights(Strict):
    """The Megatron checkpoint that a first stage takes its weights from: one iteration's folder, and what is in it."""

    path: str
    format: Literal["megatron_bridge", "megatron_lm"]
    content: str


class FirstModel(Strict):
    """The model that a stage without a parent starts from."""

    name: str
    revision: str | None = None
    megatron: MegatronWeights | None = None


class NemoRlConfig(TrainingConfig, NemoRlTraining):
    """The resolved config of a stage; `model` is there where it has no parent.

    `mtp` is a setting of earlier recipes, which no release could serve; identities hold it.
    """

    model: FirstModel | None = None
    mtp: bool = False


class NemoRlSettings(StageSettings, NemoRlTraining):
    """A stage that NeMo-RL trains."""

    config_model: ClassVar[type[TrainingConfig]] = NemoRlConfig
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = StageSettings.WITHOUT_EFFECT | {
        *("cluster", "image", "launcher", "logger", "pretrained_checkpoint"),
    }
    default_seed: ClassVar[int | None] = None
    is_converted: ClassVar[bool] = True
    is_rewarded_here: ClassVar[bool] = False
    site_sets_nodes: ClassVar[bool] = False

    image: str = Field("train", description="The container, by its name in the release or the site.")
    cluster: NemoRlCluster
    logger: dict[str, Any] = Field({})
    pretrained_checkpoint: bool = Field(
        False, description="Take the parent's weights from its checkpoint, not from an export, where the release can."
    )
    launcher: str | None = Field(
        None, description="A launcher of upstream's by its name in the release: the driver gets its variables."
    )

    @property
    def collects_trajectories(self) -> bool:
        """Whether its driver can roll out the validation rows without training."""
        return self.algorithm == "grpo" and self.entry.endswith("run_grpo_nemo_gym.py")

    def release_in(self, recipe: "Recipe") -> dict[str, str]:
        """Name and commit of the release."""
        return {"name": recipe.release, "revision": release_of(recipe.release).revision}

    def values_with_effect(self) -> dict[str, Any]:
        """What it says that may change weights."""
        return super().values_with_effect() | {"mtp": False}

    def first_model(self, recipe: "Recipe") -> dict[str, Any]:
        """The model's name and revision, and which Megatron weights are taken instead of its own."""
        model = recipe.model.model_dump(mode="json", exclude={"megatron"})
        if (megatron := recipe.model.megatron) is not None:
            folder = iteration_of(megatron)
            content = content_of(folder)
            model["megatron"] = {"path": str(folder), "format": megatron.format, "content": content}
        return model

    def check_in(self, recipe: "Recipe", name: str) -> None:
        """PydanticCustomError where the recipe names no release, or its model or the stage's blend do not fit."""
        if recipe.release is None:
            raise PydanticCustomError("no_release", "names no NeMo-RL release", {"at": "release"})
        if self.parent is None and not isinstance(recipe.model, PretrainedModel):
            raise PydanticCustomError(
                "scratch", "NeMo-RL starts from a pretrained model: give its name", {"at": "model"}
            )
        blend = recipe.blends[self.blend]
        if blend.format == "mmpr_tiny" and self.data.get("val_size") != blend.holdout:
            raise PydanticCustomError(
                "val_size",
                "must be the holdout of blend {blend}, {rows}",
                {"at": f"stages.{name}.data.val_size", "blend": self.blend, "rows": blend.holdout},
            )

    def completed(self, recipe: "Recipe", name: str, key: Callable[..., str]) -> Self:
        """The stage asking for the nodes of its cluster; UserError for what the release would not take."""
        release = release_of(recipe.release)
        able = "pretrained_checkpoint" in release.can
        if self.pretrained_checkpoint and not able:
            at = key("stages", name, "pretrained_checkpoint")
            raise UserError(f"{at}: {recipe.release} starts from exports only; leave it out")
        if self.launcher is not None and self.launcher not in release.launchers:
            known = nearest(self.launcher, release.launchers)
            raise UserError(
                f"{key('stages', name, 'launcher')}: {recipe.release} has no launcher {self.launcher}{known}"
            )
        if self.parent is None and recipe.model.megatron is not None:
            if not able:
                raise UserError(
                    f"{key('model', 'megatron')}: {recipe.release} starts from Hugging Face's format only; convert the "
                    "checkpoint (docs/nemo_rl.md says how) and name the result in model.name, or name a release that "
                    "can"
                )
            if "megatron_cfg" not in self.policy:
                raise UserError(
                    f"{key('model', 'megatron')}: stage {name} does not train by Megatron (its policy says no "
                    "megatron_cfg), so it would take the weights of model.name; leave megatron out"
                )
        return self.on_its_nodes(release)

    def on_its_nodes(self, release: Release) -> Self:
        """The stage asking for the nodes that its cluster means in this release: with or without the judges' own."""
        apart = 0 if "judges_within_num_nodes" in release.can else self.cluster.judge_nodes
        nodes = {"nodes": self.cluster.num_nodes + apart}
        return self.model_copy(update={"resources": self.resources.model_copy(update=nodes)})

    @model_validator(mode="after")
    def _nodes_add_up(self) -> "NemoRlSettings":
        if self.cluster.generation_nodes >= self.cluster.num_nodes:
            raise PydanticCustomError("nodes", "cluster.generation_nodes leaves no node to train on")
        if self.resources.nodes != 1:
            raise PydanticCustomError("nodes", "resources.nodes follows from cluster here; leave it out")
        return self


BENCHMARKS = ("aime2024", "aime2025", "aime2026", "gpqa", "gpqa_diamond", "math", "math500", "mmlu", "mmlu_pro")


class NemoRlEvaluation(EvaluationBase):
    """What NeMo-RL is to evaluate besides training; each costs GPU hours of its own."""

    held_out: bool = Field(
        False, description="Score each stage's export on its blend's validation rows, by the driver that trained it."
    )
    benchmarks: list[str] = Field(
        [], description="Data sets of NeMo-RL's run_eval.py, for <stage>/benchmarks.json, which is made when asked for."
    )
    nodes: PositiveInt | None = Field(
        None, description="cluster.num_nodes while scoring; none: the stage's own. What generates keeps its share."
    )

    @model_validator(mode="after")
    def _has_known_benchmarks(self) -> "NemoRlEvaluation":
        for name in self.benchmarks:
            if name not in BENCHMARKS and not re.fullmatch(r"mmlu_[A-Z]{2}-[A-Z]{2,3}", name):
                hint = nearest(name, BENCHMARKS)
                raise PydanticCustomError(
                    "benchmark", "no benchmark is named {name}{hint}", {"name": name, "hint": hint}
                )
        return self

    def scores(self, stage: StageSettings) -> bool:
        """Whether the stage's own driver can roll out its validation rows."""
        return self.held_out and isinstance(stage, NemoRlSettings) and stage.collects_trajectories

    def check_in(self, recipe: "Recipe") -> None:
        """PydanticCustomError where no stage can be scored."""
        if not any(isinstance(stage, NemoRlSettings) for stage in recipe.stages.values()):
            raise PydanticCustomError(
                "evaluation", "held_out, benchmarks and nodes are for NeMo-RL", {"at": "evaluation"}
            )
        if self.held_out and not recipe.scored_stages():
            raise PydanticCustomError(
                "no_stage", "no stage of GRPO on Gym's environments, whose driver scores", {"at": "evaluation"}
            )

    def stage_while_scoring(self, recipe: "Recipe", name: str) -> StageSettings:
        """A stage on the nodes that its scoring gets; ValueError when they are too few for it.

        Judges keep their nodes; the others are shared between training (whose policy generation takes its weights from)
        and generation as in the stage.
        """
        stage, release = recipe.stages[name], release_of(recipe.release)
        if self.nodes is None:
            return stage
        cluster = stage.cluster
        judges = cluster.judge_nodes if "judges_within_num_nodes" in release.can else 0
        left = self.nodes - judges
        generation = cluster.generation_nodes and max(
            1, min(left - 1, round(left * cluster.generation_nodes / (cluster.num_nodes - judges)))
        )
        if left - generation < 1:
            raise ValueError(
                f"{self.nodes} leave no node to hold the policy of {name} ({judges} of them are its judges')"
            )
        small = cluster.model_copy(update={"num_nodes": self.nodes, "generation_nodes": generation})
        return stage.model_copy(update={"cluster": small}).on_its_nodes(release)


STAGES = dict.fromkeys(("grpo", "dpo", "mpo"), NemoRlSettings)
EVALUATION = NemoRlEvaluation
