"""What is trained lies in one folder for all who ask; a kill at any moment leaves nothing half-made."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from scripts import files
from scripts.backends.protocol import Backend, StopRequest
from scripts.commands.migrate import take_runs
from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import config_text, resolve_stage
from scripts.records import Reach
from scripts.stage.consistency import exported_model
from scripts.stage.owner import hold
from scripts.stage.progress import read_log
from scripts.stage.publish import export_checkpoint, publish_checkpoint
from scripts.stage.removal import discard, unlinked
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.store import prune_checkpoints
from scripts.stage.training_folder import TrainingFolder
from scripts.train.export import export
from scripts.train.run import UNFINISHED, Attempt, train_stage
from tests.conftest import ROOT
from tests.killing import killed_at
from tests.stages import as_of, checkpoint, open_folder, ready_stage

RECIPE = load_recipe(ROOT / "config/recipes/tiny.yaml")
SFT = RECIPE.stages["sft"].sft.model_copy(update={"max_num_steps": 4})
SMALL = RECIPE.stages["sft"].model_copy(update={"sft": SFT})


def stage_of(run: str, name: str = "sft", seed: int = 1) -> Stage:
    """A stage that is the same in several runs, but for its seed, below the folder results."""
    results = Path("results", run)
    recipe = RECIPE.model_copy(update={"stages": {name: SMALL.model_copy(update={"seed": seed})}})
    made = ready_stage(recipe, results, name, [{}])
    made.paths.directory.mkdir(exist_ok=True)
    made.paths.config.write_text(config_text(resolve_stage(recipe, name).values()))
    return Stage(recipe, results, name, is_written=True, root=Path("results"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in memory where that is: thousands of folders are synced and removed."""
    memory = Path("/dev/shm")  # noqa: S108
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        monkeypatch.chdir(folder)
        yield
        monkeypatch.undo()


def save(run: Path, step: int) -> None:
    saved = run / "saving" / f"checkpoint-{step}"
    saved.mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(b"weights of step %d" % step)
    (saved / "config.json").write_text("{}")
    TrainingFolder(run).seal(saved, step)


def log(run: Path, steps) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": step, "seconds": 36.0}) + "\n" for step in steps))


def fill(run: Path, *steps: int) -> Path:
    """Let a folder hold these checkpoints, made in one attempt, and a log of the steps up to the last."""
    TrainingFolder(run).begin_attempt(0, call=5)
    for step in steps:
        save(run, step)
    log(run, range(1, max(steps) + 1))
    TrainingFolder(run).end_attempt(max(steps), "finished" if max(steps) == 4 else "unfinished")
    return run


class StandIn(Backend):
    """Seals the last step that it is asked for, and tells from which step it began."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    def train(self, job, allocation):
        self.starts.append(job.start)
        log(job.run, range(job.start + 1, job.max_num_steps + 1))
        save(job.run, job.max_num_steps)


@pytest.fixture
def train(monkeypatch):
    """Trains a stage with a stand-in; the exit status, and the steps from which it trained."""
    monkeypatch.setattr("scripts.train.attempt.code_revision", lambda: None)  # which takes longer than all else

    def train(stage: Stage, **attempt) -> tuple[int, list[int]]:
        backend = StandIn()
        monkeypatch.setattr("scripts.backends.trl.backend.BACKEND", backend)
        return train_stage(replace(stage), Attempt(**attempt), StopRequest()), backend.starts

    return train


def earlier(stage: Stage, *steps: int, name: str = "run") -> Path:
    """A stage's run directory as earlier commits left it, published and exported where it was not set aside."""
    folder, run = fill(open_folder(stage), *steps), stage.paths.directory / name
    stage.paths.directory.joinpath("run").unlink()
    folder.rename(run)
    if name == "run":
        record = {"stage": "sft", "step": steps[-1], "identity": stage.identity, "facts": stage.facts, "parents": []}
        publish_checkpoint(TrainingFolder(run).checkpoints[-1], stage.paths.ckpt, record)
        export_checkpoint(stage.paths.ckpt, stage.paths.export_record.parent)
        (run / "exports").rename(stage.paths.directory / "exports")
        content = read_json(stage.paths.export_record)["content"]
        stage.paths.export.unlink()
        stage.paths.export.symlink_to(f"../exports/{content}")
        assert stage.paths.weights.readlink() == Path(f"../run/checkpoints/step_{steps[-1]}")
    return run


