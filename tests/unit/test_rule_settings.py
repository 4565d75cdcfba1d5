"""Settings of rules as files: written where they differ, adopted by earlier results, and which data they make anew."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from scripts.data.source_record import content_of
from scripts.recipe.load import load_recipe
from scripts.stage.rule_settings import data_to_be_made, settings_files, write_settings
from tests.conftest import ROOT
from tests.killing import killed_at

RECORDED, RESULTS = ROOT / "tests/recorded", Path("results")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The results of an earlier commit with the recipe that made them, and a note of Snakemake of each record."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDED / "results/recorded", "results", symlinks=True)
    shutil.copy(RECORDED / "recipe.yaml", "recipe.yaml")
    notes = Path(".snakemake/metadata")
    notes.mkdir(parents=True)
    for record in RESULTS.rglob("*.json"):
        (notes / base64.urlsafe_b64encode(str(record).encode()).decode()).write_text("{}")
    return tmp_path


def edited(old="", new=""):
    text = Path("recipe.yaml").read_text()
    assert old in text
    Path("recipe.yaml").write_text(text.replace(old, new, 1))
    return load_recipe(Path("recipe.yaml"))


def newer_than_results(recipe):
    """The names of the settings files that are newer than what was made from them."""
    return {
        str(path.relative_to("results/settings").with_suffix(""))
        for path, settings in settings_files(recipe, RESULTS).items()
        if any(path.stat().st_mtime_ns > output.stat().st_mtime_ns for output in settings.outputs if output.exists())
    }


def noted():
    return {base64.urlsafe_b64decode(path.name).decode() for path in Path(".snakemake/metadata").iterdir()}


def test_results_of_an_earlier_commit_adopt_their_settings_and_snakemake_forgets_the_inputs_they_lack(tree):
    recipe = edited()
    assert data_to_be_made(recipe, RESULTS) == set()
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == set()
    assert data_to_be_made(recipe, RESULTS) == set()
    outputs = {str(output) for settings in settings_files(recipe, RESULTS).values() for output in settings.outputs}
    assert not noted() & outputs and "results/sft/hf/record.json" in noted()
    before = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    write_settings(recipe, RESULTS)
    assert {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")} == before


def test_a_kill_while_settings_are_adopted_makes_nothing_stale_and_leaves_nothing(tree):
    recipe = edited()
    shutil.copytree(RESULTS, "before", symlinks=True)
    for call in range(1, 1000, 9):
        status = killed_at(call, lambda: write_settings(recipe, RESULTS))
        write_settings(recipe, RESULTS)
        assert newer_than_results(recipe) == set() and data_to_be_made(recipe, RESULTS) == set()
        assert not [*RESULTS.rglob("*.tmp")]
        assert (RESULTS / "data/source/made_from.json").exists()
        if status == 0:
            break
        shutil.rmtree(RESULTS)
        shutil.copytree("before", RESULTS, symlinks=True)
    assert call > 30


HOLDOUT = ("    rows: 24\n    holdout: 8", "    rows: 24\n    holdout: 9")
SEED = ("{kind: synthetic}", "{kind: synthetic, seed: 5}")
GATE = ("max: 0.01", "max: 0.9")
ALL = {"sft", "rlvr", "rlhf"}


@pytest.mark.parametrize("is_adopted", [True, False])
@pytest.mark.parametrize(
    ("edit", "made", "newer"),
    [
        (HOLDOUT, {"rlvr"}, {"fill/rlvr", "source"}),
        (SEED, ALL, {"source"}),
        (GATE, set(), {"gate/rlvr", "gate/rlhf"}),
        (("name: recorded", "name: other"), set(), set()),
    ],
)
def test_an_edit_is_newer_than_the_results_and_names_the_data_to_be_made(tree, edit, made, newer, is_adopted):
    if is_adopted:
        write_settings(edited(), RESULTS)
    recipe = edited(*edit)
    if is_adopted or edit is not HOLDOUT:  # the source's record tells no number of rows
        assert data_to_be_made(recipe, RESULTS) == made
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == (newer if is_adopted or edit is not HOLDOUT else {"fill/rlvr"})
    assert data_to_be_made(recipe, RESULTS) == made  # whatever a dry run has written meanwhile


@pytest.mark.parametrize(
    ("edit", "newer", "unadopted"),
    [
        (("max_new_tokens: 12", "max_new_tokens: 13"), {"evaluate"}, set()),
        (("parent: rlvr", "parent: sft"), {"train/rlhf"}, {"train/rlhf"}),
        (("blend: rlvr", "blend: rlhf"), {"train/rlvr"}, {"train/rlvr"}),
    ],
)
@pytest.mark.parametrize("is_adopted", [True, False])
def test_an_edit_is_newer_than_what_was_made_of_adopted_settings_or_by_another_parent_or_blend(
    tree, edit, newer, unadopted, is_adopted
):
    if is_adopted:
        write_settings(edited(), RESULTS)
    recipe = edited(*edit)
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == (newer if is_adopted else unadopted)


def test_an_edit_taken_back_makes_nothing_anew(tree):
    write_settings(edited(), RESULTS)
    write_settings(edited(*HOLDOUT), RESULTS)
    recipe = edited(HOLDOUT[1], HOLDOUT[0])
    assert data_to_be_made(recipe, RESULTS) == set()
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == set()


def test_data_are_made_anew_where_they_are_gone_or_the_source_has_other_files(tree):
    recipe = edited()
    write_settings(recipe, RESULTS)
    manifest, record = Path("results/data/rlvr/manifest.json"), Path("results/data/source/record.json")
    described = json.loads(manifest.read_text())
    described["source"]["content"] = content_of(json.loads(record.read_text()), "rlvr")
    manifest.write_text(json.dumps(described))
    assert data_to_be_made(recipe, RESULTS) == set()
    text = record.read_text()
    record.write_text(text.replace("538e685f", "638e685f"))
    assert data_to_be_made(recipe, RESULTS) == {"rlvr"}
    record.unlink()
    assert data_to_be_made(recipe, RESULTS) == set()  # nobody asks for a source whose splits are there
    record.write_text(text)
    manifest.unlink()
    assert data_to_be_made(recipe, RESULTS) == {"rlvr"}


def test_a_new_blend_leaves_those_of_a_pinned_source_as_they_are(tree):
    write_settings(edited(), RESULTS)
    new = "blends:\n  more: {rows: 30, holdout: 9, environments: [mcqa_simple_agent]}\n"
    assert data_to_be_made(edited("blends:\n", new), RESULTS) == {"more"}


def test_nothing_made_yet_is_all_to_be_made(tmp_path):
    recipe = load_recipe(RECORDED / "recipe.yaml")
    write_settings(recipe, tmp_path)
    assert data_to_be_made(recipe, tmp_path) == ALL
    assert all(path.is_file() for path in settings_files(recipe, tmp_path))


@pytest.mark.parametrize(
    ("change", "is_contradicted"),
    [
        ({}, False),
        ({"max": 0.123}, True),
        ({"min": 0.0}, True),
        ({"action": "stop"}, True),
        ({"outcome": "stop"}, False),
    ],
)
def test_a_verdict_on_other_criteria_than_the_recipes_contradicts_them(tree, change, is_contradicted):
    path = Path("results/rlvr/criteria.json")
    record = json.loads(path.read_text())
    record["criteria"][1] |= change
    record["criteria"].append(record["criteria"][0] | {"metric": "final_loss", "default": True})
    path.write_text(json.dumps(record))
    assert settings_files(edited(), RESULTS)[Path("results/settings/gate/rlvr.json")].is_contradicted() == (
        is_contradicted
    )
