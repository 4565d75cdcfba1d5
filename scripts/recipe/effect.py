"""Marks of a field: what it has to do with a stage's weights, stated once, where the field is declared.

A field without a mark may change the weights, so a resolved config has it always::

    lr: PositiveFloat
    shuffle: Later[bool] = False
    checkpointing: WithoutEffect[Checkpointing] = Checkpointing()
    release: Fact[dict[str, str]] = {}
"""

from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticKnownError

Value = TypeVar("Value")

RESOLVED = "resolved"
"""The context of validation for the values of a resolved config; a recipe's values have none."""


class Effect(Enum):
    """What a field has to do with a stage's weights."""

    NONE = "changes no weight but for rounding and random numbers: in a recipe only"
    LATER = "came after results were stored: in a resolved config only where it is not at its default"
    FACT = "is found out when a stage is resolved: in a resolved config only"


WithoutEffect = Annotated[Value, Effect.NONE]
Later = Annotated[Value, Effect.LATER]
Fact = Annotated[Value, SkipJsonSchema(), Effect.FACT]


def effect_of(field: FieldInfo) -> Effect | None:
    """Return the mark of a field; None: it may change the weights, and always could."""
    return next((mark for mark in field.metadata if isinstance(mark, Effect)), None)


def _is_in_recipe(value: Any, inner: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Refuse a recipe without the value, which a resolved config lacks."""
    if value is not None:
        return inner(value)
    if info.context == RESOLVED:
        return None
    raise PydanticKnownError("missing")


NeededInRecipe = Annotated[
    Value,
    Effect.NONE,
    WrapValidator(_is_in_recipe),
    Field(validate_default=True, json_schema_extra=lambda schema: schema.pop("default", None)),
]
"""A field without effect, by default None, that a recipe must have."""
