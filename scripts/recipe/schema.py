"""Write the JSON schemas of recipe, site and config to config/schema/, for editors that complete and check YAML."""

import json
from pathlib import Path
from typing import Any

from scripts.errors import run_program
from scripts.recipe.load import repository_root
from scripts.recipe.models import Config, Recipe, Site

MODELS = {"recipe": Recipe, "site": Site, "config": Config}


def schema_text(name: str) -> str:
    """The JSON schema of one of the models, as its file's text."""
    schema = MODELS[name].model_json_schema()
    if name == "recipe":
        _allow_defaults(schema)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def _allow_defaults(schema: dict[str, Any]) -> None:
    """A stage need not say what ``defaults`` says for its algorithm; the defaults have the stages' own keys."""
    definitions = schema["$defs"]
    stages = {"sft": "SftStage", "grpo": "GrpoStage"}
    pending, partial = list(stages.values()), set()
    while pending:
        name = pending.pop()
        if name not in partial:
            partial.add(name)
            pending += [other for other in definitions if f'"#/$defs/{other}"' in json.dumps(definitions[name])]
    for name in partial:
        required = [key for key in definitions[name].pop("required", ()) if key == "algorithm"]
        if required:
            definitions[name]["required"] = required
    schema["properties"]["defaults"] = {
        "type": "object",
        "title": "Defaults",
        "description": "Settings that all stages of an algorithm share; a stage's own settings win.",
        "properties": {algorithm: {**definitions[stage], "required": []} for algorithm, stage in stages.items()},
        "additionalProperties": False,
    }


def main() -> None:
    """Write every schema."""
    directory = repository_root() / "config" / "schema"
    directory.mkdir(exist_ok=True)
    for name in MODELS:
        (directory / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
