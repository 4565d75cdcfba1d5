"""The files of a task of the user's own: those in its folder, and local data elsewhere that its definition names."""

from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import Any

import yaml

from scripts.recipe.evaluation import Task

DEFINITIONS = (".yaml", ".yml")
DATA, DATA_FILES = "dataset_kwargs", "data_files"
"""lm-eval's words for the arguments of `datasets.load_dataset`, and for the files among them."""


class _Loader(yaml.SafeLoader):
    """Read a definition without its tags, such as ``!function utils.shown``."""


_Loader.add_multi_constructor("", lambda *_: None)


def files_of_task(task: Task) -> list[str]:
    """Return the files in the folder of the recipe's own task."""
    files = sorted(Path(task.include_path).absolute().rglob("*")) if task.include_path else []
    return [str(path) for path in files if path.is_file() and "__pycache__" not in path.parts]


def data_of_task(task: Task) -> list[str]:
    """Return the local files outside of the folder whose rows are the task's, as paths from the working directory."""
    inside = {*files_of_task(task)}
    named = {place for file in inside if file.endswith(DEFINITIONS) for place in _data_named(Path(file))}
    return sorted(place for place in named if Path(place).is_file() and str(Path(place).absolute()) not in inside)


def _data_named(definition: Path) -> Iterator[str]:
    """Yield the local files of rows that a definition names; none of one that lm-eval cannot read."""
    text = definition.read_text(encoding="utf-8", errors="replace")
    if DATA_FILES not in text:
        return
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError):
        return
    arguments = values.get(DATA) if isinstance(values, dict) else None
    for place in _texts(arguments.get(DATA_FILES) if isinstance(arguments, dict) else None):
        if "://" not in place:
            yield from glob(place, recursive=True) if has_magic(place) else [place]  # noqa: PTH207 - of any text


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a text, a list, or the values of a mapping."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
