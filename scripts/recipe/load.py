"""Read config, recipe and site from YAML; every mistake is one line with file, line, key and the nearest valid name."""

import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from scripts.errors import UserError
from scripts.recipe.models import Config, Recipe, nearest
from scripts.recipe.site import Site

Model = TypeVar("Model", bound=BaseModel)
DISCRIMINATED = {
    *(("stages", tag) for tag in ("sft", "grpo")),
    *(("images", tag) for tag in ("pull", "build", "git")),
}
NEEDS = {"algorithm": "needs an algorithm: sft or grpo", "kind": "needs a kind: pull, build or git"}


def load_recipe(path: Path, seed: int | None = None) -> Recipe:
    """The recipe in a YAML file, its stages' defaults filled in; `seed` stands in for the recipe's."""
    data, node = read_yaml(path)
    if seed is not None and isinstance(data, dict):
        data = data | {"seed": seed}
    return validate(Recipe, _with_defaults(data), path, node)


def load_site(path: Path, recipe: Recipe) -> Site:
    """The site in a YAML file; UserError when it speaks of a stage that the recipe has not."""
    data, node = read_yaml(path)
    site = validate(Site, data, path, node)
    for name in site.stages:
        if name not in recipe.stages:
            line = _line_of(node, ["stages", name], {})
            raise UserError(f"{path}:{line}: stages.{name}: the recipe has no such stage{nearest(name, recipe.stages)}")
    return site


def load_config(path: Path, over: dict[str, Any]) -> Config:
    """The config in a YAML file; the values of `over` stand in for the file's."""
    data, node = read_yaml(path)
    return validate(Config, (data or {}) | over, path, node)


def parse_config(values: dict[str, Any], source: str = "config/config.yaml") -> Config:
    """Check the values that Snakemake read from config.yaml and the command line."""
    return validate(Config, values, Path(source), None)


def read_yaml(path: Path) -> tuple[Any, yaml.Node | None]:
    """What a YAML file says, and the nodes that know its lines; UserError when it is no YAML or has a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [other.name for other in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings) if siblings else ""
        raise UserError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_duplicate_keys(path, node)
        return yaml.safe_load(text), node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from None


def _refuse_duplicate_keys(path: Path, node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UserError(
                    f"{path}:{line}: key {key.value} stands twice (also in line {seen[key.value]}); keep one"
                )
            seen[key.value] = line
            _refuse_duplicate_keys(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicate_keys(path, item)


def _with_defaults(data: Any) -> Any:
    """Lay each stage over the defaults of its algorithm; what has not the right shape is left to the validation."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), dict):
        return data
    defaults = data.get("defaults") or {}
    stages = {}
    for name, stage in data["stages"].items():
        base = defaults.get(stage.get("algorithm")) if isinstance(stage, dict) and isinstance(defaults, dict) else None
        stages[name] = _merge(base, stage) if isinstance(base, dict) else stage
    return data | {"stages": stages}


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), dict) and isinstance(value, dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def validate(model: type[Model], data: Any, path: Path, node: yaml.Node | None) -> Model:
    """The data as a model; UserError with a line for each mistake: file, line, key and what is wrong with it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = dict.fromkeys(_describe(detail, path, node, data) for detail in error.errors())
        raise UserError("\n  ".join(lines)) from None


def _describe(detail: Any, path: Path, node: yaml.Node | None, data: Any) -> str:
    context = detail.get("ctx", {})
    location = [str(part) for part in context["at"].split(".")] if "at" in context else [str(p) for p in detail["loc"]]
    location = [part for part in location if part != "[key]"]
    for place in (2, 3):
        # pydantic puts the discriminator's value before the key
        if len(location) > place and (location[0], location[place]) in DISCRIMINATED:
            del location[place]
    if "key" in context:
        location.append(context["key"])
    discriminator = str(context.get("discriminator")).strip("'")
    message = {"missing": "is missing", "union_tag_not_found": NEEDS.get(discriminator)}.get(detail["type"])
    if message is None:
        message = detail["msg"][0].lower() + detail["msg"][1:]
    expected = re.findall(r"'([^']*)'", str(context.get("expected_tags") or context.get("expected") or ""))
    if expected and detail["type"] in ("literal_error", "enum", "union_tag_invalid"):
        value = context.get("tag") or detail["input"]
        if detail["type"] == "union_tag_invalid":
            location.append(discriminator)
        message = f"{value!r} is not known{nearest(str(value), expected)}"
    line = _line_of(node, location, data)
    return f"{path}{f':{line}' if line else ''}: {'.'.join(location) or 'the file'}: {message}"


def _line_of(node: yaml.Node | None, location: list[str], data: Any) -> int | None:
    """The line of a key; of the deepest part of it that is there; for a stage's default, the default's line."""
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


def repository_root() -> Path:
    """The folder that holds Snakefile, envs/ and config/."""
    return Path(__file__).resolve().parents[2]
