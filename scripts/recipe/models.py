"""Typed models of config.yaml and of a recipe with its stages.

Settings bear NeMo-RL's names and meanings where it has them (``grpo.num_prompts_per_step``,
``loss_fn.reference_policy_kl_penalty``, ``policy.max_total_sequence_length``, ...), so a stage reads the same
whether it trains a tiny model here or NeMo-RL on a cluster.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scripts.recipe.criteria import Criterion
from scripts.recipe.judges import Judges, JudgeServer, Role, check_servers
from scripts.recipe.probe import Probe
from scripts.recipe.reasoning import Reasoning, Share
from scripts.recipe.strict import Strict, nearest

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
RowKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]


class Environment(StrEnum):
    """Names that a row's ``agent_ref.name`` may bear; scripts.rewards holds one verifier for each."""

    MATH = "math_with_judge_simple_agent"
    MCQA = "mcqa_simple_agent"
    STRUCTURED_OUTPUTS = "structured_outputs_simple_agent"
    INSTRUCTION_FOLLOWING = "instruction_following_simple_agent"
    CODE_GEN = "code_gen_simple_agent"
    CALENDAR = "calendar_simple_agent"
    WORKPLACE = "workplace_assistant_simple_agent"
    REASONING_GYM = "reasoning_gym_simple_agent"
    STRING_MATCH = "string_match_simple_agent"
    TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"
    TOOLCALL_SCHEMA = "toolcall_schema_single_step_tool_use_with_argument_comparison_agent"
    SEARCH_PIVOT = "search_pivot_single_step_tool_use_with_argument_comparison_agent"
    SWE_PIVOT = "swe_pivot_single_step_tool_use_with_argument_comparison_agent"
    PARALLEL_TOOL_USE = "parallel_tool_calls_single_step_tool_use_with_argument_comparison_agent"
    GENRM = "genrm_simple_agent"
    GENRM_REASONING_OFF = "genrm_simple_agent_reasoning_off"
    EQUIVALENCE = "equivalence_llm_judge_simple_agent"
    LC_JUDGE = "lc_judge_simple_agent"
    JAILBREAK = "jailbreak_detection_simple_agent"
    JAILBREAK_DISCLAIMER = "jailbreak_engagement_with_disclaimer"
    JAILBREAK_EXPLANATION = "jailbreak_refusal_with_explanation"
    JAILBREAK_HARD_REFUSAL = "jailbreak_hard_refusal_no_redirection"
    JAILBREAK_HELPLINES = "jailbreak_hard_refusal_with_helplines"
    OVER_REFUSAL = "over_refusal_detection_simple_agent"
    XSTEST = "xstest_eval_agent"
    MULTICHALLENGE = "multichallenge_simple_agent"
    INVERSE_IF = "inverse_if_simple_agent"


def _as_environment(name: str) -> str:
    return Environment(name) if name in list(Environment) else name


EnvironmentName = Annotated[Name, AfterValidator(_as_environment)]


class SyntheticSource(Strict):
    """Blends written by scripts.data.synthesize, laid out as the published ones are on the hub."""

    kind: Literal["synthetic"]
    seed: int = Field(0, description="Another seed, another data set.")
    placeholder_share: Share = Field(0.2, description="Share of the math rows written as _hf_placeholder rows.")


class HubSource(Strict):
    """Blends of a dataset repository on the Hugging Face hub."""

    kind: Literal["hub"]
    repository: str
    revision: str = Field("main", description="A commit; a branch is resolved once, and the commit recorded.")


class FolderSource(Strict):
    """Blends in a folder of this machine, laid out as a dataset repository is."""

    kind: Literal["folder"]
    path: str


MMPR_HOLDOUT = 2000
IMAGE_FILES = {
    "mmpr": ("meta.json", "annotations.zip", "images.zip"),
    "mmpr_tiny": ("mmpr_tiny.parquet", "images.zip"),
}


