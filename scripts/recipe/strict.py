"""What every typed model of ours is built on: unknown keys are refused, and the nearest known one is named."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean ...?` with the closest of the valid words, or the list of them when none is close."""
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid: {', '.join(words)}"


def invalid(message: str, at: str | None = None) -> PydanticCustomError:
    """The error of a value that does not fit; `at` is its key in the file, if not what is being validated."""
    return PydanticCustomError("invalid", "{message}", {"message": message} | ({"at": at} if at else {}))


def misnamed(at: str, what: str, name: str, valid: Iterable[str]) -> PydanticCustomError:
    """The error of a key `at` which something is named that is not there."""
    return invalid(f"no {what} is named {name}{nearest(name, valid)}", at)


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
