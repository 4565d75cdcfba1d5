"""Hydra overrides: settings on the command line of NeMo-RL's drivers."""

import math
import re
from collections.abc import Iterator
from typing import Any

from scripts.recipe.yaml_file import leaves

_PLAIN = re.compile(r"[A-Za-z0-9_./@-]*[A-Za-z_/@-][A-Za-z0-9_./@-]*")
_OTHER_MEANING = {"true", "false", "null", "inf", "nan", "yes", "no", "on", "off"}
_NUMBER_LIKE = re.compile(r"[+-]?[0-9_.]+([eE][+-]?[0-9]+)?")


def overrides_of(settings: dict[str, Any]) -> Iterator[str]:
    """Yield ``key=value`` for each leaf of nested settings; nothing for an empty mapping."""
    return (f"{name}={hydra_value(value)}" for name, value in leaves(settings))


def hydra_value(value: Any) -> str:
    """Return a value in Hydra's grammar (hydra.cc/docs/advanced/override_grammar), parsed to the same value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value) if math.isfinite(value) else str(value)  # inf, -inf, nan
    if isinstance(value, list | tuple):
        return f"[{','.join(hydra_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{hydra_value(str(key))}:{hydra_value(item)}' for key, item in value.items())}}}"
    return _text(str(value))


def _text(text: str) -> str:
    """Return a string, in single quotes unless the bare text is unambiguous.

    In quotes a backslash escapes a quote, and a backslash before a quote; before ``${`` a backslash stops OmegaConf
    from reading a reference.
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_MEANING and not _NUMBER_LIKE.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", text)
    text = re.sub(r"(\\*)'", lambda found: found[1] * 2 + r"\'", text)
    text = re.sub(r"(\\+)\Z", lambda found: found[1] * 2, text)
    return f"'{text}'"