# --- one folder for all who ask ---


def test_what_one_run_trained_another_publishes_exports_and_keeps_when_the_first_goes(train, monkeypatch):
    a, b = stage_of("a"), stage_of("b")
    assert train(a) == (0, [0]) and train(b) == (0, [])
    folder = Path("results/store", a.identity)
    assert (
        a.training.path == b.training.path == a.paths.run == folder and TrainingFolder(folder).identity == folder.name
    )
    assert (a.paths.directory / "run").readlink() == (Path("../../store") / folder.name)
    assert b.paths.weights.resolve() == checkpoint(folder, 4).resolve()
    export(a)
    monkeypatch.setattr(StandIn, "export", lambda *_: pytest.fail("exported a second time"))
    killed = "import os, sys; from pathlib import Path; from scripts.stage.owner import hold\n"
    killed += "with hold(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    lock = (folder / "exports/owner.json").absolute()
    subprocess.run([sys.executable, "-c", killed, lock], cwd=ROOT, check=False)
    assert lock.exists()
    export(b)
    assert not lock.exists(), "a killed export's lock goes with the next"
    assert b.paths.export.resolve() == a.paths.export.resolve() and not b.paths.export.readlink().is_absolute()
    assert read_json(b.paths.export_record) == read_json(a.paths.export_record)
    shutil.rmtree("results/a")
    assert exported_model(b.paths.export_record).is_dir() and Checkpoint.at(b.paths.weights).damage() is None


