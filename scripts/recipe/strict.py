"""The base of all typed models: unknown keys are refused with the nearest known key."""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scripts.recipe.effect import RESOLVED, Effect, effect_of


def matching(pattern: str) -> Any:
    """Return the type of texts that match a regular expression."""
    return Annotated[str, StringConstraints(pattern=pattern)]


NAME = r"^[a-z0-9][a-z0-9_.-]*$"
Name = matching(NAME)
Text = Annotated[str, StringConstraints(min_length=1)]
MEMORY = re.compile(r"(\d+)([MGT])")


def _megabytes(value: object) -> object:
    """Convert Slurm's memory, such as 64G, to MB, of 1024 KB each."""
    if not isinstance(value, str) or value.isdecimal():
        return value
    if (size := MEMORY.fullmatch(value)) is None:
        raise invalid(f"must be a number of MB, or one with M, G or T, such as 64G, not {value}")
    return int(size[1]) * 1024 ** "MGT".index(size[2])


def _amount(value: object) -> object:
    """Refuse a value that is neither a whole number nor a share, in one sentence for both types."""
    with suppress(TypeError, ValueError):
        number = float(value)
        if not isinstance(value, bool) and (0 < number < 1 or (number >= 1 and number.is_integer())):
            return value
    raise invalid(f"must be a whole number, or a share between 0 and 1, not {value}")


def _written_out(path: str) -> str:
    """Refuse a path with a sign that only a shell expands."""
    if sign := re.match(r"~|\$(?=[A-Za-z{])", path):
        raise invalid(f"begins with {sign[0]}, which only a shell expands; write the whole path, {Path.home()}/...")
    return path


Memory = Annotated[NonNegativeInt, BeforeValidator(_megabytes, json_schema_input_type=int | str)]
Amount = Annotated[PositiveInt | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(_amount)]
Place = Annotated[str, AfterValidator(_written_out)]


WORDS = yaml.safe_load(Path(__file__).with_name("elsewhere.yaml").read_text(encoding="utf-8"))
ELSEWHERE = {theirs: ours for ours, words in WORDS.items() for theirs in words}


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the closest valid word, or the list of all without a close word."""
    words = sorted(words)
    if word.lower() in words:
        return f"; did you mean {word.lower()}?"
    if word.lower() in ELSEWHERE:
        return f"; here that is {ELSEWHERE[word.lower()]}"
    longer = [each for each in words if len(word) > 2 and word in each]
    close = longer if len(longer) == 1 else difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(words)}"


def invalid(message: str, at: str | None = None, **key: str) -> PydanticCustomError:
    """Return the error of a misfit; `at` is the key in the file, `key` the one in its section, if not the validated."""
    return PydanticCustomError("invalid", "{message}", {"message": message} | ({"at": at} if at else {}) | key)


def refuse_misnamed(at: str, what: str, name: str | None, valid: Iterable[str], also: Iterable[str] = ()) -> None:
    """Refuse a key `at` with a name neither among the `valid`, of which the hint is, nor in `also`; None is none."""
    if name is not None and name not in {*valid, *also}:
        raise invalid(f"no {what} is named {name}{nearest(name, valid)}", at)


NUMBERS = (int, float, int | None, float | None)


class Strict(BaseModel):
    """Refuse unknown keys with the nearest known key, and keys in `gone` with their sentence.

    `gone` maps a key of an earlier version to a sentence: what to do instead. Subclasses inherit the entries.
    `effects` has the fields that are marked (scripts.recipe.effect). `_refuse_misfits` of every class, parents first,
    refuses values that do not fit together; those of a resolved config were checked in the recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    gone: ClassVar[dict[str, str]] = {}
    effects: ClassVar[dict[str, Effect]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        """Collect the marks of the fields."""
        super().__pydantic_init_subclass__(**more)
        marks = {name: effect_of(field) for name, field in cls.model_fields.items()}
        cls.effects = {name: mark for name, mark in marks.items() if mark is not None}

    @classmethod
    def keys_of_recipes(cls) -> list[str]:
        """Return the keys that a recipe may have: all but facts."""
        return [name for name in cls.model_fields if cls.effects.get(name) is not Effect.FACT]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, dict):
            for key in data:
                is_fact = cls.effects.get(key) is Effect.FACT
                if key not in cls.model_fields or (is_fact and info.context != RESOLVED):
                    context = {"key": str(key), "message": cls._instead_of(key)}
                    raise PydanticCustomError("unknown_key", "{message}", context)
                if isinstance(data[key], bool) and cls.model_fields[key].annotation in NUMBERS:
                    raise invalid(f"{key} is a number; YAML reads yes, no, on and off as true and false")
        return data

    @classmethod
    def _instead_of(cls, key: Any) -> str:
        """Return what to do instead of an unknown key."""
        gone = next((base.gone[key] for base in cls.__mro__ if key in vars(base).get("gone", ())), None)
        if gone:
            return f"is gone: {gone}"
        within = None if str(key).lower() in ELSEWHERE else next(_paths(cls, str(key)), None)
        meant = f"; did you mean {within}?" if within else nearest(str(key), cls.keys_to_mean())
        return f"unknown key{meant}"

    @classmethod
    def keys_to_mean(cls) -> Iterable[str]:
        """Return the keys that a misspelt key may mean."""
        return cls.keys_of_recipes()

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> Self:
        if info.context == RESOLVED:
            return self
        for base in reversed(type(self).__mro__):
            if refuse := vars(base).get("_refuse_misfits"):
                refuse(self)
        return self

    @classmethod
    def of_config(cls, values: dict[str, Any]) -> Self:
        """Return the settings that a resolved config's values describe; ValidationError where they describe none."""
        return cls.model_validate(values, context=RESOLVED)

    def values_with_effect(self) -> dict[str, Any]:
        """Return the plain values that may change a stage's weights, as a resolved config has them."""
        return self.model_dump(mode="json", exclude=self._left_out())

    def _left_out(self) -> dict[str, Any]:
        """Return what a resolved config leaves out of these settings, sections included, as pydantic's `exclude`."""
        left_out: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            mark, value = self.effects.get(name), getattr(self, name)
            is_off = mark is Effect.LATER and value == field.default
            if is_off or mark in (Effect.NONE, Effect.FACT):
                left_out[name] = True
            elif inner := _left_out_of(value):
                left_out[name] = inner
        return left_out


def _left_out_of(value: Any) -> dict[str, Any]:
    """Return what a resolved config leaves out of a section, or of sections by name; empty: nothing."""
    if isinstance(value, Strict):
        return value._left_out()
    if isinstance(value, dict):
        parts = {key: _left_out_of(part) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part}
    return {}


def _paths(model: type[Strict], key: str) -> Iterator[str]:
    """Yield the dotted names of the fields called `key` in the sections of a model that a recipe may have."""
    for name in model.keys_of_recipes():
        field = model.model_fields[name]
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Strict):
                within = [key] if key in kind.model_fields else _paths(kind, key)
                yield from (f"{name}.{path}" for path in within)
