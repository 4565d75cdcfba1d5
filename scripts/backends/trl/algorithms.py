"""The settings of the algorithms that backend `trl` trains by: policy, loss, sampling."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from scripts.backends.trl.lora import Lora
from scripts.recipe.reasoning import Share
from scripts.recipe.sampling import Sampling
from scripts.recipe.strict import Strict, invalid
from scripts.recipe.tokenizer import Tokenizer


def leave_out(values: dict[str, Any], settings: Strict) -> None:
    """Take from a section's values the settings that only place work, and the added ones that are their default."""
    stated = settings.model_dump(exclude_defaults=True)
    for name in (*settings.PLACING, *(name for name in settings.ADDED if name not in stated)):
        values.pop(name, None)


class Optimizer(Strict):
    """AdamW; the rate rises linearly over the warm-up steps, then follows the schedule."""

    PLACING: ClassVar[tuple[str, ...]] = ()
    ADDED: ClassVar[tuple[str, ...]] = ("name",)

    lr: PositiveFloat
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="After the warm-up; cosine and linear end at 0."
    )
    lr_warmup_iters: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    clip_grad: float = Field(1.0, gt=0)
    name: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit"] = Field(
        "adamw_torch_fused",
        description="8bit keeps its moments in 8 bits, by bitsandbytes on a GPU (not tried on one).",
    )


class VllmEngine(Strict):
    """How vLLM lies on its GPUs. May change no weight but for rounding and the random numbers drawn."""

    tensor_parallel_size: PositiveInt = Field(1, description="GPUs that share a layer; colocated: processes.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Share of a GPU's memory that it takes; none: 0.3 colocated, 0.9 served."
    )
    enforce_eager: bool = Field(False, description="Compile nothing and capture no CUDA graphs; so on a CPU always.")
    enable_sleep_mode: bool = Field(False, description="Colocated: give that memory back while the trainer updates.")


class GenerationResources(Strict):
    """What vLLM has to itself."""

    gpus_per_node: PositiveInt | None = Field(None, description="GPUs; none: vllm_cfg.tensor_parallel_size.")
    num_nodes: Literal[1] | None = Field(
        None, description="1: a node of the stage's own, since TRL talks to one server; none: GPUs of the trainer's."
    )


class Colocated(Strict):
    """Whether vLLM lies in the trainer's processes, on their GPUs, or is served on others."""

    enabled: bool = Field(True, description="False: the stage starts, watches and ends a vLLM server.")
    resources: GenerationResources = GenerationResources()

    @model_validator(mode="after")
    def _shares_no_resources(self) -> "Colocated":
        if self.enabled and self.resources != GenerationResources():
            raise invalid("resources are for enabled: false; colocated vLLM has the trainer's")
        return self


class Generation(Sampling):
    """How rollouts are sampled."""

    PLACING: ClassVar[tuple[str, ...]] = ("vllm_cfg", "colocated")
    """Settings that change no weight but for rounding and random numbers."""
    ADDED: ClassVar[tuple[str, ...]] = (
        "top_k",
        "min_p",
        "stop_strings",
        "stop_token_ids",
        "paged",
        "max_tool_calling_iterations",
    )
    """Settings that a resolved config has only where they are not the default."""

    backend: Literal["transformers", "vllm"] = Field(
        "transformers",
        description="What samples them: the model that trains, or vLLM beside it, which gets its weights every step.",
    )
    paged: bool = Field(
        False, description="transformers: sample by paged attention, with new rows where others ended (text only)."
    )
    vllm_cfg: VllmEngine = VllmEngine()
    colocated: Colocated = Colocated()

    @model_validator(mode="after")
    def _fits_its_sampler(self) -> "Generation":
        if self.backend != "vllm" and (self.vllm_cfg != VllmEngine() or self.colocated != Colocated()):
            raise invalid("vllm_cfg and colocated are for backend: vllm")
        if self.backend == "vllm" and self.paged:
            raise invalid("paged is for backend: transformers; vLLM pages always")
        if self.paged and self.stop_strings:
            raise invalid("paged sampling knows no stop_strings; give stop_token_ids, or leave paged out")
        gpus = self.colocated.resources.gpus_per_node
        if gpus is not None and gpus % self.vllm_cfg.tensor_parallel_size:
            raise invalid("colocated.resources.gpus_per_node must be a multiple of vllm_cfg.tensor_parallel_size")
        return self


