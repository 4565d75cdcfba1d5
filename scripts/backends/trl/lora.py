"""Settings of low-rank adapters."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator
from pydantic.json_schema import SkipJsonSchema

from scripts.recipe.strict import Strict, invalid


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685), by peft. The export has them merged."""

    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="The adapters' sum is weighed by alpha / dim.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str] = Field([], description="Names of the linear layers; none: all of them but the output's.")
    exclude_modules: list[str] = Field([])
    target_parameters: list[str] = Field(
        [], description="Names of parameters that are no linear layer's, as mlp.experts.down_proj of fused experts."
    )
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