class Blend(Strict):
    """One set of training data."""

    kind: Literal["prompts", "demonstrations", "preferences"] = Field(
        "prompts",
        description="prompts: rows that an environment rewards; demonstrations: rows with the answer to imitate; "
        "preferences: rows with a better and a worse answer.",
    )
    environments: list[EnvironmentName] = Field(
        [], description="Environments whose rows the blend may hold; none: any (NeMo-Gym's own names are free)."
    )
    format: Literal["jsonl", "mmpr", "mmpr_tiny"] = Field(
        "jsonl",
        description="How it is published: rows in a JSONL file, or images with their annotations as OpenGVLab/MMPR or "
        "OpenGVLab/MMPR-Tiny.",
    )
    source: Annotated[HubSource | FolderSource, Field(discriminator="kind")] | None = Field(
        None, description="Instead of the recipe's."
    )
    file: str | None = Field(None, description="Its file in the source; none: the blend's name with .jsonl.")
    reasoning: Reasoning | None = Field(None, description="Demonstrations: how much reasoning some lose; none: none.")
    rows: PositiveInt | None = Field(None, description="Rows to synthesize, held-out rows included.")
    pictures: Share = Field(
        0.0, description="Share of the synthesized math and multiple-choice rows that ask about a picture."
    )
    hallucinated_tools: bool = Field(
        False, description="Synthesized: a spoilt answer to a task with tools calls a tool that is not declared."
    )
    holdout: PositiveInt | Fraction = Field(
        100, description="The last N rows, or this share of all rows, become the validation split."
    )
    test: int = Field(0, ge=0, description="The N rows before those become a test split, which nothing trains on.")
    allow: list[RowKey] = Field([], description="Bad rows to let pass, by the key that scripts.data.check prints.")
    missing_images: Share = Field(0.0, description="Of format mmpr: the share of rows that may lack their image.")

    def published_files(self, name: str) -> dict[str, str]:
        """The files of the blend `name` in its source, by the path they get below ``data/source/``."""
        if self.format == "jsonl":
            return {f"{name}.jsonl": self.file or f"{name}.jsonl"}
        return {f"{name}/{file}": file for file in IMAGE_FILES[self.format]}

    @model_validator(mode="after")
    def _reasoning_is_demonstrated(self) -> "Blend":
        if self.reasoning is not None and self.kind != "demonstrations":
            raise PydanticCustomError("reasoning", "reasoning is for demonstrations; leave it out")
        return self

    @model_validator(mode="after")
    def _fits_its_format(self) -> "Blend":
        if self.format == "jsonl":
            return self
        kind = "preferences" if self.format == "mmpr" else "prompts"
        if self.kind != kind:
            raise PydanticCustomError(
                "format", "{format} holds {kind}: set kind", {"format": self.format, "kind": kind}
            )
        if isinstance(self.holdout, float) or (self.format == "mmpr" and self.holdout != MMPR_HOLDOUT) or self.test:
            raise PydanticCustomError(
                "format",
                "{format} is split by NeMo-RL itself: holdout must be {rows}, and test left out",
                {"format": self.format, "rows": MMPR_HOLDOUT if self.format == "mmpr" else "the stage's data.val_size"},
            )
        return self


class ScratchVision(Strict):
    """A vision tower whose patches stand before the decoder as tokens, as LLaVA's do (arXiv:2304.08485)."""

    image_size: PositiveInt = Field(description="Pixels of a side, to which every picture is scaled.")
    patch_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt


class ScratchModel(Strict):
    """A Llama-shaped decoder with random weights and a byte-level tokenizer, for stages without a parent."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    initializer_range: PositiveFloat = 0.02
    rope_theta: PositiveFloat = 10000.0
    vision: ScratchVision | None = Field(None, description="None: the model sees no pictures.")


class MegatronCheckpoint(Strict):
    """A Megatron checkpoint: one iteration's folder, or the folder above those."""

    path: Annotated[str, StringConstraints(pattern=r"^/[^\s,:]*$")]
    format: Literal["megatron_bridge", "megatron_lm"] = Field(
        "megatron_bridge", description="megatron_bridge has a run_config.yaml; megatron_lm is torch_dist without one."
    )


