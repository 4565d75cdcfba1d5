"""How far asynchronous GRPO gets from a checkpoint: what its files say, and that no attempt waits for rows for ever."""

import os
import pickle
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.backends.nemo_rl import train as nemo_rl_backend
from scripts.backends.nemo_rl.backend import BACKEND
from scripts.backends.nemo_rl.checkpoints import batches_taken, generated_steps, reach_of, reached, sure_step
from scripts.backends.nemo_rl.train import RaySub
from scripts.backends.protocol import StopRequest
from scripts.controller.retries import reason_to_stop
from scripts.errors import CutOffError, UserError
from scripts.files import read_json, sha256_file, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.stage_settings import Checkpointing
from scripts.records import Reach
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder
from scripts.train.run import UNFINISHED, Attempt, train_stage
from tests.conftest import ROOT
from tests.stages import as_of
from tests.unit.asynchronous_loop import Loop, Saved

SAVED = Path(__file__).with_name("nemo_rl_saved")


def save(path: Path, value: object) -> Path:
    """A file as torch.save lays it out."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(value, protocol=2))
    return path


@pytest.mark.parametrize(
    ("name", "batches", "taken"),
    [("of_step_1", 5, 4), ("of_step_4", 5, 5), ("with_worker", 5, 3), ("shuffled", 5, 3)],
)
def test_the_batches_that_a_real_loader_gave_out_are_read_without_torch(name, batches, taken):
    assert batches_taken(SAVED / f"loader_{name}.pt", batches) == taken


def test_a_loader_that_met_its_end_has_nothing_left_though_a_resume_would_begin_anew(tmp_path):
    state = {"_num_yielded": 2, "_iterator_finished": True}
    assert batches_taken(save(tmp_path / "train_dataloader.pt", state), 9) == 9


def test_the_steps_that_a_real_replay_buffer_holds_whole_are_read_without_torch(tmp_path):
    assert generated_steps(SAVED / "replay_buffer_of_step_1.pt", prompts=2) == {1}
    assert generated_steps(SAVED / "replay_buffer_of_step_1.pt", prompts=3) == set()
    assert generated_steps(tmp_path / "replay_buffer.pt", prompts=2) == set(), "v0.6.0 saves none"


def test_no_code_that_a_checkpoints_file_names_is_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    state = {"_num_yielded": 3, "_iterator_finished": False, "more": Harmful()}
    assert batches_taken(save(tmp_path / "train_dataloader.pt", state), 9) == 3
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"rows", {}, {"_iterator_finished": False}, [1]])
def test_a_loader_of_an_unknown_kind_is_one_message_that_says_what_to_do(tmp_path, content):
    path = tmp_path / "step_4" / "train_dataloader.pt"
    path.parent.mkdir()
    path.write_bytes(content) if isinstance(content, bytes) else save(path, content)
    with pytest.raises(UserError, match=r"step_4/train_dataloader.pt: it does not tell .* rename step_4$"):
        batches_taken(path, 9)


def test_the_sure_step_of_a_real_checkpoint(tmp_path):
    shutil.copy(SAVED / "loader_of_step_1.pt", tmp_path / "train_dataloader.pt")
    shutil.copy(SAVED / "replay_buffer_of_step_1.pt", tmp_path / "replay_buffer.pt")
    grpo = {"num_prompts_per_step": 2, "async_grpo": {"max_trajectory_age_steps": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"grpo": grpo}))
    assert sure_step(Checkpoint(1, tmp_path), rows=10) == 2, "the buffered step; the last batch would be dropped"
    assert sure_step(Checkpoint(1, tmp_path), rows=20) == 6


@pytest.mark.parametrize(
    ("start", "left", "generated", "age", "step"),
    [
        (0, 10, set(), 1, 8),  # fresh: two steps before the data end
        (0, 10, set(), 3, 6),
        (4, 3, {4}, 1, 6),
        (4, 3, set(), 1, 5),
        (4, 0, {4, 5}, 1, 6),
        (4, 0, {5}, 1, 4),  # the next step's own groups are lost
        (4, 1, {5}, 1, 4),
        (4, 0, set(), 1, 4),
    ],
)
def test_steps_are_sure_up_to_those_whose_groups_are_dropped_when_the_data_end(start, left, generated, age, step):
    assert reached(start, left, generated, age) == step


@given(seed=st.integers(0), age=st.integers(1, 3), prompts=st.sampled_from([1, 2, 4]), batches=st.integers(1, 14))
@settings(max_examples=300, deadline=None)
def test_the_loop_never_waits_for_ever_up_to_the_sure_step_however_often_it_was_resumed(seed, age, prompts, batches):
    random, saved = Random(seed), Saved()
    while True:
        left = 0 if saved.finished else batches - saved.taken
        generated = {step for step, groups in saved.groups.items() if groups >= prompts}
        aim = reached(saved.step, left, generated, age)
        if aim == saved.step:
            break
        loop = Loop(saved, batches, prompts, age, random)
        assert loop.train(random.randint(saved.step + 1, aim))
        saved = loop.save()
        assert loop.train(aim)


def test_a_step_further_than_the_sure_one_may_wait_for_ever():
    def waits(random):
        return not Loop(Saved(), 8, 2, 1, random).train(7)

    assert any(waits(Random(seed)) for seed in range(300))


def test_what_is_noted_of_a_checkpoint_that_is_made_again_is_forgotten(tmp_path):
    for step in (2, 4, 6):
        TrainingFolder(tmp_path).note_reach(step, Reach(8, is_end=True))
    TrainingFolder(tmp_path).forget_beyond(4)
    assert (
        TrainingFolder(tmp_path).noted_reach(4) == Reach(8, is_end=True)
        and TrainingFolder(tmp_path).noted_reach(6) is None
    )


def test_a_stage_ends_at_its_planned_step_or_where_its_data_end(tmp_path):
    assert TrainingFolder(tmp_path).last_step(4, planned=9) == 9
    TrainingFolder(tmp_path).note_reach(4, Reach(6))
    assert TrainingFolder(tmp_path).last_step(4, planned=9) == 9, (
        "an attempt that aims at less, to save what it trains, ends nothing"
    )
    TrainingFolder(tmp_path).note_reach(4, Reach(6, is_end=True))
    assert TrainingFolder(tmp_path).last_step(4, planned=9) == 6


# --- a stage's life: the trainer with a driver that keeps to the model of the loop ---

RECIPE = load_recipe(ROOT / "config/recipes/super3.yaml")
PROMPTS = 2


class Killed(BaseException):
    """The trainer was killed with its driver."""


def drivers_last_step(job):
    """The step that the driver aims at, as launch_of tells it."""
    newest = Checkpoint(job.start, job.resume_from) if job.resume_from else None
    return reach_of(job.config, job.training, newest, job.planned, job.rows).step


class Driver(RaySub):
    """Stands for ray.sub, the driver and its logs: a look lets it train a step, save, end or wait for ever."""

    def __init__(self, world, job):
        self.world, self.job, self.random = world, job, world.random
        self.how, steps = world.schedule.pop(0) if world.schedule else ("whole", 0)
        saved = self._resumed(job.resume_from)
        self.loop = Loop(saved, world.batches, PROMPTS, 1, self.random, world.failing)
        self.last = drivers_last_step(job)
        self.until = self.last if self.how == "whole" else min(saved.step + steps, self.last)
        self.log = world.folder / "driver.log"
        self.log.write_text("")
        self.read = {}
        self.process = SimpleNamespace(returncode=0, poll=lambda: None if self.is_running() else 0)
        world.driver = self

    def _resumed(self, path):
        if path is None:
            return Saved()
        return self.world.states[sha256_file(path / "train_dataloader.pt"), int(path.name.removeprefix("step_"))]

    def is_running(self) -> bool:
        if self.loop.step == self.until and self.how != "whole":
            return self._interrupt()
        if self.loop.step >= self.last:
            return False
        if not self.loop.train(self.loop.step + 1):
            assert self.world.failing, f"waits for ever at step {self.loop.step}, aims at {self.last}"
            return self._wait()
        if self.loop.step % self.world.save_period == 0 or self.loop.step == self.last:
            self._save()
        return True

    def _wait(self) -> bool:
        if not self.loop.running:
            self.log.write_text("(AsyncTrajectoryCollector pid=7) Trajectory collection stopped\n")
        self.world.clock += 1e6
        return True

    def _interrupt(self) -> bool:
        if self.how == "killed in a save":
            self._save(is_whole=False)
        if self.how.startswith("killed"):
            shutil.copytree(self.job.run, self.world.folder / "left")
            raise Killed
        if self.how == "deadline":
            self._save()
            self.log.write_text("Timeout has been reached, stopping training early\n")
        elif self.how == "raises":
            self.log.write_text("Error in async loop: CUDA error\n")
        elif self.how == "driver killed":
            self.process.returncode = -9
        elif self.how == "hangs":
            self.world.clock += 1e6
            return True
        return False

    def _save(self, is_whole=True):
        state, step = self.loop.save(), self.loop.step
        whole = self.job.run / f"checkpoints/step_{step}"
        path = whole.with_name(f"tmp_{whole.name}")
        if whole.exists():
            return
        shutil.rmtree(path, ignore_errors=True)
        (path / "policy/weights").mkdir(parents=True)
        (path / "policy/weights/shard.distcp").write_bytes(os.urandom(8))
        (path / "training_info.json").write_text("{}")
        grpo = {"num_prompts_per_step": PROMPTS, "async_grpo": {"max_trajectory_age_steps": 1}}
        (path / "config.yaml").write_text(yaml.safe_dump({"grpo": grpo}))
        loader = {"_num_yielded": state.taken, "_iterator_finished": state.finished, "token": self.random.random()}
        save(path / "train_dataloader.pt", loader)
        save(path / "replay_buffer.pt", {"target_weight_versions": sorted(state.groups.elements())})
        self.world.states[sha256_file(path / "train_dataloader.pt"), step] = state
        if is_whole:
            path.rename(whole)

    def end(self):
        pass

    def driver_log(self):
        return self.log

    def cluster_logs(self):
        return self.world.folder


class World:
    """A stage, its interruptions and its clock."""

    def __init__(self, folder, monkeypatch, schedule, batches, save_period, seed, failing=0.0, **keeps):
        self.folder, self.schedule, self.batches, self.save_period = folder, schedule, batches, save_period
        self.random, self.failing, self.states, self.clock, self.driver = Random(seed), failing, {}, 0.0, None
        grpo = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": 2, "async_grpo": {"enabled": True}}
        policy = {"train_global_batch_size": 2 * PROMPTS, "max_total_sequence_length": 8}
        changes = {"grpo": grpo, "policy": policy, "max_num_steps": None}
        changes["checkpointing"] = Checkpointing(save_period=save_period, **keeps)
        settings = RECIPE.stages["rlvr1"].model_copy(update=changes)
        self.stage = Stage(RECIPE.model_copy(update={"stages": {"rlvr1": settings}}), folder, "rlvr1")
        self.ckpt, self.call = self.stage.paths.ckpt, 1
        split = self.stage.train_split
        split.parent.mkdir(parents=True)
        for file in (split, self.stage.validation_split):
            file.write_text("{}\n")
        rows = {"sha256": sha256_file(split), "rows": batches * PROMPTS}
        write_json(self.stage.manifest, {"train": rows, "validation": rows | {"rows": 1}})
        self.run = self.stage.training.path
        world = self

        class Steps:
            last_seconds = 0.0

            def __init__(self, *_):
                self.last_step = 0

            def follow(self, is_over):
                before, self.last_step = self.last_step, world.driver.loop.step if world.driver else 0
                return int(self.last_step != before and self.last_step > world.driver.job.start)

        site = SimpleNamespace(stall_seconds=1000, startup_seconds=0)
        runtime = SimpleNamespace(nemo_rl=site, settings=SimpleNamespace(judges={}))

        def launch(job, _):
            world.job, last = job, drivers_last_step(job)
            return SimpleNamespace(run=folder, runtime=runtime, max_num_steps=last)

        monkeypatch.setattr(nemo_rl_backend, "launch_of", launch)
        monkeypatch.setattr(nemo_rl_backend, "RaySub", lambda *_: Driver(world, world.job))
        monkeypatch.setattr(nemo_rl_backend, "StepLog", Steps)
        monkeypatch.setattr(nemo_rl_backend, "time", SimpleNamespace(time=lambda: world.clock, sleep=lambda _: None))
        monkeypatch.setattr(nemo_rl_backend, "LOOK_SECONDS", 0)
        monkeypatch.setattr(nemo_rl_backend._Watch, "_note_startup", lambda self: None)
        monkeypatch.setattr(BACKEND, "train", nemo_rl_backend.train)
        monkeypatch.setattr("scripts.train.attempt.code_revision", lambda: None)

    def attempt(self, stage: Stage | None = None) -> int:
        stop, how = StopRequest(), Attempt(call=self.call)
        before = len(TrainingFolder(self.run).attempts_of(self.call))
        try:
            status = train_stage(replace(stage or self.stage), how, stop)
            why = reason_to_stop(TrainingFolder(self.run), self.call, before, None, "the log")
            assert status == 0 or why is None or "two attempts in a row" in why
            return status
        except Killed:
            shutil.rmtree(self.run)
            (self.folder / "left").rename(self.run)
            (self.run / "owner.json").unlink()  # this process lives on, unlike the one that was killed
        except CutOffError:
            pass
        except UserError as error:
            if "two attempts in a row" not in str(error) and "in async loop" not in str(error).lower():
                raise
            self.call += 1  # a person looks at the log and starts again
        return UNFINISHED

    def live(self, until: int | None = None) -> dict:
        """Attempts until the stage is published as of a step (none: its last); its record."""
        stage = as_of(self.stage, until)
        for _ in range(40):
            if self.attempt(stage) == 0:
                record = read_json(stage.paths.record)
                newest = TrainingFolder(self.run).checkpoints[-1].step
                assert record["step"] == TrainingFolder(self.run).last_step(record["step"], stage.planned)
                assert newest == record["step"] or until, "only a driver that is ended may have gone further"
                return record
        raise AssertionError("never published")


INTERRUPTIONS = ["killed", "killed in a save", "deadline", "raises", "driver killed", "hangs"]
SCHEDULES = st.lists(st.tuples(st.sampled_from(INTERRUPTIONS), st.integers(1, 4)), max_size=7)


@pytest.mark.slow
@given(
    schedule=SCHEDULES,
    batches=st.integers(3, 14),
    save_period=st.integers(1, 5),
    parts=st.lists(st.integers(1, 6), max_size=2),
    seed=st.integers(0),
)
@settings(max_examples=60, deadline=None)
def test_whatever_interrupts_it_a_stage_is_published_and_no_driver_waits_for_rows(
    tmp_path_factory, schedule, batches, save_period, parts, seed
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        parts = sorted(part * save_period for part in parts)
        keeps, reached = {"keep_last_k": 1, "keep_steps": parts} if parts else {}, {0}
        folder = tmp_path_factory.mktemp("stage")
        world = World(folder, monkeypatch, list(schedule), batches, save_period, seed, **keeps)
        for part in parts:
            step = world.live(part)["step"]
            reached.add(step)
            assert step == min(part, batches - 2) or TrainingFolder(world.run).last_step(step, batches) == step
        record = world.live()
    if parts:
        steps = {checkpoint.step for checkpoint in TrainingFolder(world.run).checkpoints}
        assert (
            reached & {*parts}
            <= steps
            <= reached | {*parts, record["step"], TrainingFolder(world.run).checkpoints[-1].step}
        )
    planned = batches - 2
    assert 1 <= record["step"] <= planned
    if record["step"] == planned:
        assert "data_ended" not in record
    else:
        ended = record["data_ended"]
        assert (ended["planned"], ended["rows_skipped"]) == (planned, (planned - record["step"]) * PROMPTS)


@pytest.mark.slow
@given(batches=st.integers(4, 14), save_period=st.integers(1, 5), seed=st.integers(0))
@settings(max_examples=40, deadline=None)
def test_where_groups_fail_and_the_data_end_early_what_is_trained_is_saved_and_published(
    tmp_path_factory, batches, save_period, seed
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(tmp_path_factory.mktemp("stage"), monkeypatch, [], batches, save_period, seed, failing=0.1)
        try:
            record = world.live()
        except UserError as error:
            assert "its data end before the first step" in str(error)
            assert TrainingFolder(world.run).checkpoints == []
        else:
            assert 1 <= record["step"] <= batches - 2


def test_what_was_trained_before_a_standstill_is_saved_by_the_next_attempt_and_the_one_after_goes_on(
    tmp_path, monkeypatch
):
    world = World(tmp_path, monkeypatch, [("deadline", 2), ("hangs", 1)], batches=14, save_period=5, seed=3)
    aims, steps = [], []
    for _ in range(3):
        assert world.attempt() == UNFINISHED
        aims.append(world.driver.job.max_num_steps)
        steps.append(TrainingFolder(world.run).checkpoints[-1].step)
    assert aims[0] == 12 and aims[2] == 3 and steps == [2, 2, 3]
    assert world.attempt() == 0
    assert read_json(world.ckpt / "record.json")["step"] > 3
