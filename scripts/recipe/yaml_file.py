"""Read a YAML file into a model; every mistake is one line with file, line, key and the nearest valid name."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from scripts.credentials import find_credentials
from scripts.errors import UserError, shortened
from scripts.recipe.strict import NAME, nearest

SHOWN = 40
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list"}
KINDS |= {"string": "a text (in quotes where YAML takes it for a number, a date or yes and no)"}
Model = TypeVar("Model", bound=BaseModel)
SOURCES = ("synthetic", "hub", "folder")
NEEDS = {
    ("stages", "algorithm"): "needs an algorithm: sft, grpo, dpo or mpo",
    ("source", "kind"): "needs a kind: synthetic, hub or folder",
}
YAML_HINTS = {
    "mapping values are not allowed": "; put a text that holds a colon into quotes",
    "cannot start any token": "; indent with spaces, and put a text that begins with such a character into quotes",
    "could not find expected ':'": "; a key ends with a colon and a space",
}
_DISCRIMINATORS = {"_tag_of()": "algorithm"}
_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, ten times as fast


def read_yaml(path: Path) -> tuple[Any, yaml.Node | None]:
    """The values of a YAML file, and its nodes, which know the lines; UserError when it cannot be read.

    A file that is not in the project is the one of that name that Stagecoach ships.
    """
    try:
        text = project_or_shipped(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = _file_meant(path)
        raise UserError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    try:
        node = _compose(text)
        _refuse_duplicate_keys(path, node)
        data = yaml.load(text, _FAST_LOADER)  # noqa: S506 (it is a safe loader)
        refuse_credentials(data, path, node)
        return data, node
    except RecursionError:
        raise UserError(f"{path}: an alias stands within what it names; write out what is meant") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = str(getattr(error, "problem", error))
        hint = next((hint for words, hint in YAML_HINTS.items() if words in problem), "")
        raise UserError(f"{place}: not valid YAML: {problem}{hint}") from None


def _file_meant(path: Path) -> str:
    """The file that a path which is not there may mean."""
    if named := sorted(Path("config").glob(f"*/{path.stem}.yaml")):
        return f"; did you mean {named[0]}?"
    siblings = [file.name for file in path.parent.glob("[!.]*.yaml")] if path.parent.is_dir() else []
    return nearest(path.name, siblings) if siblings else ""


def refuse_credentials(data: Any, path: Path, node: yaml.Node | None = None) -> None:
    """UserError, without an echo, where settings hold a password, token or key."""
    lines = []
    for location, kind in find_credentials(data):
        line = line_of(node, location, data)
        lines.append(
            f"{path}{f':{line}' if line else ''}: {'.'.join(location) or 'the file'}: holds {kind}, not shown here; "
            "settings are copied into records, logs and command lines: take it out, put it into the environment "
            "(HF_TOKEN, WANDB_API_KEY), and make a new one where others could read this"
        )
    if lines:
        raise UserError("\n  ".join(lines))


def _compose(text: str) -> yaml.Node | None:
    """The nodes of a text; what is wrong with it is told in the words of the loader in Python."""
    try:
        return yaml.compose(text, Loader=_FAST_LOADER)
    except yaml.YAMLError:
        return yaml.compose(text, Loader=yaml.SafeLoader)


def _refuse_duplicate_keys(path: Path, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{path}:{line}: a list or mapping stands where a key must; name the key")
            if key.value in seen:
                raise UserError(
                    f"{path}:{line}: key {key.value} stands twice (also in line {seen[key.value]}); keep one"
                )
            seen[key.value] = line
            _refuse_duplicate_keys(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicate_keys(path, item)


def validate(model: type[Model], data: Any, path: Path, node: yaml.Node | None) -> Model:
    """The values as a model; UserError lists every mistake."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = dict.fromkeys(_describe(detail, path, node, data) for detail in error.errors())
        raise UserError("\n  ".join(_once(lines))) from None


