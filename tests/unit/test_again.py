"""A stage is trained again in a folder of its own, the one before is kept, and whether the weights are equal is told."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.commands.plan import Planned
from scripts.controller.asked_again import check_names, close_asked, folders_asked, note_asked
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.recipe.config import Config
from scripts.recipe.expand import CheckpointOf
from scripts.recipe.load import load_recipe, load_site
from scripts.report.card import model_card
from scripts.report.chain import chain_text, read_chain
from scripts.stage.estimate import estimate
from scripts.stage.remote import push
from scripts.stage.removal import unlinked
from scripts.stage.rule_settings import write_settings
from scripts.stage.stage import Stage
from scripts.stage.state import States
from scripts.stage.training_folder import TrainingFolder
from scripts.train.export import export
from tests.conftest import ROOT
from tests.stages import as_of, open_folder
from tests.unit.test_remote import new_store
from tests.unit.test_store import fill, here, stage_of, train  # noqa: F401  (fixtures)

ROOT_OF_RESULTS = Path("results")


def states_of(stage: Stage, again: dict[str, str] | None = None) -> States:
    return States(stage.recipe, stage.results, root=stage.root, again=again or {})


def words_of(stage: Stage, again: dict[str, str] | None = None) -> str:
    """What `plan` tells of the stage."""
    state, site = states_of(stage, again).of(stage.name), load_site(ROOT / "config/sites/laptop.yaml", stage.recipe)
    return " ".join(Planned(state, estimate(site, stage, state.left), 60).words())


def ask(stage: Stage) -> dict[str, str]:
    """Ask for the stage again, as a call of Snakemake does; return what was new."""
    asked = folders_asked(states_of(stage), [stage.name])
    note_asked(stage.recipe, stage.results, ROOT_OF_RESULTS, asked, [stage.name])
    return asked


@pytest.fixture
def trained(train):  # noqa: F811
    """A stage that is trained and exported."""
    stage = stage_of("a")
    assert train(stage) == (0, [0])
    export(stage)
    return stage


def test_a_stage_trains_again_in_a_folder_of_its_own_and_the_one_before_is_kept_until_discarded(trained, train, capsys):  # noqa: F811
    before, identity = trained.training.path, trained.identity
    exported = read_json(trained.paths.export_record)
    asked = ask(trained)
    assert asked == {"sft": f"{identity}.again-1"}
    assert (
        f"sft: trains again, as asked, in results/store/{identity}.again-1; {before} is kept" in capsys.readouterr().out
    )
    assert train(trained) == (0, [0])
    again = replace(trained).training.path
    assert (again.name, TrainingFolder(again).identity, replace(trained).identity) == (
        f"{identity}.again-1",
        identity,
        identity,
    )
    assert trained.paths.run == again and TrainingFolder(before).newest_step == TrainingFolder(again).newest_step == 4
    said = capsys.readouterr().out
    assert f"sft: was trained again: its weights equal those of store/{identity}, bit for bit; {before} is kept" in said
    assert f"`stagecoach discard {before}`" in said
    record = read_json(trained.paths.record)
    told = {"folder": again.name, "before": identity, "step": 4, "weights": "equal"}
    assert (record["identity"], record["again"]) == (identity, told)
    assert f"again   its weights equal those of store/{identity}, bit for bit" in chain_text(
        read_chain(trained.paths.ckpt)
    )
    states = states_of(trained)
    assert (states.of("sft").state, states.published("sft")) == ("fresh", None), "its export is the one before"
    export(trained)
    assert read_json(trained.paths.export_record) == exported, "so what comes after it is as it was"
    states = states_of(trained)
    assert (states.of("sft").state, states.published("sft")) == ("fresh", identity)
    assert train(trained) == (0, [])
    assert unlinked(ROOT_OF_RESULTS) == [before]


def test_other_weights_are_told(trained, train, monkeypatch, capsys):  # noqa: F811
    ask(trained)
    monkeypatch.setattr("tests.unit.test_store.save", save_others)
    assert train(trained) == (0, [0])
    assert "its weights differ from those of" in capsys.readouterr().out
    assert read_json(trained.paths.record)["again"]["weights"] == "other"


def save_others(run: Path, step: int) -> None:
    saved = run / "saving" / f"checkpoint-{step}"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"others of step %d" % step)
    TrainingFolder(run).seal(saved, step)


def test_a_call_that_was_cut_off_goes_on_with_the_folder_and_the_next_after_its_end_begins_another(trained, train):  # noqa: F811
    folder = ask(trained)["sft"]
    fill(open_folder(trained), 2)
    assert words_of(trained).startswith("resumes at step 2 2 of 4 as asked (again)")
    close_asked(trained.recipe, trained.results, but=["sft"])
    assert ask(trained) == {} and train(trained) == (0, [2])
    export(trained)
    assert ask(trained) == {}, "the same call, cut off after this stage"
    close_asked(trained.recipe, trained.results)
    assert ask(trained) == {"sft": f"{trained.identity}.again-2"} != {"sft": folder}
    assert train(trained) == (0, [0])
    assert read_json(trained.paths.record)["again"]["before"] == folder


def test_a_call_without_it_goes_on_with_what_is_not_published_yet(trained, train):  # noqa: F811
    ask(trained)
    close_asked(trained.recipe, trained.results)
    assert ask(trained) == {} and train(trained) == (0, [0])
    assert replace(trained).training.newest_step == 4


def test_before_a_call_trains_plan_and_jobs_know_and_the_tree_does_not(trained):
    asked = folders_asked(states_of(trained), ["sft"])
    assert words_of(trained, asked) == "trains again 4 of 4 as asked (again)"
    states = states_of(trained, asked)
    assert states.all()["sft"].left == 4 and states.published("sft") is None, "so children wait for it"
    write_settings(trained.recipe, trained.results)
    settings = trained.results / "settings/train/sft.json"
    plain = settings.read_bytes()
    write_settings(trained.recipe, trained.results, asked)
    assert read_json(settings)["again"] == [asked["sft"]]
    write_settings(trained.recipe, trained.results)
    assert settings.read_bytes() == plain and words_of(trained).startswith("fresh")
    note_asked(trained.recipe, trained.results, ROOT_OF_RESULTS, asked, ["sft"])
    write_settings(trained.recipe, trained.results)
    assert read_json(settings)["again"] == [asked["sft"]]
    assert words_of(trained, asked) == words_of(trained) == "trains again 4 of 4 as asked (again)"


def test_what_nothing_asks_for_is_refused_and_leaves_no_trace(trained):
    asked = folders_asked(states_of(trained), ["sft"])
    with pytest.raises(UserError, match=r"^again=sft: nothing that was asked for needs it; ask for results/a/sft/ckpt"):
        note_asked(trained.recipe, trained.results, ROOT_OF_RESULTS, asked, [])
    assert not trained.paths.again.exists()


def test_another_run_keeps_the_training_before_and_trains_nothing(trained, train):  # noqa: F811
    other = stage_of("b")
    assert train(other) == (0, [])
    ask(trained)
    assert train(trained) == (0, [0])
    assert train(other) == (0, []) and other.training.name == other.identity
    assert [*unlinked(ROOT_OF_RESULTS)] == []


def test_a_stage_that_was_never_trained_or_is_unfinished_is_only_trained(train):  # noqa: F811
    stage = stage_of("a")
    assert ask(stage) == {}
    fill(open_folder(stage), 2)
    assert ask(stage) == {} and not stage.paths.again.exists()
    assert train(stage) == (0, [2])


def test_a_training_before_that_is_gone_cannot_be_compared(trained, train, capsys):  # noqa: F811
    ask(trained)
    shutil.rmtree(trained.training.path.with_name(trained.identity))
    assert train(trained) == (0, [0])
    said = capsys.readouterr().out
    assert "has no such step, so the weights cannot be compared\n" in said


def test_equal_weights_take_over_the_held_out_scores(trained, train):  # noqa: F811
    scores = trained.training.path / "scores/0123.parquet"
    scores.parent.mkdir()
    scores.write_bytes(b"scores")
    ask(trained)
    assert train(trained) == (0, [0])
    assert (replace(trained).training.path / "scores/0123.parquet").samefile(scores)


def test_a_checkpoint_of_the_stage_is_of_the_new_training(trained):
    ask(trained)
    assert as_of(replace(trained), 2).training == replace(trained).training


def test_names_are_refused_in_one_message():
    recipe = load_recipe(ROOT / "config/recipes/tiny.yaml")
    with pytest.raises(UserError, match=r"^again=rlvr9: no stage is named rlvr9; did you mean "):
        check_names(recipe, ["sft", "rlvr9"])
    early = CheckpointOf(stage="sft", step=2)
    recipe = recipe.model_copy(update={"checkpoints": {"sft.step-2": early}})
    with pytest.raises(UserError, match=r"^again=sft.step-2: is a checkpoint of sft, and again=sft trains it again"):
        check_names(recipe, ["sft.step-2"])


@pytest.mark.parametrize("given", ["sft,rlvr1", "sft, rlvr1", ["sft", "rlvr1"]])
def test_names_are_a_list_or_a_text(given):
    assert Config(recipe="a", site="b", again=given).again == ["sft", "rlvr1"]


def test_the_remote_store_keeps_the_training_before_and_gives_none_to_the_new_one(trained, train, tmp_path):  # noqa: F811
    store = new_store(f"{tmp_path}/remote")
    assert push(store, trained.training, "sft", 4) > 0
    ask(trained)
    assert train(trained, store=store) == (0, [0]), "not fetched"
    again = replace(trained).training
    assert push(store, again, "sft", 4) == 0 and [*store.steps()] == [trained.identity]


def test_the_model_card_compares_a_stage_that_was_trained_again(chain):
    path = chain / "rlvr1/ckpt/record.json"
    record = read_json(path)
    folder = f"{record['identity']}.again-1"
    again = {"folder": folder, "before": record["identity"], "step": record["step"], "weights": "other"}
    write_json(path, record | {"again": again})
    told = f"- rlvr1 was trained again: its weights differ from those of store/{record['identity']}."
    assert told in str(model_card(chain / "rlvr1/hf"))
