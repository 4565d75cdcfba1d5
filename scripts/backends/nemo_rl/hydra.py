"""Hydra overrides: settings as NeMo-RL's drivers take them on their command line."""

import math
import re
from collections.abc import Iterator
from typing import Any

from scripts.recipe.settings import leaves

_PLAIN = re.compile(r"[A-Za-z0-9_./@-]*[A-Za-z_/@-][A-Za-z0-9_./@-]*")
_OTHER_MEANING = {"true", "false", "null", "inf", "nan", "yes", "no", "on", "off"}
_NUMBER_LIKE = re.compile(r"[+-]?[0-9_.]+([eE][+-]?[0-9]+)?")


def overrides_of(settings: dict[str, Any]) -> Iterator[str]:
    """The overrides ``key=value`` of nested settings, one for each leaf; an empty mapping sets nothing."""
    return (f"{name}={hydra_value(value)}" for name, value in leaves(settings))


def hydra_value(value: Any) -> str:
    """A value in Hydra's grammar (hydra.cc/docs/advanced/override_grammar): text that parses to the very same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(hydra_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{hydra_value(str(key))}:{hydra_value(item)}' for key, item in value.items())}}}"
    return _text(str(value))


def _number(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return "nan" if math.isnan(value) else repr(value)


def _text(text: str) -> str:
    """A string, bare where it can only mean itself, else in single quotes.

    In quotes a backslash escapes a quote, and itself before a quote; before ``${`` it keeps OmegaConf from taking what
    follows for a reference.
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_MEANING and not _NUMBER_LIKE.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda found: found[1] * 2, text)
    return f"'{text}'"
