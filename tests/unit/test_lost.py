"""Published stages whose files are gone are not done: a store that was deleted, or copied in part or not at all."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.commands.migrate import migrate
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.stage.lost import lost_of
from scripts.stage.paths import StagePaths
from scripts.stage.rule_settings import write_settings
from scripts.stage.state import States
from scripts.stage.store import made_store
from tests.conftest import ROOT

RECORDED, RESULTS, ROOT_OF_RESULTS = ROOT / "tests/recorded", Path("results/recorded"), Path("results")
STAGES = ("sft", "rlvr", "rlhf")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A finished chain of three stages, its trainings in the store."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECORDED / "results", "results", symlinks=True)
    shutil.copy(RECORDED / "recipe.yaml", "recipe.yaml")
    recipe = load_recipe(Path("recipe.yaml"))
    list(migrate(recipe, RESULTS, ROOT_OF_RESULTS))
    return recipe


def states(recipe):
    return States(recipe, RESULTS, ROOT_OF_RESULTS).all()


def folder(stage: str) -> Path:
    """The folder of a stage's training in the store."""
    return (RESULTS / stage / "ckpt/weights").resolve().parents[1]


def settings(stage: str) -> Path:
    return RESULTS / f"settings/train/{stage}.json"


def is_older(stage: str) -> bool:
    """Whether Snakemake takes the stage's settings for older than the checkpoint made by them."""
    return settings(stage).stat().st_mtime_ns < (RESULTS / stage / "ckpt/record.json").stat().st_mtime_ns


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def export_of(stage: str) -> Path:
    return next(path for path in (folder(stage) / "exports").iterdir() if path.is_dir())


LOSSES = {
    "the store": lambda: [ROOT_OF_RESULTS / "store"],
    "one training": lambda: [folder("rlvr")],
    "checkpoints and exports": lambda: [folder("rlvr") / "checkpoints", folder("rlvr") / "exports"],
    "a file of each": lambda: [
        folder("rlvr") / "checkpoints/step_2/model.safetensors",
        export_of("rlvr"),
    ],
    "the export": lambda: [export_of("rlvr")],
    "the exports": lambda: [folder("rlvr") / "exports"],
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_stage_whose_files_are_gone_is_not_fresh_and_snakemake_is_told_once(tree, loss):
    assert [state.state for state in states(tree).values()] == ["fresh"] * 3
    assert all(map(is_older, STAGES))
    first, kept = ("sft", []) if loss == "the store" else ("rlvr", ["sft"])
    for path in LOSSES[loss]():
        remove(path)

    found = states(tree)
    assert [name for name, state in found.items() if state.state == "fresh"] == kept
    is_begun = not loss.startswith(("the store", "one training"))
    expected = "trained" if loss.startswith("the export") else "unfinished" if is_begun else "stale"
    assert found[first].state == expected
    assert "is gone" in found[first].note or "lacks model.safetensors" in found[first].note
    assert found["rlhf"].note == "rlvr comes first"

    write_settings(tree, RESULTS)
    lost = [stage for stage in STAGES if not is_older(stage)]
    assert lost == (list(STAGES) if loss == "the store" else ["rlvr"])
    texts = [settings(stage).read_text() for stage in STAGES]
    write_settings(tree, RESULTS)
    assert [settings(stage).read_text() for stage in STAGES] == texts, "another call changes nothing"


def test_after_the_loss_is_made_good_the_settings_stay(tree):
    shutil.move("results/store", "away")
    write_settings(tree, RESULTS)
    told = settings("sft").read_text()
    shutil.move("away", "results/store")
    record = RESULTS / "sft/ckpt/record.json"
    record.write_text(record.read_text())  # published again
    write_settings(tree, RESULTS)
    assert settings("sft").read_text() == told and is_older("sft")
    assert states(tree)["sft"].state == "fresh"


def test_a_store_that_comes_back_leaves_nothing_to_do(tree):
    before = settings("sft").read_text()
    shutil.move("results/store", "away")
    write_settings(tree, RESULTS)
    assert not is_older("sft")
    shutil.move("away", "results/store")
    write_settings(tree, RESULTS)
    assert settings("sft").read_text() == before and all(map(is_older, STAGES))
    assert [state.state for state in states(tree).values()] == ["fresh"] * 3


@pytest.mark.parametrize("loss", ["checkpoints", "checkpoints/step_2/optimizer.pt", "metrics.jsonl", "config.yaml"])
def test_a_whole_export_is_enough(tree, loss):
    remove(folder("rlvr") / loss)
    assert [state.state for state in states(tree).values()] == ["fresh"] * 3


def test_of_a_stage_that_another_continues_the_checkpoint_is_asked_for_too(tree):
    remove(folder("rlvr") / "checkpoints/step_2/optimizer.pt")
    paths = StagePaths(RESULTS / "rlvr")
    assert lost_of(tree, paths) == ""
    continuing = tree.stages["rlhf"].model_copy(update={"continues": "rlvr"})
    tree = tree.model_copy(update={"stages": tree.stages | {"rlhf": continuing}})
    assert "lacks optimizer.pt" in lost_of(tree, paths)


def test_a_run_link_to_nothing_loses_nothing(tree):
    (RESULTS / "rlvr/run").unlink(missing_ok=True)
    (RESULTS / "rlvr/run").symlink_to("../../store/gone")
    assert [state.state for state in states(tree).values()] == ["fresh"] * 3


def test_a_checkpoint_in_a_remote_store_and_one_that_cannot_be_looked_at_count_as_there(tree, monkeypatch):
    paths = StagePaths(RESULTS / "rlvr")
    remove(paths.export_record)
    weights = folder("rlvr") / "checkpoints/step_2/model.safetensors"
    remove(weights)
    assert "lacks model.safetensors" in lost_of(tree, paths)
    (weights.parent / "remote.json").write_text("{}")
    assert lost_of(tree, paths) == ""
    (weights.parent / "remote.json").unlink()

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    assert lost_of(tree, paths) == ""


def test_results_copied_without_store_and_settings_are_to_be_trained(tree):
    shutil.rmtree("results/store")
    shutil.rmtree(RESULTS / "settings")
    write_settings(tree, RESULTS)
    assert not any(map(is_older, STAGES))
    assert json.loads(settings("sft").read_text())["lost"] == (RESULTS / "sft/ckpt/record.json").stat().st_mtime_ns


def test_a_store_that_is_a_link_to_nothing_is_no_empty_store(tmp_path):
    (tmp_path / "store").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"store: a link to .*unmounted, which is not there; mount it"):
        made_store(tmp_path)