class PretrainedModel(Strict):
    """The model in Hugging Face's format that the stages without a parent start from."""

    name: str = Field(description="A folder (absolute path) or a repository of the hub.")
    revision: str | None = Field(None, description="Commit of the repository.")
    megatron: MegatronCheckpoint | None = Field(
        None,
        description="Take the weights from there, and from `name` all else (config, tokenizer), where the release can.",
    )


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

    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="What samples them: the model that trains, or vLLM beside it, which gets its weights every step.",
    )
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: PositiveInt


class SftPolicy(Strict):
    """The policy of a supervised stage."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_global_batch_size: PositiveInt = Field(description="Rows a step.")
    optimizer: Optimizer


class PreferencePolicy(Strict):
    """The policy of a preference stage."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and answer together.")
    train_global_batch_size: PositiveInt = Field(description="Pairs a step.")
    optimizer: Optimizer


class GrpoPolicy(Strict):
    """The policy of a reinforcement stage."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_global_batch_size: PositiveInt | None = Field(
        None,
        description="Completions an update; none: all of the step. Fewer make several updates a step, off policy from "
        "the second on.",
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
    use_leave_one_out_baseline: bool = Field(
        False, description="Measure a response by the others of its group alone (arXiv:2402.14740)."
    )


class GrpoLoss(Strict):
    """The clipped policy-gradient loss and its penalty."""

    reference_policy_kl_penalty: float = Field(0.0, ge=0, description="Weight of the k3 KL estimate to the parent.")
    ratio_clip_min: Annotated[float, Field(gt=0)] = 0.2
    ratio_clip_max: Annotated[float, Field(gt=0)] = 0.28
    ratio_clip_c: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Bound of the ratio where the advantage is negative (dual clip, arXiv:1912.09729)."
    )
    token_level_loss: bool = Field(
        True, description="Mean over all tokens of an update (arXiv:2503.14476); false: over responses, each its mean."
    )
    sequence_level_importance_ratios: bool = Field(
        False, description="One ratio a response, the geometric mean of its tokens' (GSPO, arXiv:2507.18071)."
    )
    use_importance_sampling_correction: bool = Field(
        False, description="Weight the loss by the trainer's over vLLM's probability of what vLLM sampled."
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = Field(
        None, description="Bound of that weight (TIS, openreview xsonlP8DRV); none: unbounded."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "GrpoLoss":
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise PydanticCustomError(
                "ratios", "sequence_level_importance_ratios is for token_level_loss: false; a token has no ratio then"
            )
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1 + self.ratio_clip_max:
            raise PydanticCustomError("clip", "ratio_clip_c must be greater than 1 + ratio_clip_max")
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise PydanticCustomError(
                "correction", "truncated_importance_sampling_ratio is for use_importance_sampling_correction: true"
            )
        return self


class Dpo(Strict):
    """Direct preference optimisation (arXiv:2305.18290), pairs in file order."""

    max_num_steps: PositiveInt
    reference_policy_kl_penalty: PositiveFloat = Field(
        0.05, description="beta: how dearly the policy pays for leaving its parent."
    )
    preference_loss_weight: float = Field(1.0, ge=0)
    sft_loss_weight: float = Field(
        0.0, ge=0, description="Of the chosen answers' negative log-likelihood, mean over their tokens."
    )
    preference_average_log_probs: bool = Field(
        False, description="Divide an answer's log-probability by its length in the preference loss."
    )

    @model_validator(mode="after")
    def _learns_something(self) -> "Dpo":
        weights = [name for name in type(self).model_fields if name.endswith("_loss_weight")]
        if not any(getattr(self, name) for name in weights):
            raise PydanticCustomError(
                "no_loss", "nothing would be learnt: {weights} are all 0", {"weights": ", ".join(weights)}
            )
        return self


class Mpo(Dpo):
    """Mixed preference optimisation (arXiv:2411.10442): which answer is better, how good each is, how it is made."""

    preference_loss_weight: float = Field(0.8, ge=0)
    bco_loss_weight: float = Field(
        0.2, ge=0, description="Of the binary classifier loss (BCO, arXiv:2404.04656), without a reward shift."
    )
    sft_loss_weight: float = Field(
        1.0, ge=0, description="Of the chosen answers' negative log-likelihood, mean over their tokens."
    )


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
    mem_mb: int = Field(4000, ge=0, description="Memory of a node; 0: what the partition gives.")
    step_seconds: PositiveFloat | None = Field(
        None,
        description="What a step is expected to take until that is measured; none: all steps fit one allocation.",
    )


class StageBase(Strict):
    """What every stage has, whatever its algorithm."""

    parent: Name | None = Field(
        None, description="The stage whose checkpoint this one starts from; none: the recipe's model."
    )
    blend: Name
    backend: Literal["trl", "nemo_rl"] = "trl"
    seed: int | None = Field(None, description="Instead of the recipe's.")
    checkpointing: Checkpointing = Checkpointing()
    resources: Resources = Resources()
    gate: list[Criterion] = Field([], description="The success criteria; none: the stage always passes.")

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM samples the rollouts of backend trl; envs/vllm.txt is what such a stage trains with."""
        return False


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
    judges: Judges | None = Field(None, description="None: only rows that need no judge are rewarded.")
    judge_servers: dict[Role, JudgeServer] = Field({}, description="Where the judges answer. May change no weight.")
    probe: Probe = Probe()

    @model_validator(mode="after")
    def _judges_are_served(self) -> "GrpoStage":
        check_servers(self.judges, self.judge_servers)
        return self

    @property
    def max_num_steps(self) -> int:
        """The planned step."""
        return self.grpo.max_num_steps

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.grpo.num_prompts_per_step

    @property
    def samples_by_vllm(self) -> bool:
        """Whether vLLM samples the rollouts; otherwise the model that trains does."""
        return self.policy.generation.backend == "vllm"

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "GrpoStage":
        if self.samples_by_vllm and self.parent is None:
            raise PydanticCustomError(
                "no_parent", "policy.generation.backend vllm needs a parent: vLLM starts from its export"
            )
        if self.loss_fn.use_importance_sampling_correction and not self.samples_by_vllm:
            raise PydanticCustomError(
                "correction",
                "loss_fn.use_importance_sampling_correction is for policy.generation.backend: vllm; otherwise what "
                "trains has sampled as well",
            )
        return self

    @model_validator(mode="after")
    def _batches_add_up(self) -> "GrpoStage":
        product = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        stated = self.policy.train_global_batch_size
        if stated is not None and product % stated:
            raise PydanticCustomError(
                "batch",
                "policy.train_global_batch_size is {stated}, but num_prompts_per_step x num_generations_per_prompt = "
                "{product} is no multiple of it; leave it out for one update a step",
                {"stated": stated, "product": product},
            )
        if self.policy.generation.max_new_tokens >= self.policy.max_total_sequence_length:
            raise PydanticCustomError(
                "length",
                "policy.generation.max_new_tokens leaves no room for a prompt in policy.max_total_sequence_length",
            )
        return self