def _once(lines: Iterable[str]) -> Iterator[str]:
    """The lines; of those that differ in the stage or blend alone, as where a default is wrong, the first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for line in lines:
        found = re.fullmatch(r"(.*:\d+: (?:stages|blends)\.)([^.:]+)(.*)", line, re.DOTALL)
        alike.setdefault((found[1], found[3]) if found else (line,), []).append(found[2] if found else "")
    for parts, stages in alike.items():
        more = f" (and so of {', '.join(stages[1:])})" if len(stages) > 1 else ""
        yield stages[0].join(parts) + more if len(parts) > 1 else parts[0]


def _describe(detail: Any, path: Path, node: yaml.Node | None, data: Any) -> str:
    context = detail.get("ctx", {})
    location = [str(part) for part in context["at"].split(".")] if "at" in context else [str(p) for p in detail["loc"]]
    location = [part for part in location if part != "[key]" and not part.startswith("<")]
    for place in reversed(range(1, len(location))):
        # pydantic puts the discriminator's value before the key
        if location[place - 1] == "source" and location[place] in SOURCES:
            del location[place]
    if "key" in context:
        location.append(context["key"])
    discriminator = _DISCRIMINATORS.get(str(context.get("discriminator")).strip("'"), "kind")
    needs = NEEDS.get((location[0] if location else "", discriminator), f"needs a {discriminator}")
    message = {"missing": "is missing", "union_tag_not_found": needs}.get(detail["type"])
    if message is None:
        message = detail["msg"][0].lower() + detail["msg"][1:]
    if detail["type"] == "string_pattern_mismatch" and context["pattern"] == NAME:
        message = f"{detail['input']!r}: lower-case letters, digits and - _ . alone, no such sign first"
    elif (kind := KINDS.get(detail["type"].partition("_")[0])) and detail["type"].endswith(("_parsing", "_type")):
        message = f"must be {kind}, not {shortened(str(detail['input']), SHOWN)}"
    expected = re.findall(r"'<?([^'>]*)>?'", str(context.get("expected_tags") or context.get("expected") or ""))
    if expected and detail["type"] in ("literal_error", "enum", "union_tag_invalid"):
        value = context.get("tag") or detail["input"]
        if detail["type"] == "union_tag_invalid":
            location.append(discriminator)
        message = f"{value!r} is not known{nearest(str(value), expected)}"
    line = line_of(node, location, data)
    return f"{path}{f':{line}' if line else ''}: {'.'.join(location) or 'the file'}: {message}"


def line_of(node: yaml.Node | None, location: list[str], data: Any) -> int | None:
    """The line of a key; of the deepest part of it that is there; for a stage's default, the default's line.

    A variant of a swept stage stands where that does.
    """
    if location[0] == "stages" and len(location) > 1 and isinstance(data, dict) and isinstance(data["stages"], dict):
        written = [name for name in data["stages"] if f"{location[1]}.".startswith(f"{name}.")]
        location = ["stages", max(written, key=len, default=location[1]), *location[2:]]
    depth, line = _descend(node, location)
    if len(location) > 2 and location[0] == "stages" and depth < len(location):
        stage = data["stages"].get(location[1]) if isinstance(data, dict) else None
        algorithm = stage.get("algorithm") if isinstance(stage, dict) else None
        default_depth, default_line = _descend(node, ["defaults", str(algorithm), *location[2:]])
        if default_depth == len(location):
            return default_line
    return line


def _descend(node: yaml.Node | None, location: list[str]) -> tuple[int, int | None]:
    line = None
    for depth, part in enumerate(location):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                return depth, line
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            return depth, line
    return len(location), line


def installation() -> Path:
    """The folder that holds Snakefile, envs/ and config/: a clone, or where the wheel was installed."""
    return Path(__file__).resolve().parents[2]


def project_or_shipped(path: Path, *folders: Path) -> Path:
    """The path from the project (the working directory), else from these folders, else from the installation.

    The path itself where none of them has it.
    """
    places = (path, *(folder / path for folder in (*folders, installation())))
    return next((place for place in places if place.exists()), path)
