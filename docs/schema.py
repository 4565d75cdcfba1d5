"""Write the files derived from models and pins: JSON schemas, config/README.md, conda environments.

python -m docs.schema
"""

import html
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.errors import run_program
from scripts.files import write_text
from scripts.recipe.config import Config
from scripts.recipe.recipe import ALGORITHMS, STAGES, Recipe
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import installation

MODELS = {"recipe": Recipe, "site": Site, "config": Config}
ENVIRONMENTS = {
    "controller": ("controller",),
    "trl": ("controller", "trl", "remote"),
    "wandb": ("controller", "wandb"),
    "remote": ("controller", "remote"),
}


@cache
def schema_text(name: str) -> str:
    """Return a model's JSON schema as text."""
    schema = MODELS[name].model_json_schema()
    if name == "recipe":
        _allow_defaults(schema)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def _allow_defaults(schema: dict[str, Any]) -> None:
    """Let ``defaults`` bear the keys of stages, and stages lack keys that ``defaults`` may give."""
    definitions = schema["$defs"]
    backends = sorted(STAGES.values(), key=len, reverse=True)
    stages = {
        algorithm: [models[algorithm].__name__ for models in backends if algorithm in models]
        for algorithm in ALGORITHMS
    }
    pending, partial = [name for names in stages.values() for name in names], set()
    while pending:
        name = pending.pop()
        if name not in partial:
            partial.add(name)
            pending += [other for other in definitions if f'"#/$defs/{other}"' in json.dumps(definitions[name])]
    for name in partial:
        required = [key for key in definitions[name].pop("required", ()) if key == "algorithm"]
        if required:
            definitions[name]["required"] = required
    for stage in schema["properties"]["stages"]["patternProperties"].values():
        # without what defaults say, a stage may be of either backend
        stage["anyOf"] = stage.pop("oneOf")
    schema["properties"]["defaults"] = {
        "type": "object",
        "title": "Defaults",
        "description": "Settings that all stages of an algorithm share; a stage's own settings win.",
        "properties": {
            algorithm: {"anyOf": [{**definitions[name], "required": []} for name in names]}
            for algorithm, names in stages.items()
        },
        "additionalProperties": False,
    }


def environment_text(name: str) -> str:
    """Return a conda environment with the pins of envs/*.txt."""
    pins = []
    for part in ENVIRONMENTS[name]:
        lines = (installation() / "envs" / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        pins += [line for line in lines if "==" in line and not line.startswith("#")]
    dependencies = ["python=3.11", "pip", {"pip": pins}]
    return "# Written by `make schema` from the pins beside it.\n" + yaml.safe_dump(
        {"channels": ["conda-forge"], "dependencies": dependencies}, sort_keys=False
    )


def page_with_tables(page: str) -> str:
    """Return a page of settings with fresh tables between the marks."""

    def table(mark: re.Match[str]) -> str:
        schema = MODELS[mark[2]].model_json_schema()
        rows = ["| key | default | what |", "| --- | --- | --- |", *_rows(schema, schema.get("$defs", {}))]
        return "\n".join([mark[1], *rows, "<!-- end -->"])

    return re.sub(r"(<!-- keys of (\w+), by make schema -->).*?<!-- end -->", table, page, flags=re.DOTALL)


def _rows(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a row for each key of a model and of nested models."""
    for key, value in schema["properties"].items():
        default = json.dumps(value.get("default")) if key not in schema.get("required", ()) else "required"
        about = html.escape(value.get("description", ""), quote=False).replace("|", "\\|")
        yield f"| `{prefix}{key}` | {default.replace('null', 'none')} | {about} |"
        for part, model in re.findall(r'("patternProperties": [^#]*)?"#/\$defs/(\w+)"', json.dumps(value)):
            yield from _rows(definitions[model], definitions, f"{prefix}{key}.{'<name>.' if part else ''}")


def derived_files() -> dict[Path, str]:
    """Return every derived file with the right text."""
    root = installation()
    settings = root / "config/README.md"
    schemas = {root / "config/schema" / f"{name}.schema.json": schema_text(name) for name in MODELS}
    environments = {root / "envs" / f"{name}.yaml": environment_text(name) for name in ENVIRONMENTS}
    return schemas | environments | {settings: page_with_tables(settings.read_text(encoding="utf-8"))}


def main() -> None:
    """Write every derived file."""
    for path, text in derived_files().items():
        write_text(path, text)


if __name__ == "__main__":
    run_program(main)