class PreferenceStage(StageBase):
    """What stages of preference optimisation have in common."""

    policy: PreferencePolicy

    @property
    def max_num_steps(self) -> int:
        """The planned step."""
        return getattr(self, self.algorithm).max_num_steps

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        return self.policy.train_global_batch_size

    @model_validator(mode="after")
    def _has_a_reference(self) -> "PreferenceStage":
        if self.parent is None:
            raise PydanticCustomError(
                "no_reference",
                "{algorithm} needs a parent: the reference that it departs from",
                {"algorithm": self.algorithm},
            )
        return self


class DpoStage(PreferenceStage):
    """A stage of direct preference optimisation."""

    algorithm: Literal["dpo"]
    dpo: Dpo


class MpoStage(PreferenceStage):
    """A stage of mixed preference optimisation."""

    algorithm: Literal["mpo"]
    mpo: Mpo


class NemoRlCluster(Strict):
    """How many nodes NeMo-RL gets, in its own words. May change no weight."""

    num_nodes: PositiveInt = Field(description="cluster.num_nodes of its config.")
    judge_nodes: int = Field(0, ge=0, description="Nodes of Gym's judge models (of num_nodes or besides, by release).")
    generation_nodes: int = Field(
        0, ge=0, description="Of num_nodes, those that only generate (asynchronous training); 0: all do both."
    )


