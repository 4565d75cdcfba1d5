"""The figures of docs/recipes.md are the recipes'; what published documents say stands beside them in brackets."""

import re

import pytest

from scripts.backends.nemo_rl.parameters import parameters_of
from scripts.recipe.load import load_recipe, load_whole_recipe
from tests.conftest import ROOT

DOCUMENT = (ROOT / "docs/recipes.md").read_text()
RECIPES = sorted(path for path in (ROOT / "config/recipes").glob("*.yaml") if load_recipe(path).release)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_figures_are_the_documents(path):
    recipe = load_whole_recipe(path)
    shown = {row[0]: row[1:] for row in rows(DOCUMENT.partition(f"\n## {path.stem}\n")[2].partition("\n## ")[0])}
    stages = [name for column in shown[""] for name in column.split(", ")]
    for label, *figures in parameters_of(recipe):
        ours = {
            name: re.split(r" [(✓]", cell)[0].strip("`")
            for head, cell in zip(shown[""], shown[label], strict=True)
            for name in head.split(", ")
        }
        said = {
            name: figure
            for names, figure in zip(parameters_of(recipe)[0][1:], figures, strict=True)
            for name in names.split(", ")
        }
        assert label == "" or ours == said, label
    nodes = {
        name: int(cell.split()[0].strip(","))
        for head, cell in zip(shown[""], shown["nodes"], strict=True)
        for name in head.split(", ")
    }
    assert nodes == {name: recipe.stages[name].resources.nodes for name in stages}