def test_an_edit_trains_in_another_folder_and_the_first_is_found_again(train):
    assert train(stage_of("a")) == (0, [0])
    assert train(stage_of("a", seed=2)) == (0, [0])
    assert train(stage_of("a")) == (0, [])
    assert len(list(Path("results/store").iterdir())) == 2


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_its_steps_are_trained_again(train, capfd):
    run = fill(open_folder(stage_of("a")), 2, 3)
    (checkpoint(run, 3) / "model.safetensors").write_bytes(b"WEIGHTS of step 3")
    assert train(stage_of("b")) == (0, [2])
    assert "step_3: " in capfd.readouterr().out
    assert [it["step"] for it in read_log(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_weights_are_hashed_once_a_checkpoint_and_once_an_export(train, monkeypatch):
    hashed, really = [], files.sha256_file

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return really(path)

    for module in ("scripts.files", "scripts.stage.rundir"):
        monkeypatch.setattr(f"{module}.sha256_file", noted)
    a = stage_of("a")
    for _ in range(2):
        train(a)
        export(a)
    train(stage_of("b"))
    assert hashed.count("model.safetensors") == 2


def test_a_job_that_may_not_train_says_that_it_waited(train):
    a = stage_of("a")
    assert train(a, publish_only=True, call=9) == (UNFINISHED, [])
    assert a.training.attempts[-1]["outcome"] == "waited"


ASKER = """
import sys, time
from pathlib import Path
from tempfile import TemporaryDirectory
from dataclasses import replace
from tests.unit import test_store as store
from scripts.backends.trl import backend
from scripts.train.run import Attempt, train_stage
from scripts.backends.protocol import StopRequest

class Slow(store.StandIn):
    def train(self, job, allocation):
        time.sleep(1)
        super().train(job, allocation)

backend.BACKEND = Slow()
print(train_stage(store.stage_of(sys.argv[1]), Attempt(patience=60), StopRequest()), backend.BACKEND.starts)
"""


@pytest.mark.slow
def test_of_two_who_ask_at_once_one_trains_and_the_other_waits_and_finds_it_trained():
    for run in "ab":
        stage_of(run)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ASKER]
    askers = [subprocess.Popen([*command, run], stdout=subprocess.PIPE, text=True, env=environment) for run in "ab"]
    said = [asker.communicate(timeout=120)[0] for asker in askers]
    assert {text.splitlines()[-1] for text in said} == {"0 []", "0 [0]"}
    assert sum("is at work here; waiting for it to end" in text for text in said) == 1
    assert [it["outcome"] for it in stage_of("a").training.attempts] == ["finished"]
    assert stage_of("a").paths.record.read_bytes() == stage_of("b").paths.record.read_bytes()


def test_what_any_run_published_is_kept(train):
    a, b = stage_of("a"), stage_of("b")
    run = fill(open_folder(a), 1, 2, 3)
    assert train(as_of(a, 2)) == (0, [])
    prune_checkpoints(TrainingFolder(run), b.settings.checkpointing.model_copy(update={"keep_last_k": 1}))
    assert [each.step for each in TrainingFolder(run).checkpoints] == [2, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_store_is_as_open_as_the_folder_of_results(train):
    Path("results").mkdir()
    Path("results").chmod(0o2777)
    train(stage_of("a"))
    assert Path("results/store").stat().st_mode & 0o7777 == 0o2777


# --- trees of versions before 0.3.0, which `stagecoach migrate` takes over ---


def taken(stage: Stage) -> list[str]:
    """What is said of a stage's run directories that are taken into the store."""
    return list(take_runs(Path("results"), stage.paths))


def test_a_run_directory_is_refused_and_trains_on_once_it_is_taken_into_the_store(train):
    other = stage_of("a", seed=2)
    aside = earlier(other, 1, name=f"run.{other.identity}")
    kept = aside.rename("kept")
    a = stage_of("a")
    run = earlier(a, 2, 3)
    kept.rename(aside)
    with pytest.raises(UserError, match=r"results/a/sft/run and 1 more: trained by .* stagecoach migrate takes them"):
        train(a)
    folder = Path("results/store", a.identity)
    assert taken(a) == [f"{run}: now {folder}", f"{aside}: now results/store/{other.identity}"]
    assert taken(a) == []
    a = stage_of("a")
    assert a.paths.run == folder and a.paths.weights.resolve() == checkpoint(folder, 3).resolve()
    assert exported_model(a.paths.export_record).resolve().parent == (folder / "exports").resolve()
    assert train(a) == (0, [3])
    assert [each.step for each in TrainingFolder(folder).checkpoints] == [2, 3, 4]
    assert TrainingFolder(Path("results/store", other.identity)).newest_step == 1
    assert [(it["from"], it["to"]) for it in TrainingFolder(folder).attempts] == [(0, 3), (3, 4)]
    assert not [*a.paths.directory.glob("run.*")]


def test_an_export_is_taken_and_not_made_again(train, monkeypatch):
    a = stage_of("a")
    earlier(a, 4)
    before = read_json(a.paths.export_record)
    taken(a)
    assert train(a) == (0, [])
    shutil.rmtree(a.paths.export_record.parent)
    monkeypatch.setattr(StandIn, "export", lambda *_: pytest.fail("exported a second time"))
    export(a)
    assert read_json(a.paths.export_record) == before


def test_twins_become_one_folder_that_has_the_checkpoints_of_both(train):
    a, b = stage_of("a"), stage_of("b")
    earlier(a, 1, 3)
    earlier(b, 2, 4)
    taken(a), taken(b)
    assert train(a) == (0, []) and train(b) == (0, [])
    folder = Path("results/store", a.identity)
    assert [each.step for each in TrainingFolder(folder).checkpoints] == [1, 2, 3, 4]
    assert [path.name for path in unlinked(Path("results"))] == [f"{a.identity}.1"]
    assert b.paths.weights.resolve() == checkpoint(folder, 4).resolve()


def test_a_directory_that_nobody_owns_is_not_touched(train):
    a = stage_of("a")
    (a.paths.directory / "run").mkdir()
    (a.paths.directory / "run/weights").write_text("somebody's")
    with pytest.raises(UserError, match=r"has files but no identity.json"):
        taken(a)
    assert (a.paths.directory / "run/weights").exists()
    (a.paths.directory / "run/weights").unlink()
    taken(a)
    assert train(a) == (0, [0])


# --- a kill at every moment ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fresh", "earlier", "twins"])
def test_a_kill_at_any_moment_of_opening_leaves_nothing_half_made(train, kind):
    a, b = stage_of("a"), stage_of("b")
    if kind != "fresh":
        TrainingFolder(earlier(a, 1, 3)).note_reach(3, Reach(4))
    if kind == "twins":
        earlier(b, 2)
    folder, start = Path("results/store", a.identity), 0 if kind == "fresh" else 3
    shutil.copytree("results", "before", symlinks=True)
    begin = open_folder if kind == "fresh" else taken
    for call in range(1, 1000):
        status = killed_at(call, lambda: [begin(stage) for stage in (a, b)])
        assert all(
            each.damage() is None for run in Path("results/store").glob("*") for each in TrainingFolder(run).checkpoints
        )
        assert max(TrainingFolder(run).newest_step for run in (Path("results/a/sft/run"), folder)) == start
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if kind != "fresh":
            taken(a), taken(b)
        assert train(a) == (0, [start]) and train(b) == (0, [])
        wanted = {"fresh": [4], "earlier": [1, 3, 4], "twins": [1, 2, 3, 4]}[kind]
        assert [each.step for each in TrainingFolder(folder).checkpoints] == wanted
        assert [it["step"] for it in read_log(folder / "metrics.jsonl")] == [1, 2, 3, 4]
        assert kind == "fresh" or exported_model(a.paths.export_record).is_dir()
        left = [path for path in Path("results").rglob("*") if path.name.startswith(".") or path.name == "owner.json"]
        assert left == []
        shutil.rmtree("results")
        shutil.copytree("before", "results", symlinks=True)
    assert call > 15


# --- what nothing links to ---


def test_discard_removes_what_no_run_links_to_and_says_what_that_frees(train):
    a, b = stage_of("a"), stage_of("b")
    folder = a.training.path
    for stage in (a, b, stage_of("a", seed=2)):
        train(stage)
    root = Path("results")
    assert unlinked(root) == []
    with pytest.raises(UserError, match="results/b/sft/ckpt/weights leads to it, and 1 more"):
        discard(folder, root)
    shutil.rmtree("results/b")
    shutil.rmtree("results/a/sft/ckpt")
    assert unlinked(root) == [folder]
    with hold(folder / "owner.json"), pytest.raises(UserError, match="is at work here"):
        discard(folder, root)
    size = discard(folder, root)
    assert 4096 < size < 40 * 4096 and not folder.exists() and len(list((root / "store").iterdir())) == 1


def test_a_thousand_runs_are_looked_through_in_a_moment():
    for number in range(1000):
        folder = Path(f"results/r{number // 10}/s{number % 10}")
        folder.mkdir(parents=True)
        (folder / "run").symlink_to(f"../../store/{number:016x}")
        Path(f"results/store/{number:016x}").mkdir(parents=True)
    Path("results/store/unused").mkdir()
    began = time.process_time()
    assert [path.name for path in unlinked(Path("results"))] == ["unused"]
    assert time.process_time() - began < 2


def test_a_stage_without_a_root_has_its_store_in_its_own_results():
    a = replace(stage_of("a"), root=None)
    assert a.training.path == Path("results/a/store", a.identity)