class NemoRlStage(StageBase):
    """A stage that NeMo-RL trains, by a config of its own and what is said here over it, in its own keys.

    ``grpo``, ``dpo``, ``mpo``, ``loss_fn``, ``policy``, ``data``, ``env`` and ``logger`` go to the driver as they are.
    """

    backend: Literal["nemo_rl"]
    algorithm: Literal["grpo", "dpo", "mpo"]
    reward: Literal["verifier", "judge", "pairs"] = Field(description="Where the reward comes from.")
    config: str = Field(description="The config's path in NeMo-RL's checkout.")
    entry: str = Field("examples/nemo_gym/run_grpo_nemo_gym.py", description="The driver's path in the checkout.")
    image: str = Field("train", description="The container, by its name in the release or the site.")
    cluster: NemoRlCluster
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
    logger: dict[str, Any] = Field({})
    add: dict[str, Any] = Field({}, description="Settings like those above that the release's config does not have.")
    sandbox: bool = Field(False, description="A sandbox container beside every node's, for code and Lean.")
    sif: bool = Field(False, description="The rows run in containers of their own (site's nemo_rl.sif).")
    pretrained_checkpoint: bool = Field(
        False, description="Take the parent's weights from its checkpoint, not from an export, where the release can."
    )
    launcher: str | None = Field(
        None, description="A launcher of upstream's by its name in the release: the driver gets its variables."
    )
    environment: dict[str, str] = Field({}, description="Variables of the driver. No secrets.")
    overrides: list[str] = Field([], description="Further Hydra overrides; they come last and win.")

    @property
    def rows_per_step(self) -> int:
        """Rows of the training split that one step consumes."""
        if self.algorithm == "grpo":
            return self.grpo["num_prompts_per_step"]
        return self.policy["train_global_batch_size"]

    @property
    def is_asynchronous(self) -> bool:
        """Whether rollouts are generated while the policy trains, in one pass over the data."""
        return bool(self.grpo.get("async_grpo", {}).get("enabled", False))

    @property
    def collects_trajectories(self) -> bool:
        """Whether its driver can roll out the validation rows without training."""
        return self.algorithm == "grpo" and self.entry.endswith("run_grpo_nemo_gym.py")

    @model_validator(mode="after")
    def _fits_its_reward(self) -> "NemoRlStage":
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
    def _batches_add_up(self) -> "NemoRlStage":
        needed = [("policy", "train_global_batch_size"), ("policy", "max_total_sequence_length")]
        if self.algorithm == "grpo":
            needed += [("grpo", "num_prompts_per_step"), ("grpo", "num_generations_per_prompt")]
        for section, key in needed:
            if not isinstance(getattr(self, section).get(key), int):
                raise PydanticCustomError("unstated", "{name} must be stated", {"name": f"{section}.{key}"})
        if self.algorithm != "grpo":
            return self
        product = self.grpo["num_prompts_per_step"] * self.grpo["num_generations_per_prompt"]
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

    @model_validator(mode="after")
    def _nodes_add_up(self) -> "NemoRlStage":
        if self.cluster.generation_nodes >= self.cluster.num_nodes:
            raise PydanticCustomError("nodes", "cluster.generation_nodes leaves no node to train on")
        if self.resources.nodes != 1:
            raise PydanticCustomError("nodes", "resources.nodes follows from cluster here; leave it out")
        return self


