"""Typed models of config.yaml and of a recipe with its stages.

Settings bear NeMo-RL's names and meanings where it has them (``grpo.num_prompts_per_step``,
``loss_fn.reference_policy_kl_penalty``, ``policy.max_total_sequence_length``, ...), so a stage reads the same
whether it trains a tiny model here or NeMo-RL on a cluster.
"""

import difflib
from collections.abc import Iterable
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
Share = Annotated[float, Field(ge=0, le=1)]


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean ...?` with the closest of the valid words, or the list of them when none is close."""
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(words)}"


class Strict(BaseModel):
    """A model that refuses keys it does not know and names the nearest it does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key{hint}",
                        {"key": str(key), "hint": nearest(str(key), cls.model_fields)},
                    )
        return data


class Environment(StrEnum):
    """Names that a row's ``agent_ref.name`` may bear; scripts.rewards holds one verifier for each."""

    MATH = "math_with_judge_simple_agent"
    MCQA = "mcqa_simple_agent"
    STRUCTURED_OUTPUTS = "structured_outputs_simple_agent"
    INSTRUCTION_FOLLOWING = "instruction_following_simple_agent"
    TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"
    SWE_PIVOT = "swe_pivot_single_step_tool_use_with_argument_comparison_agent"
    GENRM = "genrm_simple_agent"


class SyntheticSource(Strict):
    """Blends written by scripts.data.synthesize, laid out as the published ones are on the hub."""

    kind: Literal["synthetic"]
    seed: int = Field(0, description="Another seed, another data set.")
    placeholder_share: Share = Field(0.2, description="Share of the math rows written as _hf_placeholder rows.")


class Blend(Strict):
    """One training-data JSONL."""

    kind: Literal["prompts", "demonstrations"] = Field(
        "prompts",
        description="prompts: rows that an environment rewards; demonstrations: rows with the answer to imitate.",
    )
    environments: list[Environment] = Field(min_length=1, description="Environments whose rows the blend may hold.")
    rows: PositiveInt | None = Field(None, description="Rows to synthesize, held-out rows included.")
    holdout: PositiveInt = Field(100, description="The last N rows become the validation split.")


class ScratchModel(Strict):
    """A Llama-shaped decoder with random weights and a byte-level tokenizer, for stages without a parent."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    initializer_range: PositiveFloat = 0.02
    rope_theta: PositiveFloat = 10000.0


class Optimizer(Strict):
    """AdamW; the rate rises linearly over the warm-up steps, then follows the schedule."""

    lr: PositiveFloat
    schedule: Literal["constant", "cosine"] = "constant"
    lr_warmup_iters: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    clip_grad: float = Field(1.0, gt=0)


class Generation(Strict):
    """How rollouts are sampled."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt


class SftPolicy(Strict):
    """The policy of a supervised stage."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_global_batch_size: PositiveInt = Field(description="Rows a step.")
    optimizer: Optimizer


class GrpoPolicy(Strict):
    """The policy of a reinforcement stage."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_global_batch_size: PositiveInt | None = Field(
        None, description="Completions a step; must be prompts times generations (one update a step, on policy)."
    )
    optimizer: Optimizer
    generation: Generation


class Sft(Strict):
    """Supervised fine-tuning on the assistant's tokens, rows in file order."""

    max_num_steps: PositiveInt


class Grpo(Strict):
    """Group relative policy optimisation (arXiv:2402.03300), token-level loss (DAPO, arXiv:2503.14476)."""

    num_prompts_per_step: PositiveInt
    num_generations_per_prompt: Annotated[int, Field(ge=2)]
    max_num_steps: PositiveInt
    overlong_filtering: bool = Field(False, description="Take no gradient from responses cut at max_new_tokens.")
    normalize_rewards: bool = Field(True, description="Divide a group's advantages by its standard deviation.")


class GrpoLoss(Strict):
    """The clipped policy-gradient loss and its penalty."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="Weight of the k3 KL estimate to the parent.")
    ratio_clip_min: Annotated[float, Field(gt=0)] = 0.2
    ratio_clip_max: Annotated[float, Field(gt=0)] = 0.28


class Checkpointing(Strict):
    """When a run directory gets a checkpoint. May change no weight."""

    save_period: PositiveInt = Field(10, description="Steps between checkpoints; the last step always has one.")
    keep_last_k: PositiveInt | None = Field(None, description="Newest checkpoints to keep; none: all.")
    keep_top_k: Annotated[int, Field(ge=0)] = Field(0, description="Best checkpoints to keep besides the newest.")
    metric_name: Literal["train:reward_mean", "train:loss"] = Field(
        "train:reward_mean", description="What best means: this metric of the checkpoint's step."
    )
    higher_is_better: bool = True


class Resources(Strict):
    """What a stage asks its site for. May change no weight."""

    nodes: PositiveInt = 1
    runtime: PositiveInt = Field(60, description="Minutes of one allocation.")
    mem_mb: PositiveInt = Field(4000, description="Memory of a node.")
    step_seconds: PositiveFloat | None = Field(
        None,
        description="What a step is expected to take until that is measured; none: all steps fit one allocation.",
    )


Metric = Literal[
    "held_out_change",
    "worst_environment_change",
    "final_reward_std",
    "final_truncation_rate",
    "final_entropy",
    "max_kl",
]


class Criterion(Strict):
    """One bound that a finished stage must keep; scripts.evaluate.gate says how each metric is computed."""

    metric: Metric
    min: float | None = None
    max: float | None = None
    action: Literal["stop", "warn"] = "stop"

    @model_validator(mode="after")
    def _has_a_bound(self) -> "Criterion":
        if self.min is None and self.max is None:
            raise PydanticCustomError("no_bound", "a criterion needs min or max")
        return self


class StageBase(Strict):
    """What every stage has, whatever its algorithm."""

    parent: Name | None = Field(
        None, description="The stage whose checkpoint this one starts from; none: the recipe's model."
    )
    blend: Name
    backend: Literal["trl"] = "trl"
    seed: int | None = Field(None, description="Instead of the recipe's.")
    checkpointing: Checkpointing = Checkpointing()
    resources: Resources = Resources()
    gate: list[Criterion] = Field([], description="The success criteria; none: the stage always passes.")


class SftStage(StageBase):
    """A stage of supervised fine-tuning."""

    algorithm: Literal["sft"]
    sft: Sft
    policy: SftPolicy

    @property
    def max_num_steps(self) -> int:
        """The planned step."""
        return self.sft.max_num_steps

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.policy.train_global_batch_size


class GrpoStage(StageBase):
    """A stage of reinforcement learning."""

    algorithm: Literal["grpo"]
    grpo: Grpo
    loss_fn: GrpoLoss = GrpoLoss()
    policy: GrpoPolicy

    @property
    def max_num_steps(self) -> int:
        """The planned step."""
        return self.grpo.max_num_steps

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.grpo.num_prompts_per_step

    @model_validator(mode="after")
    def _one_update_a_step(self) -> "GrpoStage":
        product = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        stated = self.policy.train_global_batch_size
        if stated is not None and stated != product:
            raise PydanticCustomError(
                "batch",
                "policy.train_global_batch_size is {stated}, but num_prompts_per_step x num_generations_per_prompt = "
                "{product}; make them equal or leave it out",
                {"stated": stated, "product": product},
            )
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise PydanticCustomError(
                "length",
                "policy.generation.max_new_tokens leaves no room for a prompt in policy.max_total_sequence_length",
            )
        return self


Stage = Annotated[SftStage | GrpoStage, Field(discriminator="algorithm")]
TAKEN_STAGES, TAKEN_BLENDS = {"data", "logs"}, {"source", "filled"}
ALGORITHM_BLENDS = {"sft": "demonstrations", "grpo": "prompts"}


class Evaluation(Strict):
    """How held-out scores are taken: every blend's validation rows, one response a row."""

    max_new_tokens: PositiveInt
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    blends: list[Name] | None = Field(None, description="None: every blend of prompts.")


class Recipe(Strict):
    """A model's stages, blends and sources. ``defaults`` holds, by algorithm, settings that its stages share."""

    name: Name
    description: str = ""
    seed: int = 0
    source: SyntheticSource
    model: ScratchModel
    blends: dict[Name, Blend]
    evaluation: Evaluation
    defaults: dict[Literal["sft", "grpo"], dict[str, Any]] = {}
    stages: dict[Name, Stage] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_refer(self) -> "Recipe":
        for name, stage in self.stages.items():
            if stage.parent is not None and stage.parent not in self.stages:
                raise _misnamed(f"stages.{name}.parent", "stage", stage.parent, self.stages)
            if stage.blend not in self.blends:
                raise _misnamed(f"stages.{name}.blend", "blend", stage.blend, self.blends)
            wanted, kind = ALGORITHM_BLENDS[stage.algorithm], self.blends[stage.blend].kind
            if kind != wanted:
                raise PydanticCustomError(
                    "unfit",
                    "{algorithm} trains on {wanted}, but blend {blend} holds {kind}",
                    {
                        "at": f"stages.{name}.blend",
                        "algorithm": stage.algorithm,
                        "wanted": wanted,
                        "blend": stage.blend,
                        "kind": kind,
                    },
                )
        self._evaluation_has_rows()
        for at, names, taken in (("stages", self.stages, TAKEN_STAGES), ("blends", self.blends, TAKEN_BLENDS)):
            for name in taken & names.keys():
                raise PydanticCustomError(
                    "taken",
                    "the results folder has a {name}/ of its own; choose another name",
                    {"at": f"{at}.{name}", "name": name},
                )
        try:
            self.stage_order()
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise PydanticCustomError(
                "cycle", "the stages start from each other: {cycle}", {"at": "stages", "cycle": cycle}
            ) from None
        return self

    def _evaluation_has_rows(self) -> None:
        prompts = [name for name, blend in self.blends.items() if blend.kind == "prompts"]
        for name in self.evaluation.blends or ():
            if name not in prompts:
                raise _misnamed("evaluation.blends", "blend of prompts", name, prompts)
        if not self.evaluation_blends():
            raise PydanticCustomError("no_rows", "no blend of prompts to take held-out rows from", {"at": "evaluation"})

    def stage_order(self) -> list[str]:
        """The stages' names, parents before children, otherwise in the recipe's order."""
        parents = {name: [stage.parent] if stage.parent else [] for name, stage in self.stages.items()}
        return list(TopologicalSorter(parents).static_order())

    def evaluation_blends(self) -> list[str]:
        """The blends whose validation rows are scored."""
        return self.evaluation.blends or [name for name, blend in self.blends.items() if blend.kind == "prompts"]


def _misnamed(at: str, what: str, name: str, valid: Iterable[str]) -> PydanticCustomError:
    return PydanticCustomError(
        "unknown_name",
        "no {what} is named {name}{hint}",
        {"at": at, "what": what, "name": name, "hint": nearest(name, valid)},
    )


class Config(Strict):
    """config/config.yaml: what a user edits first."""

    recipe: str = Field(description="Path of the recipe, from the repository's root.")
    site: str = Field(description="Path of the site, from the repository's root.")
    run: Name | None = Field(None, description="Results go to results/<run>/; none: to results/.")
    results: str = Field("results", description="Where results go.")
    seed: int | None = Field(None, description="Instead of the recipe's.")
    over_budget: bool = Field(False, description="Train although the plan exceeds the site's budget_gpu_hours.")

    @property
    def folder(self) -> str:
        """The folder that this run's results go to."""
        return f"{self.results}/{self.run}" if self.run else self.results
