"""Nested settings, as recipes and configs hold them."""

from collections.abc import Iterator
from typing import Any


def leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, with its keys joined by dots; an empty mapping holds none."""
    for key, value in settings.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from leaves(value, name)
        else:
            yield name, value