def _tag_of(stage: Any) -> str | None:
    """Which model a stage is of: by its backend, or else by its algorithm."""
    get = stage.get if isinstance(stage, dict) else lambda key: getattr(stage, key, None)
    return "nemo_rl" if get("backend") == "nemo_rl" else get("algorithm")


STAGE_TAGS = ("sft", "grpo", "dpo", "mpo", "nemo_rl")
Stage = Annotated[
    Annotated[SftStage, Tag("sft")]
    | Annotated[GrpoStage, Tag("grpo")]
    | Annotated[DpoStage, Tag("dpo")]
    | Annotated[MpoStage, Tag("mpo")]
    | Annotated[NemoRlStage, Tag("nemo_rl")],
    Discriminator(_tag_of),
]
TAKEN_STAGES, TAKEN_BLENDS = {"data", "logs"}, {"source", "filled"}
ALGORITHM_BLENDS = {"sft": "demonstrations", "grpo": "prompts", "dpo": "preferences", "mpo": "preferences"}


class Evaluation(Strict):
    """How held-out scores are taken: every blend's validation rows, one response a row."""

    max_new_tokens: PositiveInt
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    blends: list[Name] | None = Field(None, description="None: every blend of prompts.")
    judges: Judges | None = Field(None, description="None: only rows that need no judge can be scored.")
    judge_servers: dict[Role, JudgeServer] = Field({}, description="Where the judges answer.")

    @model_validator(mode="after")
    def _judges_are_served(self) -> "Evaluation":
        check_servers(self.judges, self.judge_servers)
        return self


BENCHMARKS = ("aime2024", "aime2025", "aime2026", "gpqa", "gpqa_diamond", "math", "math500", "mmlu", "mmlu_pro")


class NemoRlEvaluation(Strict):
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


def _tag_of_evaluation(evaluation: Any) -> str:
    """Whose evaluation it is: its keys say so."""
    keys = evaluation.keys() if isinstance(evaluation, dict) else type(evaluation).model_fields.keys()
    return "by_nemo_rl" if keys & NemoRlEvaluation.model_fields.keys() else "by_trl"


EVALUATION_TAGS = ("by_nemo_rl", "by_trl")