class Dtensor(Strict):
    """How a model is laid over the processes that train it. May change no weight but for rounding."""

    enabled: bool = Field(
        False, description="FSDP2: each process holds a share of weights, gradients and moments; false: a copy of all."
    )
    cpu_offload: bool = Field(False, description="A GPU's shares wait in the node's memory (not tried on a GPU).")
    reshard_after_forward: bool = Field(
        True, description="Weights are gathered again for the backward pass; false: kept since the forward (ZeRO-2)."
    )
    activation_checkpointing: bool = Field(False, description="Compute activations again instead of keeping them.")

    @model_validator(mode="after")
    def _offloads_shares(self) -> "Dtensor":
        if self.cpu_offload and not self.enabled:
            raise invalid("cpu_offload is for enabled: true")
        return self


class SequencePacking(Strict):
    """How the rows of a micro-batch lie in it. May change no weight but for rounding."""

    enabled: bool = Field(
        False,
        description="One after the other without padding, none seeing another; false: padded to the longest. With "
        "attn_implementation eager or sdpa the memory grows with the square of the micro-batch's tokens.",
    )


class Policy(Strict):
    """What the policies of all algorithms have in common."""

    PLACING: ClassVar[tuple[str, ...]] = ("train_micro_batch_size", "dtensor_cfg", "sequence_packing")
    """Settings that change no weight but for rounding."""
    ADDED: ClassVar[tuple[str, ...]] = ("precision", "attn_implementation", "lora", "tokenizer", "truncation_mode")
    """Settings that a resolved config has only where they are not the default."""

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_micro_batch_size: PositiveInt | None = Field(
        None, description="Rows that a process takes at once, the rest after them; none: all of its share of a batch."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What is computed in; the weights that are trained stay in float32."
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = Field(
        None, description="None: what transformers takes for the model; flash_attention needs a GPU (not tried on one)."
    )
    dtensor_cfg: Dtensor = Dtensor()
    lora: Lora | None = Field(None, description="None: all weights are trained.")
    tokenizer: Tokenizer = Tokenizer()
    optimizer: Optimizer

    @model_validator(mode="after")
    def _can_share_its_moments(self) -> "Policy":
        if self.dtensor_cfg.enabled and self.optimizer.name == "adamw_8bit":
            raise invalid("optimizer.name adamw_8bit keeps moments that dtensor_cfg.enabled cannot share out; drop one")
        return self


class SftPolicy(Policy):
    """The policy of a supervised stage."""

    train_global_batch_size: PositiveInt = Field(description="Rows a step.")
    sequence_packing: SequencePacking = SequencePacking()


class PreferencePolicy(Policy):
    """The policy of a preference stage."""

    train_global_batch_size: PositiveInt = Field(description="Pairs a step.")
    truncation_mode: Literal["keep_start"] | None = Field(
        None, description="Keep the start of answers that do not fit after their prompt; none: they are refused."
    )


class GrpoPolicy(Policy):
    """The policy of a reinforcement stage."""

    train_global_batch_size: PositiveInt | None = Field(
        None,
        description="Completions an update; none: all of the step. Fewer make several updates a step, off policy from "
        "the second on.",
    )
    generation: Generation


class PromptData(Strict):
    """Which rows of the split are trained on."""

    max_input_seq_length: PositiveInt | None = Field(
        None, description="Rows whose prompt has more tokens are left out; none: a prompt that does not fit is refused."
    )


class Sft(Strict):
    """Supervised fine-tuning on the assistant's tokens, rows in file order."""

    PLACING: ClassVar[tuple[str, ...]] = ()
    ADDED: ClassVar[tuple[str, ...]] = ("assistant_only_loss",)

    max_num_steps: PositiveInt
    assistant_only_loss: bool = Field(
        False,
        description="Learn every message of the assistant's; false: the last one alone. Needs {% generation %} in the "
        "chat template, or a row that proves by its tokens where each begins and ends.",
    )


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
            raise invalid("sequence_level_importance_ratios is for token_level_loss: false; a token has no ratio then")
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1 + self.ratio_clip_max:
            raise invalid("ratio_clip_c must be greater than 1 + ratio_clip_max")
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise invalid("truncated_importance_sampling_ratio is for use_importance_sampling_correction: true")
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
            raise invalid(f"nothing would be learnt: {', '.join(weights)} are all 0")
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
