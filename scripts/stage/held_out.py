"""How many rows of a blend train and how many are held out, before a split or after."""

from collections.abc import Iterator
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.blend import Blend
from scripts.recipe.recipe import Recipe
from scripts.records import Manifest, read_if_there
from scripts.stage.data_to_come import data_to_be_made

LARGEST_SHARE = 0.2
LARGEST_FILE = 200 << 20
"""Bytes of a file whose rows are counted for a plan."""


def rows_held_out(recipe: Recipe, results: Path) -> dict[str, tuple[int, int]]:
    """Return the rows to train on and the held-out rows by blend, of those that are known without making data.

    Of results with a damaged record of data nothing is known; the stages' states name the damage.
    """
    try:
        made = _splits_made(recipe, results)
    except UserError:
        return {}
    found = {}
    for name, blend in recipe.blends.items():
        trained, held_out = made[name] if name in made else _expected(recipe, name, blend)
        if trained is not None and held_out is not None:
            found[name] = trained, held_out
    return found


def large_holdouts(recipe: Recipe, results: Path) -> Iterator[str]:
    """Yield a sentence on each blend that loses more than a fifth of its rows to a holdout that nobody stated."""
    for name, (trained, held_out) in rows_held_out(recipe, results).items():
        blend = recipe.blends[name]
        share = held_out / (trained + held_out)
        if share > LARGEST_SHARE and blend.has_default_holdout:
            yield (
                f"blend {name}: {trained:,} rows to train on, {held_out:,} held out ({share:.0%}), since "
                f"blends.{name}.holdout is not set, which holds out 100; set a share, such as holdout: 0.05"
            )


def _splits_made(recipe: Recipe, results: Path) -> dict[str, tuple[int | None, int | None]]:
    """Return the rows to train on and the held-out rows of the blends whose splits stay as they are."""
    to_be_made = data_to_be_made(recipe, results)
    found = {}
    for name in recipe.blends:
        manifest = read_if_there(results / "data" / name / "manifest.json", Manifest)
        if manifest is not None and name not in to_be_made:
            found[name] = manifest["train"].get("rows"), manifest["validation"].get("rows")
    return found


def _expected(recipe: Recipe, name: str, blend: Blend) -> tuple[int | None, int | None]:
    """Return the rows of a file at hand, by the settings of its split; None and None for another source."""
    file = blend.linked_file(recipe.source, name)
    if file is None or not file.is_file() or file.stat().st_size > LARGEST_FILE:
        return None, None
    with file.open("rb") as lines:
        rows = sum(not line.isspace() for line in lines)
    held_out = blend.holdout if isinstance(blend.holdout, int) else max(1, int(rows * blend.holdout))
    trained = rows - held_out - blend.test_rows
    return (trained, held_out) if trained > 0 else (None, None)
