"""What every stage of every recipe trains, in hashes: ``python -m tests.recorded.identities`` writes the table.

Where neither a pinned version nor a recipe changed, another hash means that what was trained before is trained again.
"""

from pathlib import Path

from scripts.files import sha256_text, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import config_text, resolve_stage
from scripts.stage.store import identity_of, stage_facts
from tests.conftest import ROOT

TABLE = Path(__file__).with_name("identities.json")
RECIPES = [path for folder in ("config/recipes", "tests") for path in sorted((ROOT / folder).glob("*.yaml"))]
SPLITS = {"train": {"sha256": "1" * 64}, "validation": {"sha256": "2" * 64}}
EXPORT = {"stage": "parent", "step": 1, "identity": "0" * 16, "content": "3" * 16, "files": {}}


def hashes_of(recipe: Path) -> dict[str, dict[str, str]]:
    """By stage: the hash of its config.yaml's text, and its identity on data and a parent of fixed hashes."""
    loaded, hashes = load_recipe(recipe), {}
    for name, stage in loaded.stages.items():
        config = resolve_stage(loaded, name)
        identity = identity_of(stage_facts(config, SPLITS, EXPORT if stage.parent else None))
        hashes[name] = {"config": sha256_text(config_text(config.values())), "identity": identity}
    return hashes


def identities() -> dict[str, dict[str, dict[str, str]]]:
    """The hashes of every recipe's stages."""
    return {str(path.relative_to(ROOT)): hashes_of(path) for path in RECIPES}


if __name__ == "__main__":
    write_json(TABLE, identities())
