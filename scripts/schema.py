"""Write what is derived from the models and pins: JSON schemas for editors, conda environments for ``--sdm conda``."""

import json
from pathlib import Path
from typing import Any

import yaml

from scripts.errors import run_program
from scripts.files import write_text
from scripts.images.settings import Images
from scripts.recipe.config import Config
from scripts.recipe.recipe import ALGORITHM_BLENDS, STAGES, Recipe
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import installation

MODELS = {"recipe": Recipe, "site": Site, "config": Config, "images": Images}
ENVIRONMENTS = {"controller": ("controller",), "trl": ("controller", "trl"), "wandb": ("controller", "wandb")}


def schema_text(name: str) -> str:
    """The JSON schema of one of the models, as its file's text."""
    schema = MODELS[name].model_json_schema()
    if name == "recipe":
        _allow_defaults(schema)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def _allow_defaults(schema: dict[str, Any]) -> None:
    """A stage need not say what ``defaults`` says for its algorithm; the defaults have the stages' own keys."""
    definitions = schema["$defs"]
    backends = sorted(STAGES.values(), key=len, reverse=True)
    stages = {
        algorithm: [models[algorithm].__name__ for models in backends if algorithm in models]
        for algorithm in ALGORITHM_BLENDS
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
    """A conda environment with the pins of envs/*.txt that rules of this environment need."""
    pins = []
    for part in ENVIRONMENTS[name]:
        lines = (installation() / "envs" / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        pins += [line for line in lines if "==" in line and not line.startswith("#")]
    dependencies = ["python=3.11", "pip", {"pip": pins}]
    return "# Written by `make schema` from the pins beside it.\n" + yaml.safe_dump(
        {"channels": ["conda-forge"], "dependencies": dependencies}, sort_keys=False
    )


def derived_files() -> dict[Path, str]:
    """Every derived file with the text that it should have."""
    root = installation()
    schemas = {root / "config/schema" / f"{name}.schema.json": schema_text(name) for name in MODELS}
    return schemas | {root / "envs" / f"{name}.yaml": environment_text(name) for name in ENVIRONMENTS}


def main() -> None:
    """Write every derived file."""
    for path, text in derived_files().items():
        write_text(path, text)


if __name__ == "__main__":
    run_program(main)
