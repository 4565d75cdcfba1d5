"""Pages of the report: one offline HTML file a template, with data escaped."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scripts.files import duration, write_text
from scripts.stage.bootstrap import Change

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def number_text(value: float | str | None, digits: int = 3) -> str:
    """Return a number for people; a text unchanged; empty for None."""
    if pd.isna(value) or isinstance(value, str):
        return value if isinstance(value, str) else ""
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def score_text(value: float | None, decimals: int = 3, sign: str = "") -> str:
    """Return a score, share or change (`sign` "+"); empty for None."""
    return "" if pd.isna(value) else f"{value:{sign}.{decimals}f}"


def short_name(environment: str) -> str:
    """Return an environment's agent name without the common endings."""
    for ending in ("_single_step_tool_use_with_argument_comparison_agent", "_simple_agent"):
        environment = environment.removesuffix(ending)
    return environment.removesuffix("_with_argument_comparison_agent")


def direction(change: Change) -> int:
    """Return 1 where a change's interval lies above 0, -1 where below, 0 where around 0 or unknown."""
    return 0 if change["low"] is None else (change["low"] > 0) - (change["high"] < 0)


_TEMPLATES.filters |= {"number": number_text, "short": short_name, "share": score_text, "svg": Markup, "zip": zip}
_TEMPLATES.filters |= {"direction": direction, "mark": lambda change: {1: "▲", -1: "▼"}.get(direction(change), "")}
_TEMPLATES.filters |= {"change": partial(score_text, sign="+"), "time": lambda hours: duration(3600 * hours)}


def render(template: str, **values: Any) -> str:
    """Return a rendered template."""
    return _TEMPLATES.get_template(template).render(**values)


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render a template as a file."""
    write_text(path, render(template, **values))
