"""Settings of a policy, for every algorithm of backend `trl`: optimizer, adapters, precision, placement."""

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic.json_schema import SkipJsonSchema

from scripts.recipe.sampling import Tokenizer
from scripts.recipe.source import Share
from scripts.recipe.strict import Strict, invalid


class Optimizer(Strict):
    """AdamW; the rate rises linearly over the warm-up steps, then follows the schedule."""

    ADDED = ("lr_warmup_init", "name")

    lr: PositiveFloat
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up; cosine and linear end at 0."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_init: NonNegativeFloat | None = None
    """The first step's rate in a warm-up; none: lr / lr_warmup_iters, and 0 as it was before."""
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    clip_grad: PositiveFloat = 1.0
    name: Literal["adamw_torch", "adamw_torch_fused"] = "adamw_torch_fused"


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685), by peft, merged at export."""

    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="The adapters' sum is weighed by alpha / dim.")
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] = Field([], description="Names of the linear layers; none: all but the output layer.")
    exclude_modules: list[str] = Field([])
    target_parameters: list[str] = Field([])
    """Names of parameters outside linear layers, as mlp.experts.down_proj of fused experts."""
    from_parent: SkipJsonSchema[bool] = False  # stays: the identity of every stage with adapters contains it
    quantization: Literal["nf4"] | None = Field(
        None,
        description="Hold the frozen weights in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes (not tried on a GPU, "
        "but on a CPU).",
    )

    @field_validator("from_parent")
    @classmethod
    def _is_gone(cls, value: bool) -> bool:
        if value:
            raise invalid("is gone: an export has its adapters merged; leave the key out, and train new ones over it")
        return value


class Dtensor(Strict):
    """The model's layout over the training processes. May change no weight but for rounding."""

    gone: ClassVar = {
        "cpu_offload": "leave it out; adapters (policy.lora) or more processes need less of a GPU's memory",
        "reshard_after_forward": "leave it out; gathered weights are never kept for the backward pass",
    }

    enabled: bool = False
    """FSDP2: every process holds a share of weights, gradients and moments; false: a copy of all."""
    activation_checkpointing: bool = Field(False, description="Compute activations again instead of keeping all.")


class Policy(Strict):
    """Settings of every algorithm's policy."""

    PLACING = ("train_micro_batch_size", "dtensor_cfg")
    ADDED = ("precision", "attn_implementation", "lora", "tokenizer", "truncation_mode", "skip_padding")

    max_total_sequence_length: PositiveInt = Field(description="Tokens of prompt and response together.")
    train_micro_batch_size: PositiveInt | None = None
    """Rows of a process at once; none: the process's whole share of a batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; trained weights stay in float32."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None = None
    """None: transformers' choice for the model; flash_attention needs a GPU (not tried on a GPU)."""
    dtensor_cfg: Dtensor = Dtensor()
    lora: Lora | None = Field(None, description="None: all weights are trained.")
    tokenizer: Tokenizer = Tokenizer()
    skip_padding: bool = False
    """Compute nothing for padding, ended responses and tokens without loss: the same losses but for rounding."""
    optimizer: Optimizer