class Recipe(Strict):
    """A model's stages, blends and sources. ``defaults`` holds, by algorithm, settings that its stages share."""

    name: Name
    description: str = ""
    seed: int | None = Field(None, description="Of data and training; none: 0, and in NeMo-RL its config's.")
    license: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")] | None = Field(
        None, description="Of the trained models, by the hub's name of it, for their cards; none: the cards state none."
    )
    release: Name | None = Field(None, description="Of NeMo-RL, by its name in envs/nemo-rl.yaml.")
    note: str | None = Field(None, description="What to know before training it; the doctor and the plan say it.")
    source: Annotated[SyntheticSource | HubSource | FolderSource, Field(discriminator="kind")]
    tables: dict[str, str] = Field(
        {}, description="Revision, by dataset repository, of the external tables of placeholder rows; none: main."
    )
    model: ScratchModel | PretrainedModel
    environments: dict[Name, str] = Field(
        {}, description="Your own: the Python file, by name, whose functions reward the rows that bear the name."
    )
    blends: dict[Name, Blend]
    evaluation: (
        Annotated[
            Annotated[Evaluation, Tag("by_trl")] | Annotated[NemoRlEvaluation, Tag("by_nemo_rl")],
            Discriminator(_tag_of_evaluation),
        ]
        | None
    ) = Field(None, description="None: no held-out scores; the stages' metrics judge.")
    defaults: dict[Literal["sft", "grpo", "dpo", "mpo"], dict[str, Any]] = Field({})
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
        self._sources_fit()
        self._backends_fit()
        self._samplers_fit()
        self._images_fit()
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

    def _sources_fit(self) -> None:
        if not isinstance(self.source, SyntheticSource):
            return
        for name, blend in self.blends.items():
            for key, differs in (("source", blend.source is not None), ("format", blend.format != "jsonl")):
                if differs:
                    raise PydanticCustomError(
                        "synthetic",
                        "the recipe's blends are synthetic, which this one cannot be; make source a hub or a folder",
                        {"at": f"blends.{name}.{key}"},
                    )

    def _backends_fit(self) -> None:
        backends = {stage.backend for stage in self.stages.values()}
        if backends == {"nemo_rl"}:
            if self.release is None:
                raise PydanticCustomError("no_release", "names no NeMo-RL release", {"at": "release"})
            if not isinstance(self.model, PretrainedModel):
                raise PydanticCustomError(
                    "scratch", "NeMo-RL starts from a pretrained model: give its name", {"at": "model"}
                )
            if isinstance(self.evaluation, Evaluation):
                raise PydanticCustomError(
                    "evaluation",
                    "these keys are for backend trl; NeMo-RL takes held_out, benchmarks and nodes",
                    {"at": "evaluation"},
                )
        elif backends != {"trl"}:
            raise PydanticCustomError("backends", "either all stages train by nemo_rl or none does", {"at": "stages"})
        elif not isinstance(self.model, ScratchModel):
            raise PydanticCustomError(
                "pretrained", "backend trl starts from a fresh model: give its shape", {"at": "model"}
            )
        elif self.evaluation is None:
            raise PydanticCustomError("no_evaluation", "is missing", {"at": "evaluation"})
        elif isinstance(self.evaluation, NemoRlEvaluation):
            raise PydanticCustomError(
                "evaluation", "held_out, benchmarks and nodes are for NeMo-RL", {"at": "evaluation"}
            )
        if backends == {"trl"}:
            for name, blend in self.blends.items():
                if blend.kind != "preferences" or self.source.kind == "synthetic":
                    _check_environments(f"blends.{name}.environments", blend.environments, self.environments)
                if blend.pictures and self.model.vision is None:
                    raise PydanticCustomError(
                        "blind",
                        "the model has no vision, by which it would see them",
                        {"at": f"blends.{name}.pictures"},
                    )
        self._own_environments_fit(backends)

    def _samplers_fit(self) -> None:
        for name, stage in self.stages.items():
            if stage.samples_by_vllm and isinstance(self.model, ScratchModel) and self.model.vision is not None:
                raise PydanticCustomError(
                    "vllm_vision",
                    "vllm samples for models without vision only; make it transformers",
                    {"at": f"stages.{name}.policy.generation.backend"},
                )

    def _own_environments_fit(self, backends: set[str]) -> None:
        for name in self.environments:
            if backends == {"nemo_rl"}:
                raise PydanticCustomError(
                    "environments", "NeMo-RL's environments are NeMo-Gym's; leave them out", {"at": "environments"}
                )
            if name in list(Environment):
                raise PydanticCustomError(
                    "taken", "an environment has this name already; choose another", {"at": f"environments.{name}"}
                )

    def _images_fit(self) -> None:
        for name, stage in self.stages.items():
            blend = self.blends[stage.blend]
            if blend.format != "jsonl" and stage.backend != "nemo_rl":
                raise PydanticCustomError("images", "only NeMo-RL trains on images", {"at": f"stages.{name}.blend"})
            if blend.format == "mmpr_tiny" and stage.data.get("val_size") != blend.holdout:
                raise PydanticCustomError(
                    "val_size",
                    "must be the holdout of blend {blend}, {rows}",
                    {"at": f"stages.{name}.data.val_size", "blend": stage.blend, "rows": blend.holdout},
                )

    def _evaluation_has_rows(self) -> None:
        if isinstance(self.evaluation, NemoRlEvaluation):
            if self.evaluation.held_out and not self.scored_stages():
                raise PydanticCustomError(
                    "no_stage", "no stage of GRPO on Gym's environments, whose driver scores", {"at": "evaluation"}
                )
            return
        if self.evaluation is None:
            return
        prompts = [name for name, blend in self.blends.items() if blend.kind == "prompts"]
        for name in self.evaluation.blends or ():
            if name not in prompts:
                raise _misnamed("evaluation.blends", "blend of prompts", name, prompts)
        if not self.evaluation_blends():
            raise PydanticCustomError("no_rows", "no blend of prompts to take held-out rows from", {"at": "evaluation"})
        scored = [name for blend in self.evaluation_blends() for name in self.blends[blend].environments]
        for name, stage in self.stages.items():
            for place, criterion in enumerate(stage.gate):
                if criterion.environment not in (None, *scored):
                    at = f"stages.{name}.gate.{place}.environment"
                    raise _misnamed(at, "held-out environment", criterion.environment, scored)

    def seed_of(self, name: str) -> int | None:
        """What a stage's training is seeded with; None: NeMo-RL's config says it."""
        stage = self.stages[name]
        default = None if stage.backend == "nemo_rl" else 0
        return next((seed for seed in (stage.seed, self.seed) if seed is not None), default)

    def stage_order(self) -> list[str]:
        """The stages' names, parents before children, otherwise in the recipe's order."""
        parents = {name: [stage.parent] if stage.parent else [] for name, stage in self.stages.items()}
        return list(TopologicalSorter(parents).static_order())

    def evaluation_blends(self) -> list[str]:
        """The blends whose validation rows are scored."""
        if not isinstance(self.evaluation, Evaluation):
            return []
        return self.evaluation.blends or [name for name, blend in self.blends.items() if blend.kind == "prompts"]

    def scored_stages(self) -> list[str]:
        """The stages that get held-out scores, parents before children."""
        if isinstance(self.evaluation, NemoRlEvaluation):
            scores = self.evaluation.held_out
            return [name for name in self.stage_order() if scores and self.stages[name].collects_trajectories]
        return self.stage_order() if self.evaluation else []


