"""The settings of adapters, and those that a stage has from the parent whose adapters it trains on."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from scripts.errors import UserError
from scripts.recipe.strict import Strict

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe
    from scripts.recipe.stage import StageSettings


class Lora(Strict):
    """Low-rank adapters (arXiv:2106.09685), by peft: what they are laid over stays as the parent left it."""

    dim: PositiveInt = Field(8, description="Rank.")
    alpha: PositiveInt = Field(32, description="The adapters' sum is weighed by alpha / dim.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: list[str] = Field([], description="Names of the linear layers; none: all of them but the output's.")
    exclude_modules: list[str] = Field([])
    target_parameters: list[str] = Field(
        [], description="Names of parameters that are no linear layer's, as mlp.experts.down_proj of fused experts."
    )
    from_parent: bool = Field(
        False,
        description="Go on with the parent's adapters, over the same base, instead of new ones over the merged model.",
    )
    quantization: Literal["nf4"] | None = Field(
        None,
        description="Hold what the adapters are laid over in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes (not "
        "tried on a GPU, but on a CPU).",
    )


def with_parents_shape(stage: "StageSettings", recipe: "Recipe", key: Callable[..., str]) -> "StageSettings":
    """A stage that goes on with its parent's adapters, with their settings; UserError by `key` where it says others."""
    lora, parent = stage.policy.lora, recipe.settings_of(stage.parent) if stage.parent else None
    theirs = getattr(getattr(parent, "policy", None), "lora", None)
    if theirs is None:
        raise UserError(f"{key('from_parent')}: the stage has no parent that trains adapters on backend trl")
    if theirs.from_parent:
        theirs = with_parents_shape(parent, recipe, key).policy.lora
    shape = theirs.model_dump(exclude={"from_parent", "quantization"})
    for field in lora.model_fields_set & shape.keys():
        if getattr(lora, field) != shape[field]:
            raise UserError(f"{key(field)}: the adapters of {stage.parent} have {shape[field]}; leave it out")
    policy = stage.policy.model_copy(update={"lora": lora.model_copy(update=shape)})
    return stage.model_copy(update={"policy": policy})
