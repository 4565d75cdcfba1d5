"""What another run trained is taken over: whole checkpoints, with their steps and attempts, or nothing."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from scripts.backends.nemo_rl.checkpoints import reason_unfinished, seal_finished
from scripts.backends.protocol import Backend
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import config_text, resolve_stage
from scripts.report.cost import cost_of
from scripts.stage import twin
from scripts.stage.attempts import begin_attempt, end_attempt, read_attempts
from scripts.stage.disk import tree_bytes
from scripts.stage.owner import hold
from scripts.stage.progress import read_log
from scripts.stage.reach import Reach, note_reach, noted_reach
from scripts.stage.rundir import checkpoints, damage_of, open_run_directory, seal_checkpoint
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, States
from scripts.stage.status import status_of
from scripts.stage.stop import StopRequest
from scripts.train.run import UNFINISHED, Attempt, train_stage
from tests.conftest import ROOT
from tests.stages import checkpoint, ready_stage

RECIPE = load_recipe(ROOT / "config/recipes/tiny.yaml")
SMALL = RECIPE.model_copy(
    update={
        "stages": {
            "sft": RECIPE.stages["sft"].model_copy(
                update={"sft": RECIPE.stages["sft"].sft.model_copy(update={"max_num_steps": 4})}
            )
        }
    }
)


def state_of(stage: Stage) -> StageState:
    """The state of a stage as its files say now."""
    return States(stage.recipe, stage.results, stage.root).of(stage.name)


@pytest.fixture(autouse=True)
def look_anew(monkeypatch):
    """Nothing of an earlier look is remembered."""
    monkeypatch.setattr(twin, "LOOK_AGAIN_SECONDS", 1e-9)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Stages that are the same in several runs, and a backend that makes steps of no weight worth mentioning."""
    monkeypatch.chdir(tmp_path)

    def stage(run: str, name: str = "sft") -> Stage:
        results = Path("results", run)
        recipe = SMALL.model_copy(update={"stages": {name: SMALL.stages["sft"]}})
        made = ready_stage(recipe, results, name, [{}])
        made.paths.directory.mkdir(exist_ok=True)
        made.paths.config.write_text(config_text(resolve_stage(recipe, name).values()))
        return Stage(recipe, results, name, is_written=True, root=Path("results"))

    return stage


def fill(stage: Stage, *steps: int, gpus: int = 0) -> Path:
    """A run directory in which one attempt made these checkpoints and logged the steps up to the last."""
    run = stage.paths.run
    open_run_directory(run, stage.identity, stage.facts, stage.config)
    begin_attempt(run, 0, call=5, gpus=gpus, code={"commit": None, "dirty": None, "scripts": "a"})
    for step in steps:
        save(run, step)
    log(run, range(1, max(steps) + 1))
    end_attempt(run, max(steps), "finished" if max(steps) == 4 else "unfinished")
    return run


def save(run: Path, step: int) -> None:
    saved = run / "saving" / f"checkpoint-{step}"
    (saved / "policy/weights").mkdir(parents=True)
    for name in ("model.safetensors", "policy/weights/__0_0.distcp"):
        (saved / name).write_bytes(b"weights of step %d" % step)
    seal_checkpoint(saved, run, step)


def log(run: Path, steps, seconds: float = 36.0) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": step, "seconds": seconds, "loss": 1.0}) + "\n" for step in steps))


def train(stage: Stage, monkeypatch, last: int = 4, **attempt) -> tuple[int, list[int]]:
    """Train with a backend that seals the last step; the exit status, and the steps from which it trained."""
    starts = []

    class StandIn(Backend):
        def train(self, job, allocation):
            starts.append(job.start)
            log(job.run, range(job.start + 1, last + 1))
            save(job.run, last)

    monkeypatch.setattr("scripts.backends.trl.backend.BACKEND", StandIn())
    return train_stage(stage.reread(), Attempt(**attempt), StopRequest()), starts


