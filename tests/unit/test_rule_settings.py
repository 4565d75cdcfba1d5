"""Settings of rules as files: written where they differ, adopted by `stagecoach migrate`, and which data they renew."""

import json
import re
import shutil
from pathlib import Path

import pytest

from scripts.commands.migrate import migrate
from scripts.data.source_record import content_of
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.stage.consistency import exported_model
from scripts.stage.data_to_come import data_to_be_made
from scripts.stage.earlier_tree import refuse_earlier_results
from scripts.stage.rule_settings import settings_files, write_settings
from tests.conftest import ROOT
from tests.killing import killed_at

RECORDED, RESULTS = ROOT / "tests/recorded", Path("results")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The results of a version before 0.3.0 with the recipe that made them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDED / "results/recorded", "results", symlinks=True)
    shutil.copy(RECORDED / "recipe.yaml", "recipe.yaml")
    return tmp_path


def edited(old="", new=""):
    text = Path("recipe.yaml").read_text()
    assert old in text
    Path("recipe.yaml").write_text(text.replace(old, new, 1))
    return load_recipe(Path("recipe.yaml"))


def take_over(recipe):
    """Migrate the results by a recipe, which may have been edited before."""
    return list(migrate(recipe, RESULTS, Path()))


def newer_than_results(recipe):
    """The names of the settings files that are newer than what was made from them."""
    return {
        str(path.relative_to("results/settings").with_suffix(""))
        for path, settings in settings_files(recipe, RESULTS).items()
        if any(path.stat().st_mtime_ns > output.stat().st_mtime_ns for output in settings.outputs if output.exists())
    }


def refused(recipe):
    """What a start says of results of an earlier version; nothing of others."""
    try:
        refuse_earlier_results(RESULTS, recipe.stages, recipe.blends)
    except UserError as error:
        return str(error)
    return ""


def test_results_of_an_earlier_version_are_refused_and_adopt_their_settings_by_migrate(tree):
    recipe = edited()
    assert re.fullmatch(
        r"results/sft/run and 2 more: trained by .*; stagecoach migrate takes them over.*", refused(recipe)
    )
    said = take_over(recipe)
    assert said[-1] == "results/settings: settings of 14 rules, as their results were made"
    assert not refused(recipe)
    assert newer_than_results(recipe) == set() and data_to_be_made(recipe, RESULTS) == set()
    before = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    write_settings(recipe, RESULTS)
    assert take_over(recipe) == []
    assert {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")} == before


def test_a_kill_while_results_are_migrated_leaves_what_a_start_refuses_and_the_next_call_finishes(tree):
    recipe = edited()
    shutil.copytree(RESULTS, "before", symlinks=True)
    weights = {stage: (RESULTS / stage / "ckpt/weights/model.safetensors").read_bytes() for stage in recipe.stages}
    for call in range(1, 3000, 61):
        status = killed_at(call, lambda: take_over(recipe))
        assert refused(recipe) or newer_than_results(recipe) == set()
        take_over(recipe)
        assert not refused(recipe)
        assert newer_than_results(recipe) == set() and data_to_be_made(recipe, RESULTS) == set()
        assert not [*Path().rglob("*.tmp"), *RESULTS.glob(".settings*")]
        assert (RESULTS / "data/source/made_from.json").exists()
        for stage, content in weights.items():
            folder = (RESULTS / stage / "run").resolve()
            assert folder.parent.name == "store" and folder == (RESULTS / stage / "ckpt/weights").resolve().parents[1]
            assert (RESULTS / stage / "ckpt/weights/model.safetensors").read_bytes() == content
            assert exported_model(RESULTS / stage / "hf/record.json").is_dir()
        if status == 0:
            break
        shutil.rmtree(RESULTS)
        shutil.rmtree("store", ignore_errors=True)
        shutil.copytree("before", RESULTS, symlinks=True)
    assert call > 200


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
        take_over(edited())
    recipe = edited(*edit)
    if not is_adopted:
        take_over(recipe)
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
        take_over(edited())
    recipe = edited(*edit)
    if not is_adopted:
        take_over(recipe)
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == (newer if is_adopted else unadopted)


def test_an_edit_taken_back_makes_nothing_anew(tree):
    take_over(edited())
    write_settings(edited(*HOLDOUT), RESULTS)
    recipe = edited(HOLDOUT[1], HOLDOUT[0])
    assert data_to_be_made(recipe, RESULTS) == set()
    write_settings(recipe, RESULTS)
    assert newer_than_results(recipe) == set()


def test_data_are_made_anew_where_they_are_gone_or_the_source_has_other_files(tree):
    recipe = edited()
    take_over(recipe)
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
    take_over(edited())
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
