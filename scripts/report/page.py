"""Pages of the report: templates to one HTML file each that opens offline. What comes from data is escaped."""

import math
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scripts.files import write_text

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def number_text(value: float | None, digits: int = 3) -> str:
    """A number for people; nothing where there is none."""
    if _is_missing(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def fixed_text(value: float | None, form: str = ".3f") -> str:
    """A score, share or change with three decimals; nothing where there is none."""
    return "" if _is_missing(value) else format(value, form)


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


_TEMPLATES.filters |= {"number": number_text, "share": fixed_text, "change": partial(fixed_text, form="+.3f")}
_TEMPLATES.filters["svg"] = Markup


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template of this room as a file."""
    write_text(path, _TEMPLATES.get_template(template).render(**values))