def test_what_another_run_trained_to_the_end_is_published_here_and_stays_when_that_run_goes(runs, monkeypatch):
    a, b = runs("a"), runs("b")
    theirs = fill(a, 2, 4)
    assert state_of(b).is_trained and state_of(b).left == 0
    assert train(b, monkeypatch, publish_only=True) == (0, [])
    run = b.paths.run
    weights = checkpoint(run, 4) / "policy/weights/__0_0.distcp"
    assert weights.samefile(checkpoint(theirs, 4) / "policy/weights/__0_0.distcp")
    assert tree_bytes(run) < 16 * 4096 and not [*run.glob(".*")]
    shutil.rmtree("results/a")
    assert damage_of(checkpoint(run, 4)) is None
    assert [entry["step"] for entry in read_log(run / "metrics.jsonl")] == [1, 2, 3, 4]
    record = read_json(b.paths.record)
    assert [(it["steps"], it["code"]["scripts"]) for it in record["trained_by"]] == [([1, 4], "a")]
    assert train(b, monkeypatch) == (0, [])


def test_the_hours_of_another_run_are_not_counted_a_second_time(runs, monkeypatch):
    fill(runs("a"), 3, gpus=8)
    b = runs("b")
    assert train(b, monkeypatch) == (0, [3])
    assert [attempt["run"] for attempt in read_attempts(b.paths.run)] == ["results/a/sft", None]
    seconds = pd.Series([36.0] * 4)
    cost = cost_of(b.paths.run, seconds)
    assert (cost.attempts, cost.adopted, cost.at_least) == (1, "up to step 3 trained in results/a/sft", False)
    assert cost.hours < 0.01 and cost.step_hours <= cost.hours and cost.gpu_hours == 0
    c = runs("c")
    assert train(c, monkeypatch) == (0, [])
    words = "up to step 3 trained in results/a/sft, trained in results/b/sft"
    assert cost_of(c.paths.run, seconds).adopted == words
    assert cost_of(c.paths.run, seconds).hours == 0
    assert [span["steps"] for span in read_json(c.paths.record)["trained_by"]] == [[1, 3], [4, 4]]


def test_nothing_is_taken_that_is_no_newer_or_another_identity_or_beyond_what_is_wanted(runs, monkeypatch):
    a, b = runs("a"), runs("b")
    theirs = fill(a, 2)
    ours = fill(b, 2)
    assert train(b, monkeypatch) == (0, [2])
    assert not checkpoint(ours, 2).joinpath("model.safetensors").samefile(checkpoint(theirs, 2) / "model.safetensors")
    assert [attempt["run"] for attempt in read_attempts(ours)] == [None, None]
    c = runs("c")
    identity = read_json(theirs / "identity.json")
    write_json(theirs / "identity.json", identity | {"identity": "0" * 16})
    shutil.rmtree("results/b")
    assert state_of(c).left == 4 and train(c, monkeypatch) == (0, [0])
    assert train(replace(runs("d"), root=None), monkeypatch) == (0, [0])