def _check_environments(at: str, names: list[str], own: Iterable[str]) -> None:
    """Refuse names that neither a verifier of ours nor one of the user's `own` bears, and none at all."""
    if not names:
        raise PydanticCustomError("no_environment", "names no environment", {"at": at})
    known = [*Environment, *own]
    for place, name in enumerate(names):
        if name not in known:
            raise PydanticCustomError(
                "unknown_environment",
                "'{name}' is not known{hint}",
                {"at": f"{at}.{place}", "name": name, "hint": nearest(name, known)},
            )


def _misnamed(at: str, what: str, name: str, valid: Iterable[str]) -> PydanticCustomError:
    return PydanticCustomError(
        "unknown_name",
        "no {what} is named {name}{hint}",
        {"at": at, "what": what, "name": name, "hint": nearest(name, valid)},
    )


class Tracking(Strict):
    """Where published stages are logged in Weights & Biases. The API key stays in the environment (WANDB_API_KEY)."""

    project: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,128}$")]
    entity: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,128}$")] | None = Field(
        None, description="Team or user; none: the account's own."
    )


class Config(Strict):
    """config/config.yaml: what a user edits first."""

    recipe: str = Field(description="Path of the recipe, from the repository's root.")
    site: str = Field(description="Path of the site, from the repository's root.")
    run: Name | None = Field(None, description="Results go to results/<run>/; none: to results/.")
    sample: PositiveInt | None = Field(
        None, description="For a trial: only N training rows of each blend; results go to a folder sample-N."
    )
    results: str = Field("results", description="Where results go.")
    seed: int | None = Field(None, description="Instead of the recipe's.")
    model: str | None = Field(None, description="Name of the pretrained model to start from, instead of the recipe's.")
    over_budget: bool = Field(False, description="Train although the plan exceeds the site's budget_gpu_hours.")
    tracking: Tracking | None = Field(None, description="Log published stages to W&B; none: nothing is logged.")

    @property
    def folder(self) -> str:
        """The folder that this run's results go to."""
        parts = [self.results, self.run, f"sample-{self.sample}" if self.sample else None]
        return "/".join(part for part in parts if part)
