"""The ladder of a recipe: which recipes are on it, in which order, and what the plan says of each."""

from pathlib import Path

import pytest

from scripts.commands.plan import ladder_text
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.stage.ladder import HEAD, ladder_of, row_of
from tests.conftest import ROOT

RECIPES = ROOT / "config/recipes"
SUPER = ["tiny", "lora-8b", "super3-1.7b", "super3-small", "super3"]


def row(name: str, site: str = "h100", results: Path = Path("/nowhere")) -> dict[str, str]:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    return dict(zip(HEAD, row_of(recipe, load_site(ROOT / f"config/sites/{site}.yaml", recipe), results), strict=True))


def names(recipe: Recipe) -> list[str]:
    return [rung.name for rung in ladder_of(recipe)]


@pytest.mark.parametrize("name", ["tiny", "super3"])
def test_it_goes_from_the_lowest_rung_to_the_highest_through_the_recipe(name):
    seen = names(load_recipe(RECIPES / f"{name}.yaml"))
    assert [rung for rung in seen if rung in SUPER] == SUPER
    assert ("lora-8b-megatron" in seen) == (name == "super3"), (
        "what leads to a rung above does not stand on the way from here"
    )


def test_a_recipe_without_rungs_stands_alone_and_one_of_the_users_own_leads_to_the_shipped(tmp_path):
    assert names(load_recipe(RECIPES / "tiny-tools.yaml")) == ["tiny-tools"]
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        (RECIPES / "tiny-tools.yaml").read_text().replace("name: tiny-tools", "name: mine\nnext_rung: nano3")
    )
    assert names(load_recipe(mine)) == ["mine", "nano3"]


@pytest.mark.parametrize(
    ("next_rung", "words"),
    [
        ("super4", "mine.yaml: next_rung: no recipe is named super4; did you mean super3"),
        ("mine", "mine.yaml: next_rung: leads back"),
    ],
)
def test_a_rung_that_is_not_there_or_leads_back_is_refused(next_rung, words):
    recipe = load_recipe(RECIPES / "tiny-tools.yaml").model_copy(update={"name": "mine", "next_rung": next_rung})
    with pytest.raises(UserError, match=words):
        ladder_of(recipe)


def test_every_rung_says_what_it_proves():
    recipes = [load_recipe(path) for path in RECIPES.glob("*.yaml")]
    reached = {recipe.next_rung for recipe in recipes}
    assert all(recipe.proves for recipe in recipes if recipe.next_rung or recipe.name in reached)


def test_a_rung_costs_its_most_nodes_and_the_hours_of_all_its_stages():
    climbed = row("super3-1.7b")
    assert climbed["stages"] == "(sft) rlvr swe1 rlhf" and climbed["steps"] == "15"
    assert (climbed["most nodes"], climbed["GPUs"]) == ("6", "48")
    node_hours = 6 * 90 / 60 + 1 * 45 / 60 + 2 * 60 / 60
    assert climbed["GPU-hours"] == f"≤ {8 * node_hours:g}" and climbed["hours"] == "≤ 3.25"
    assert row("super3")["GPU-hours"] == "≥ 24,864", "one allocation each: 4 h of 3 x 183 + 2 x 64 + 100 nodes"
    assert row("tiny")["GPUs"] == "0" and row("super3-1.7b", "laptop")["GPUs"] == "48"


def test_rows_that_are_there_say_the_steps(tmp_path):
    split = {"rows": 2560, "bytes": 1, "sha256": "0" * 64}
    write_json(tmp_path / "data/rlvr1/manifest.json", {"train": split, "validation": split})
    assert row("super3", results=tmp_path)["steps"] == "≥ 8", "2560 rows of 256 a step, less the 2 generated ahead"


def test_the_plan_marks_the_recipe_and_takes_what_a_run_of_each_rungs_name_measured(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(
        "scripts.commands.plan.row_of",
        lambda recipe, *rest: seen.setdefault(recipe.name, rest) and row_of(recipe, *rest),
    )
    recipe = load_recipe(RECIPES / "super3-small.yaml")
    text = ladder_text(Project(recipe, load_site(ROOT / "config/sites/h100.yaml", recipe), tmp_path / "my-run"))
    assert [line.split()[1] for line in text.splitlines() if line.startswith(">")] == ["super3-small"]
    assert seen["super3-small"][1] == tmp_path / "my-run" and seen["super3"][1] == tmp_path / "super3"