@pytest.mark.parametrize("harm", ["content", "size", "missing", "unlisted", "log", "unreadable"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(runs, monkeypatch, capfd, harm):
    theirs = fill(runs("a"), 2, 4)
    weights = checkpoint(theirs, 4) / "model.safetensors"
    if harm == "content":
        weights.write_bytes(b"WEIGHTS of step 4")
    elif harm == "size":
        weights.write_bytes(b"weights")
    elif harm == "missing":
        weights.unlink()
    elif harm == "unlisted":
        (checkpoint(theirs, 4) / "files.json").write_text("{")
    elif harm == "log":
        lines = (theirs / "metrics.jsonl").read_text().splitlines(keepends=True)
        (theirs / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    else:
        monkeypatch.setattr(twin, "link_or_copy", refuse(weights, twin.link_or_copy))
    b = runs("b")
    assert train(b, monkeypatch) == (0, [2])
    assert "results/a/sft/run/checkpoints/step_4 is not taken over" in capfd.readouterr().out
    assert [it["step"] for it in read_log(b.paths.run / "metrics.jsonl")] == [1, 2, 3, 4]


def refuse(refused: Path, really):
    def link(source: str, target: str) -> None:
        source = Path(source)
        if source.name == refused.name and source.parent.name == refused.parent.name:
            raise PermissionError(13, "Permission denied", str(source))
        really(source, target)

    return link


def test_a_job_that_may_not_train_and_found_no_sound_checkpoint_asks_for_its_nodes(runs, monkeypatch):
    weights = checkpoint(fill(runs("a"), 4), 4) / "model.safetensors"
    weights.write_bytes(b"WEIGHTS of step 4")
    b = runs("b")
    assert train(b, monkeypatch, publish_only=True, call=9) == (UNFINISHED, [])
    assert read_attempts(b.paths.run)[-1]["outcome"] == "waited"


def test_an_earlier_checkpoint_is_taken_beside_newer_ones_of_ones_own_whose_story_stays(runs, monkeypatch):
    theirs, b = fill(runs("a"), 2, 4), runs("b")
    ours = fill(b, 4)
    before = (ours / "attempts.jsonl").read_bytes(), (ours / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(Stage, "planned", 2)
    assert twin.adopt(b, None).step == 2
    assert [each.step for each in checkpoints(ours)] == [2, 4]
    assert before == ((ours / "attempts.jsonl").read_bytes(), (ours / "metrics.jsonl").read_bytes())
    assert theirs.exists()


def test_steps_that_are_to_be_kept_come_along_and_without_one_only_what_lies_before_it_is_taken(runs, monkeypatch):
    fill(runs("a"), 1, 2, 3, 4)
    fill(runs("c"), 1, 4)
    b = runs("b")
    keeping = b.settings.checkpointing.model_copy(update={"keep_steps": [2]})
    b.recipe.stages["sft"] = b.settings.model_copy(update={"checkpointing": keeping})
    assert train(b, monkeypatch) == (0, [])
    assert [each.step for each in checkpoints(b.paths.run)] == [2, 4]
    assert cost_of(b.paths.run, pd.Series([36.0] * 4)).adopted == "trained in results/a/sft"
    shutil.rmtree("results/a")
    shutil.rmtree("results/b")
    d = replace(runs("b"), recipe=b.recipe)
    assert state_of(d).start == 1 and train(d, monkeypatch) == (0, [1])


def test_a_stage_of_another_name_a_sample_and_what_was_set_aside_count_and_links_to_a_run_do_not(runs):
    b = runs("b")
    fill(runs("b", "sft.lr-1e-3"), 4)
    assert [str(path) for path in twin.twins_of(b, b.identity)] == ["results/b/sft.lr-1e-3/run"]
    Path("results/b/sft.step-2").mkdir()
    Path("results/b/sft.step-2/run").symlink_to("../sft.lr-1e-3/run")
    Path("results/b/sft.step-3").mkdir()
    Path("results/b/sft.step-3/run").symlink_to("../sft/run")
    aside = fill(runs("a/sample-8"), 1)
    aside.rename(aside.with_name(f"run.{b.identity}"))
    b.paths.run.mkdir()
    shutil.copytree("results/b/sft.lr-1e-3/run", "results/b/sft/run.old")
    assert len(twin.twins_of(b, b.identity)) == 2
    assert [(it.step, run.name) for it, run in twin.twin_checkpoints(b, b.identity, 0)] == [
        (4, "run"),
        (1, f"run.{b.identity}"),
    ]


def test_plan_and_status_say_where_it_was_trained_and_who_trains_it_now(runs):
    a, b = runs("a"), runs("b")
    fill(a, 3)
    state = state_of(b)
    assert (state.state, state.start, state.left, state.note) == ("resumes", 3, 1, "trained in results/a/sft")
    with hold(a.paths.owner):
        note = state_of(b).note
        assert note.startswith(f"trained in results/a/sft, results/a/sft: process {os.getpid()} on ")
        assert note.endswith(" trains the same")
    save(a.paths.run, 4)
    state = state_of(b)
    assert state.publishes_again
    assert status_of(state, b.paths).note == "to be published, trained in results/a/sft"
    b.manifest.unlink()
    assert state_of(b).note == "its data come first"


def test_where_the_data_of_asynchronous_training_end_is_taken_over_as_well(runs, monkeypatch):
    theirs, b = fill(runs("a"), 3), runs("b")
    note_reach(theirs, 3, Reach(3, is_end=True))
    assert state_of(b).is_trained
    assert (state_of(b).end, state_of(b).left) == (3, 0)
    open_run_directory(b.paths.run, b.identity, b.facts, b.config)
    assert twin.adopt(b, None).step == 3
    assert noted_reach(b.paths.run, 3) == Reach(3, is_end=True)


CHANGES = {"link", "rename", "replace", "mkdir", "unlink", "write"}


def killed_at(call: int, deed) -> int:
    """Do something in a process that is killed before this one of its changes to files; its exit status."""
    calls = 0

    def trace(frame, event, function):
        nonlocal calls
        if event == "c_call" and function.__name__ in CHANGES:
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        sys.setprofile(trace)
        deed()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_leaves_nothing_half_made(runs, monkeypatch):
    a, b = runs("a"), runs("b")
    fill(a, 4)
    fill(b, 2)
    shutil.copytree("results", "before", symlinks=True)
    for call in range(1, 1000):
        status = killed_at(call, lambda: twin.adopt(b, None))
        assert all(damage_of(each.path) is None for each in checkpoints(b.paths.run))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert train(b, monkeypatch) == (0, [])
        assert not [*b.paths.run.glob(".*")] and damage_of(checkpoint(b.paths.run, 4)) is None
        assert cost_of(b.paths.run, pd.Series([36.0] * 4)).adopted == "trained in results/a/sft"
        shutil.rmtree("results")
        shutil.copytree("before", "results", symlinks=True)
    assert call > 15 and len(checkpoints(b.paths.run)) == 2


def test_a_thousand_run_directories_are_read_in_a_moment_and_what_is_damaged_is_none(runs):
    b = runs("b")
    record = {"identity": "0" * 16, **b.facts}
    for number in range(1000):
        folder = Path(f"results/r{number // 10}/s{number % 10}/run")
        folder.mkdir(parents=True)
        (folder / "identity.json").write_text(json.dumps(record) if number % 100 else "{")
    Path("results/r1/s1/run/identity.json").chmod(0)
    fill(runs("a"), 4)
    began = time.perf_counter()
    assert state_of(b).is_trained
    assert time.perf_counter() - began < 2


def test_a_folder_of_results_that_is_not_there_or_not_readable_holds_no_twins(runs):
    b = replace(runs("b"), root=Path("none"))
    assert twin.twins_of(b, b.identity) == [] and not state_of(b).is_trained


def test_a_checkpoint_of_nemo_rl_is_taken_over_with_its_folders_though_not_every_file_is_hashed(runs):
    a, b = runs("a"), runs("b")
    theirs = a.paths.run
    open_run_directory(theirs, a.identity, a.facts, a.config)
    folder = checkpoint(theirs, 4)
    files = ["policy/weights/iter_0000000/run_config.yaml", "policy/weights/iter_0000000/metadata.json"]
    files += ["policy/weights/iter_0000000/__0_0.distcp", "train_dataloader.pt", "config.yaml"]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"a: 1\n" * (1 << (18 if name.endswith("distcp") else 1)))
    (folder / "training_info.json").write_text('{"step": 4}')
    assert [each.step for each in seal_finished(theirs)] == [4]
    log(theirs, range(1, 5))
    open_run_directory(b.paths.run, b.identity, b.facts, b.config)
    taken = twin.adopt(b, None)
    assert reason_unfinished(taken.path) is None and seal_finished(b.paths.run) == []
    assert {str(path.relative_to(taken.path)) for path in taken.path.rglob("*") if path.is_file()} == {
        *files,
        "training_info.json",
        "files.json",
    }
