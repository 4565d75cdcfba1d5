"""Run directories bear an identity and are never lost; a checkpoint counts when it is whole; publishing is all or nothing."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from scripts.backends.by_name import backend_of
from scripts.backends.protocol import Allocation, Backend, StopRequest, TrainingJob, read_job, write_job
from scripts.backends.trl.cluster import train_apart
from scripts.errors import CutOffError, UserError
from scripts.files import (
    make_scratch,
    open_atomically,
    read_json,
    replace_directory,
    scratch_folder,
    sweep_leftovers,
    write_json,
)
from scripts.model.shape import fresh_parameters
from scripts.processes import process_mark
from scripts.recipe.criteria import Criterion
from scripts.recipe.gym_release import Gym, GymServer
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import config_text, resolve_stage, training_config
from scripts.recipe.stage_settings import Checkpointing
from scripts.rewards.gym import GymUnavailable
from scripts.stage.progress import read_log
from scripts.stage.publish import export_checkpoint, publish_checkpoint
from scripts.stage.rundir import step_of
from scripts.stage.stage import Stage
from scripts.stage.store import identity_of, prune_checkpoints, stage_facts
from scripts.stage.tables import METRICS, write_metrics
from scripts.stage.training_folder import TrainingFolder
from scripts.train.preflight import check_stage, checkpoint_bytes, checkpoints_at_once
from scripts.train.run import UNFINISHED, Attempt, train_stage
from tests.conftest import ROOT
from tests.stages import as_of, checkpoint_record, ready_stage

RECIPE = load_recipe(ROOT / "config/recipes/tiny.yaml")
CONFIG = resolve_stage(RECIPE, "rlvr1")
FACTS = {"config": "c", "train_split": "t", "validation_split": "v", "parent_export": None}
RECORD = {"stage": "rlvr1", "step": 5, "identity": "one", "facts": FACTS, "parents": []}


def save(run: Path, step: int, weights: bytes = b"weights") -> Path:
    """A checkpoint as a trainer leaves it."""
    saved = run / "saving" / f"checkpoint-{step}"
    saved.mkdir(parents=True)
    for name, content in {"model.safetensors": weights, "config.json": b"{}", "optimizer.pt": b"moments"}.items():
        (saved / name).write_bytes(content)
    return saved


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "store" / "one"
    (directory / "checkpoints").mkdir(parents=True)
    return directory


# --- files ---


def test_files_written_together_appear_together_or_not_at_all(tmp_path):
    paths = tmp_path / "a", tmp_path / "deep" / "b"
    paths[0].write_text("old")
    with pytest.raises(RuntimeError), open_atomically(*paths) as (first, second):
        first.write(b"new")
        second.write(b"new")
        raise RuntimeError
    assert paths[0].read_text() == "old" and list((tmp_path / "deep").iterdir()) == []


def test_a_replaced_directory_is_the_old_one_or_the_new_one(tmp_path):
    target = tmp_path / "ckpt"
    for content in ("one", "two"):
        with replace_directory(target) as fresh:
            (fresh / "file").write_text(content)
        assert (target / "file").read_text() == content
    with pytest.raises(RuntimeError), replace_directory(target) as fresh:
        (fresh / "file").write_text("three")
        raise RuntimeError
    assert (target / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.fixture
def killed() -> str:
    """The mark of a process that is gone."""
    return subprocess.run(
        [sys.executable, "-c", "from scripts.processes import process_mark; print(process_mark())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_what_a_killed_process_left_beside_a_file_is_removed_by_the_next_writer(tmp_path, killed):
    (tmp_path / f".file.{killed}.00aa.tmp").write_text("half")
    (tmp_path / f".file.{killed}.00bb.tmp").mkdir()
    (tmp_path / f".file.{process_mark()}.00cc.tmp").write_text("another writer's, alive")
    (tmp_path / f".file.elsewhere.{killed.partition('.')[2]}.00dd.tmp").write_text("another host's")
    (tmp_path / f".written.once.json.{killed}.00ee.tmp").write_text("half of a file that nobody writes again")
    write_json(tmp_path / "file", {})
    assert sorted(path.name.split(".")[-2] for path in tmp_path.iterdir() if path.name != "file") == ["00cc", "00dd"]


def test_what_another_host_or_container_left_goes_after_two_days_without_a_change(tmp_path, killed, monkeypatch):
    rest = killed.partition(".")[2]
    left = [tmp_path / f".a.far.host.org.{rest}.00aa.tmp", tmp_path / f".b.far.host.org.{rest}.00bb.tmp"]
    (left[0] / "inside").mkdir(parents=True)
    left[1].write_text("half")
    (tmp_path / ".no.mark.tmp").write_text("somebody's")
    write_json(tmp_path / "file", {})
    assert all(path.exists() for path in left)
    later = time.time() + 2 * 86_400 + 60
    monkeypatch.setattr("scripts.files.time.time", lambda: later)
    write_json(tmp_path / "file", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".no.mark.tmp", "file"]


def test_a_run_is_swept_of_what_killed_processes_left_anywhere_but_in_the_store(tmp_path, killed):
    left = [tmp_path / f"{folder}/.file.{killed}.00aa.tmp" for folder in ("a", "a/b/c", "store/x")]
    alive = tmp_path / f"a/.file.{process_mark()}.00aa.tmp"
    for path in (*left, alive):
        (path / "inside").mkdir(parents=True)
    sweep_leftovers(tmp_path, "store")
    assert [path.exists() for path in (*left, alive)] == [False, False, True, True]


def test_a_scratch_folder_goes_at_its_end_and_after_a_kill_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "stagecoach-mine").mkdir()
    program = "import os, sys; from pathlib import Path; from scripts.files import make_scratch\n"
    program += "made = make_scratch(Path(sys.argv[1])); (made / 'file').touch(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    assert len([*tmp_path.iterdir()]) == 2
    alive = make_scratch()
    with scratch_folder() as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"stagecoach-mine", alive.name, folder.name}
        assert folder.stat().st_mode & 0o777 == 0o700 and len(folder.name) < 50
    assert not folder.exists() and alive.exists()


def test_a_damaged_record_is_one_clear_message(tmp_path):
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(UserError, match=r"record.json: not valid JSON .*; delete it"):
        read_json(tmp_path / "record.json")
    with pytest.raises(UserError, match="no such file; ask Snakemake for it"):
        read_json(tmp_path / "other.json")


# --- identity ---


def test_identity_follows_content_and_not_revision_or_provenance():
    def identity(seed=1, train="t", revision="r1", content="abc", note="", rate=1e-5, trl="1") -> str:
        optimizer = CONFIG.policy.optimizer.model_copy(update={"lr": rate})
        policy = CONFIG.policy.model_copy(update={"optimizer": optimizer})
        release = CONFIG.release | {"trl": trl}
        config = CONFIG.model_copy(update={"seed": seed, "policy": policy, "release": release})
        source = {"name": "here", "revision": revision}
        splits = {"source": source, "train": {"sha256": train}, "validation": {"sha256": "v"}}
        export = {"stage": "sft", "step": len(note), "identity": "0", "content": content, "files": {}}
        return identity_of(stage_facts(config, splits, export))

    first = identity()
    assert identity(revision="r2") == first and identity(note="another comment") == first
    others = {identity(seed=2), identity(train="u"), identity(content="abd"), identity(rate=2e-5), identity(trl="2")}
    assert len({first, *others}) == 6
    splits = {"train": {"sha256": "t"}, "validation": {"sha256": "v"}}
    assert identity_of(stage_facts(CONFIG, splits, None)) != first


# --- run directories ---


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("optimizer.pt", b"mom", "optimizer.pt has 3 bytes instead of 7"),
        ("config.json", None, "config.json is missing"),
        ("model.safetensors", b"weightz", "model.safetensors has the right size but other content"),
        ("files.json", None, "has no files.json, so it was never whole"),
        ("files.json", b"{", "files.json is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over_for_the_one_before(run, capsys, file, content, words):
    for step in (5, 10):
        TrainingFolder(run).seal(save(run, step), step)
    path = run / "checkpoints/step_10" / file
    path.unlink() if content is None else path.write_bytes(content)
    (run / "checkpoints/tmp_step_30").mkdir()
    assert TrainingFolder(run).newest_checkpoint().step == 5
    assert f"step_10: {words}; passing it over" in capsys.readouterr().out
    TrainingFolder(run).seal(save(run, 10), 10)  # trained again, it takes the damaged one's place
    assert (
        TrainingFolder(run).newest_checkpoint().step == 10
        and TrainingFolder(run).newest_checkpoint(last_step=8).step == 5
    )


# --- which checkpoints are kept ---


def kept(run: Path, **checkpointing: object) -> list[int]:
    prune_checkpoints(TrainingFolder(run), Checkpointing(**checkpointing))
    return [checkpoint.step for checkpoint in TrainingFolder(run).checkpoints]


def test_the_newest_and_the_best_and_the_published_checkpoint_are_kept(run):
    rewards = {5: 0.9, 10: 0.1, 15: 0.5, 20: 0.2, 25: 0.3}
    (run / "metrics.jsonl").write_text("".join(log_line(step, reward_mean=reward) for step, reward in rewards.items()))
    for step in rewards:
        TrainingFolder(run).seal(save(run, step), step)
    assert kept(run) == [5, 10, 15, 20, 25]
    publish_checkpoint(TrainingFolder(run).checkpoints[1], run.parents[1] / "stage/ckpt", RECORD)
    assert kept(run, keep_last_k=2, keep_top_k=2) == [5, 10, 15, 20, 25]
    assert kept(run, keep_last_k=1, keep_top_k=1, keep_steps=[15, 20], save_period=5) == [5, 10, 15, 20, 25]
    assert kept(run, keep_last_k=2, keep_top_k=1) == [5, 10, 20, 25]
    assert kept(run, keep_last_k=1, keep_top_k=1, higher_is_better=False) == [10, 25]


def test_a_checkpoint_half_removed_when_killed_is_removed_and_never_counted(run):
    TrainingFolder(run).seal(save(run, 5), 5)
    (run / "checkpoints/removing_step_3").mkdir()
    assert kept(run, keep_last_k=1) == [5]
    assert not (run / "checkpoints/removing_step_3").exists()


# --- attempts and requests to stop ---


def test_attempts_are_remembered_with_their_outcome_and_a_killed_one_has_none(run):
    TrainingFolder(run).begin_attempt(0)
    TrainingFolder(run).end_attempt(5, "unfinished")
    TrainingFolder(run).begin_attempt(5)
    (run / "attempts.jsonl").open("a").write('{"event": "en')  # killed while writing
    TrainingFolder(run).begin_attempt(5)
    told = [(attempt["from"], attempt["outcome"]) for attempt in TrainingFolder(run).attempts]
    assert told == [(0, "unfinished"), (5, "killed"), (5, "killed")]


def test_after_two_attempts_without_a_new_step_another_of_the_same_call_is_refused(run):
    for outcome in ("unfinished", "failed"):
        TrainingFolder(run).begin_attempt(5, call=7)
        TrainingFolder(run).end_attempt(5, outcome)
    said = "two attempts in a row (unfinished and failed) made no new step beyond 5"
    assert TrainingFolder(run).without_progress(7, 5) == said
    assert TrainingFolder(run).without_progress(7, 6) is None, "the second of them made a step"
    assert TrainingFolder(run).without_progress(8, 5) is None, "they were of an earlier call"
    assert TrainingFolder(run).without_progress(0, 5) is None, "a person asks again"


def test_a_deadline_is_due_when_one_more_step_and_its_save_may_not_fit():
    stop = StopRequest(deadline=time.time() + 10)
    assert not stop.is_due(step_seconds=4, save_seconds=3)
    assert stop.is_due(step_seconds=8, save_seconds=3)
    assert "before the deadline" in stop.reason
    assert not StopRequest().is_due(1e9, 1e9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGHUP", 0), ("SIGINT", 1)])
def test_a_signal_is_a_request_and_only_a_second_ctrl_c_acts_at_once(name, status):
    program = (
        "import os, signal\nfrom scripts.backends.protocol import StopRequest\nstop = StopRequest()\nstop.listen()\n"
        f"os.kill(os.getpid(), signal.{name})\nassert stop.is_due(0, 0) and stop.reason == '{name}'\n"
        f"try:\n    os.kill(os.getpid(), signal.{name})\nexcept KeyboardInterrupt:\n    raise SystemExit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert f"{name}: saving at the end of the step" in done.stdout


def test_a_request_reaches_the_processes_that_share_its_file_and_the_first_reason_stays(tmp_path):
    asked, polling = StopRequest(file=tmp_path / "stop"), StopRequest(time.time() + 1e6, tmp_path / "stop")
    assert not polling.is_due(1, 1)
    asked.ask("SIGTERM")
    asked.ask("SIGINT")
    assert polling.is_due(1, 1) and polling.reason == "SIGTERM"


def test_a_request_and_its_reason_are_shared_while_a_stage_is_held_and_an_old_one_is_not_heard(tmp_path):
    (tmp_path / "stop").write_text("SIGTERM")
    held = StopRequest()
    with held.shared(tmp_path / "stop"):
        assert not held.is_due(1, 1)
        assert StopRequest(time.time(), tmp_path / "stop").is_due(1, 1)
    assert "before the deadline" in held.reason and held.file is None
    with held.shared(tmp_path / "stop"):
        assert StopRequest(file=tmp_path / "stop").is_due(1, 1), "it was made before it was shared"


def test_what_an_attempt_left_running_saves_nothing_once_the_attempt_is_over(tmp_path):
    with pytest.raises(UserError, match=r"attempt: is gone, so the attempt is over"):
        StopRequest(file=tmp_path / "attempt" / "stop").is_due(1, 1)
    StopRequest(file=tmp_path / "attempt" / "stop").ask("SIGTERM")
    assert list(tmp_path.iterdir()) == []


# --- on several nodes, with a stand-in for the driver ---


def changed(name: str, **sections: dict):
    """The config of a stage of the tiny recipe, some of whose settings are others."""
    values = resolve_stage(RECIPE, name).values()
    for section, settings in sections.items():
        values[section] |= settings
    return training_config(values)


@pytest.fixture
def job(run):
    settings = RECIPE.stages["rlvr1"].model_copy(
        update={
            "checkpointing": Checkpointing(save_period=2, keep_last_k=1),
            "gym": Gym(version="0.4.0", servers=["mcqa"]),
            "gym_servers": {"mcqa": GymServer(base_url="http://gym:8000")},
            "gate": [Criterion(metric="max_kl", max=0.1)],
        }
    )
    return TrainingJob(
        stage="rlvr1",
        settings=settings,
        config=changed("rlvr1", grpo={"num_prompts_per_step": 4}),
        train_split=Path("train-split.jsonl"),
        parent_model=None,
        run=run,
        resume_from=run / "checkpoints/step_2",
        max_num_steps=4,
        threads=2,
        stop=StopRequest(deadline=2e9),
        nodes=2,
        environments={},
    )


def test_a_job_is_read_as_it_was_written_with_absolute_paths(job, tmp_path):
    job.stop.file = tmp_path / "stop"
    write_job(tmp_path / "job.pickle", job)
    read = read_job(tmp_path / "job.pickle")
    assert vars(read) | {"stop": None} == vars(job) | {"stop": None, "train_split": Path.cwd() / "train-split.jsonl"}
    assert (read.stop.deadline, read.stop.file) == (2e9, tmp_path / "stop")


def test_a_driver_finds_its_job_and_can_be_asked_to_stop_and_nothing_of_it_stays(job):
    before = sorted(job.run.iterdir())
    (job.run / "cluster.0ld").mkdir()

    def driver(place):
        sent = read_job(place / "job.pickle")
        assert sent.nodes == 2
        assert not sent.stop.is_due(1, 1)
        job.stop.ask("SIGTERM")
        assert sent.stop.is_due(1, 1)
        (job.run / "saving").mkdir()

    def lost(place):
        raise CutOffError("rank 1 on node2 is gone")

    train_apart(job, driver)
    assert job.stop.reason == "SIGTERM"
    assert sorted(job.run.iterdir()) == before
    train_apart(job, lost)  # asked to stop, it is unfinished and not failed
    with pytest.raises(CutOffError, match="rank 1 on node2 is gone"):
        train_apart(replace(job, stop=StopRequest()), lost)
    assert sorted(job.run.iterdir()) == before


@pytest.mark.parametrize(
    ("stage", "section", "key", "size", "nodes", "fitting"),
    [
        ("rlvr1", "grpo", "num_prompts_per_step", 4, 3, "resources.nodes for one of 1, 2, 4, or"),
        ("sft", "policy", "train_global_batch_size", 6, 4, "one of 1, 2, 3, 6, or"),
    ],
)
def test_a_step_that_does_not_divide_by_the_nodes_is_refused_before_a_cluster_is_started(
    job, stage, section, key, size, nodes, fitting
):
    uneven = replace(job, config=changed(stage, **{section: {key: size}}), nodes=nodes)
    with pytest.raises(UserError, match=rf"rlvr1: {section}.{key} is {size}, which {nodes} nodes .* {fitting}"):
        backend_of("trl").train(uneven, Allocation())
    assert not list(job.run.glob("cluster.*"))


# --- a stage's life, with a backend that seals what it is told to ---


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains 4 steps of stage sft of the tiny recipe with a stand-in backend, which does a deed given by the test."""
    stage = ready_stage(RECIPE, tmp_path, "sft", [{}])
    stage.paths.config.parent.mkdir()
    stage.paths.config.write_text(config_text(changed("sft", sft={"max_num_steps": 4}).values()))
    jobs = []

    def seal(job):
        job.training.seal(save(job.run, 4), 4)

    def train(deed=seal, until=None):
        class StandIn(Backend):
            def train(self, job, allocation):
                jobs.append(job)
                deed(job)

        monkeypatch.setattr("scripts.backends.trl.backend.BACKEND", StandIn())
        written = as_of(Stage(RECIPE, tmp_path, "sft", is_written=True), until)
        return train_stage(written, Attempt(call=1), StopRequest())

    train.jobs, train.stage, train.paths = jobs, stage, stage.paths
    return train


def test_done_means_that_the_planned_step_is_there_and_not_that_the_backend_returned(train):
    with pytest.raises(UserError, match="training ended at step 3 of 4"):
        train(lambda job: job.training.seal(save(job.run, 3), 3))
    assert not train.paths.ckpt.exists()
    train()
    assert train.jobs[1].resume_from.name == "step_3"
    train()
    assert len(train.jobs) == 2  # published again, not trained
    assert read_json(train.paths.record)["step"] == 4


def test_a_stage_trains_to_one_step_after_another_and_not_to_one_that_was_passed(train, capsys):
    def seal(job):
        job.training.seal(save(job.run, job.max_num_steps), job.max_num_steps)

    for until, step in ((1, 1), (2, 2), (1, 1), (None, 4)):
        assert train(seal, until) == 0
        published = as_of(train.stage, until).paths
        assert read_json(published.record)["step"] == step_of((published.ckpt / "weights").resolve()) == step
    assert [(job.start, job.max_num_steps, job.planned) for job in train.jobs] == [(0, 1, 4), (1, 2, 4), (2, 4, 4)]
    assert [attempt["outcome"] for attempt in TrainingFolder(train.paths.run).attempts] == ["finished"] * 3
    assert "sft.step-2: resumes from step 1, planned step 4, at first to step 2, identity" in capsys.readouterr().out
    with pytest.raises(UserError, match="step 3 was not kept, but steps 1, 2, 4; name one of these"):
        train(seal, 3)
    assert len(train.jobs) == 3 and TrainingFolder(train.paths.run).newest_checkpoint().step == 4


def test_what_a_killed_attempt_left_half_done_is_gone_though_nothing_is_left_to_train(train, killed):
    train()
    run = train.paths.run
    left = [
        run / f".live.html.{killed}.00aa.tmp",
        TrainingFolder(run).owner_file.with_name(f".owner.json.{killed}.0b.tmp"),
    ]
    left += [run / "checkpoints/removing_step_2/config.json", run / f"checkpoints/.step_2.{killed}.00cc.tmp"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half a file")
    train()
    assert len(train.jobs) == 1 and not any(path.exists() for path in (*left, left[2].parent))


def test_a_stage_that_was_asked_to_stop_is_unfinished_and_not_failed(train):
    def stops(job):
        job.training.seal(save(job.run, 2), 2)
        job.stop.reason = "SIGTERM"

    assert train(stops) == UNFINISHED
    assert not train.paths.ckpt.exists()
    assert TrainingFolder(train.paths.run).attempts[-1]["outcome"] == "unfinished"
    assert train() == 0


def test_a_server_that_does_not_answer_loses_the_attempt_and_nothing_of_what_was_trained(train):
    def lost(job):
        job.training.seal(save(job.run, 2), 2)
        raise GymUnavailable("the server gave no answer")

    with pytest.raises(CutOffError, match="gave no answer"):
        train(lost)
    assert TrainingFolder(train.paths.run).attempts[-1]["outcome"] == "lost"
    assert train() == 0 and train.jobs[1].resume_from.name == "step_2"


def test_inputs_that_change_while_a_stage_trains_are_noticed_before_it_is_published(train):
    def edit_meanwhile(job):
        job.training.seal(save(job.run, 4), 4)
        train.paths.config.write_text(train.paths.config.read_text().replace("seed: 1", "seed: 2"))

    with pytest.raises(UserError, match="its config, data or parent changed while it trained"):
        train(edit_meanwhile)
    assert not train.paths.ckpt.exists()


def test_a_split_that_is_not_the_manifests_is_not_trained_on(train):
    train.stage.train_split.write_text("{}\n{}\n")
    with pytest.raises(UserError, match=r"train-split.jsonl: not the file that .*manifest.json describes"):
        train()
    assert train.jobs == []


# --- publishing ---


def publish(run: Path, weights: bytes = b"weights", step: int = 5) -> Path:
    ckpt = run.parents[1] / "stage/ckpt"
    checkpoint = TrainingFolder(run).seal(save(run, step, weights), step)
    publish_checkpoint(checkpoint, ckpt, RECORD | {"step": step})
    return ckpt


def test_a_published_checkpoint_is_a_record_and_a_link_and_survives_a_move(run, tmp_path):
    ckpt = publish(run)
    first = (ckpt / "record.json").read_bytes()
    publish_checkpoint(TrainingFolder(run).newest_checkpoint(), ckpt, RECORD)
    assert (ckpt / "record.json").read_bytes() == first, "published twice"
    (tmp_path / "moved").mkdir()
    for folder in ("store", "stage"):
        (tmp_path / folder).rename(tmp_path / "moved" / folder)
    ckpt = tmp_path / "moved/stage/ckpt"
    record = read_json(ckpt / "record.json")
    assert (record["stage"], record["step"], record["identity"]) == ("rlvr1", 5, "one")
    assert record["files"]["model.safetensors"]["bytes"] == 7
    assert (ckpt / "weights" / "model.safetensors").read_bytes() == b"weights"


def test_an_export_is_named_by_its_content_and_leaves_the_optimizer_out(run):
    hf = run.parents[1] / "stage/hf"
    export_checkpoint(publish(run), hf)
    first = read_json(hf / "record.json")
    assert sorted(first["files"]) == ["config.json", "model.safetensors"]
    assert (hf / "model").resolve().name == first["content"]
    export_checkpoint(run.parents[1] / "stage/ckpt", hf)
    assert read_json(hf / "record.json") == first
    export_checkpoint(publish(run, b"others!", step=6), hf)
    second = read_json(hf / "record.json")["content"]
    assert second != first["content"] and ((run / "exports") / first["content"]).is_dir()


def test_a_flipped_bit_is_found_before_the_next_stage_starts_from_it(run):
    ckpt = publish(run)
    (run / "checkpoints/step_5/model.safetensors").write_bytes(b"weightz")
    with pytest.raises(UserError, match=r"model.safetensors: not the file that .* lists"):
        export_checkpoint(ckpt, run.parents[1] / "stage/hf")
    assert not (run.parents[1] / "stage/hf").exists()
    assert list((run / "exports").iterdir()) == []


# --- metrics ---


def log_line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "loss": 1.0, "environment_rewards": {"e": 0.5}, **values}) + "\n"


def test_metrics_have_the_same_columns_and_null_where_nothing_was_measured(tmp_path):
    (tmp_path / "log").write_text(log_line(1) + log_line(2, kl=0.25))
    write_metrics(tmp_path / "log", tmp_path / "metrics.parquet", 2)
    table = pd.read_parquet(tmp_path / "metrics.parquet")
    assert list(table.columns) == METRICS.names
    assert table["kl"].isna().tolist() == [True, False]
    assert dict(table["environment_rewards"][0]) == {"e": 0.5}


def test_a_step_logged_again_after_a_resume_counts_once_the_later_line(tmp_path):
    (tmp_path / "log").write_text(log_line(1) + log_line(2, loss=9.0) + log_line(2, loss=2.0) + '{"step": 3, "lo')
    assert [entry["loss"] for entry in read_log(tmp_path / "log")] == [1.0, 2.0]
    with pytest.raises(UserError, match=r"no metrics of step 3 \(1 of 3"):
        write_metrics(tmp_path / "log", tmp_path / "metrics.parquet", 3)
    assert not (tmp_path / "metrics.parquet").exists()


# --- preflight ---


@pytest.fixture
def ready(tmp_path):
    """Check stage rlvr1 of the tiny recipe on given rows."""
    good = {"agent_ref": {"name": "math_with_judge_simple_agent"}, "question": "q", "expected_answer": "1"}
    good["responses_create_params"] = {"input": [{"role": "user", "content": "q"}]}

    def check(rows=None, verdict="pass", parent_bytes=1000) -> dict:
        rows = [good] * 40 if rows is None else [good | row for row in rows]
        stage = ready_stage(RECIPE, tmp_path, "rlvr1", rows)
        parent = stage.parent.paths
        write_json(parent.gate, {"stage": "sft", "verdict": verdict})
        write_json(parent.criteria, {"criteria": CRITERIA})
        write_json(parent.record, checkpoint_record("sft", files={"model.safetensors": parent_bytes}))
        return check_stage(stage)

    return check


@pytest.mark.slow
def test_preflight_says_how_often_the_rows_are_seen_and_how_long_they_are(ready, capsys):
    checked = ready()
    tokens, probed = checked.pop("tokens"), checked.pop("reward_probe")
    texts = checked.pop("arrival")["texts"]
    assert texts == {"user messages": {"texts": 40, "rendered": 1.0, "learnt": None, "lost": 0, "lost_lines": []}}
    assert checked.pop("rows_not_shown").endswith("sft/hf/model is not there yet")
    assert probed["math_with_judge_simple_agent"]["the expected answer"] == 1.0
    assert checked == {"stage": "rlvr1", "train_rows": 40, "rows_per_step": 16, "max_num_steps": 12, "epochs": 5}
    each = dict.fromkeys(("too_long", "too_long_share", "answers_cut", "with_special_tokens"), 0)
    each["longest"] = 4
    assert tokens == {"limit": 64, "train": each, "validation": each}
    assert "trap 32" not in capsys.readouterr().err


def test_preflight_warns_of_rows_that_are_too_long(ready, capsys):
    long = {"responses_create_params": {"input": "q" * 62}}
    assert ready([{}] * 20 + [long] + [{}] * 20)["tokens"]["train"]["too_long"] == 1
    said = capsys.readouterr().err
    assert "train-split.jsonl: 1 of 41 rows have more than 64 tokens (docs/traps.md, trap 32): line 21: 65\n" in said


def test_preflight_refuses_a_stage_of_which_too_many_rows_are_too_long(ready):
    long = {"responses_create_params": {"input": "q" * 96}}
    with pytest.raises(UserError) as error:
        ready([{}] * 20 + [long] * 12)
    for words in (
        "train-split.jsonl: 12 of 32 rows (37.5%) have more than the 64 tokens that the stage reads",
        "the longest 99; raise policy.max_total_sequence_length of stages.rlvr1",
        "or allow a larger share by its max_truncated_share (now 0.05)",
    ):
        assert words in str(error.value)


def test_preflight_names_the_rows_that_no_verifier_here_can_reward_and_shows_ten(ready):
    unknown = {"agent_ref": {"name": "instruction_following_simple_agent"}}
    unknown |= {"instruction_id_list": ["a:b"], "kwargs": [{}]}
    with pytest.raises(UserError) as error:
        ready([{}] * 3 + [unknown] * 25 + [{}] * 10)
    message = str(error.value)
    assert "train-split.jsonl:4: instruction 'a:b' has no verifier" in message
    assert "train-split.jsonl:14:" not in message
    assert "train-split.jsonl: and 15 rows more" in message


def test_preflight_refuses_a_stage_whose_checkpoints_would_not_fit_on_the_disk(ready):
    with pytest.raises(UserError, match=r"run: 3 checkpoints of 1000000.0 TB need 3000000.0 TB, but .* are free"):
        ready(parent_bytes=10**18)


def test_the_size_of_a_checkpoint_is_foreseen(tmp_path):
    assert fresh_parameters(RECIPE.model) == 935_808
    assert checkpoint_bytes(Stage(RECIPE, tmp_path, "sft")) == 12 * 935_808
    assert checkpoints_at_once(Checkpointing(save_period=4), planned=10) == 3
    assert checkpoints_at_once(Checkpointing(save_period=1, keep_last_k=2, keep_top_k=1), planned=10) == 4


BOUND = {"metric": "max_kl", "environment": None, "value": 0.3, "high": None, "min": None, "max": 0.1, "action": "stop"}
BOUND |= {"step": 7, "figure": "sft/stage.html", "outcome": "stop", "low": None}
CRITERIA = [
    BOUND | {"says": "max_kl is 0.3, first at step 7"},
    BOUND | {"says": "held_out_change is -0.3", "low": -0.4},
    BOUND | {"says": "max_grad_norm is 3", "outcome": "warn"},
]


def test_preflight_refuses_too_few_rows_and_a_parent_whose_gate_says_stop(ready):
    with pytest.raises(UserError, match="15 training rows are fewer than the 16 of one step"):
        ready([{}] * 15)
    with pytest.raises(UserError, match=r"gate.json: the gate of sft says stop") as error:
        ready(verdict="stop")
    message = str(error.value)
    assert re.search(r"max_kl is 0\.3, first at step 7; look at \S+stage.html, which Snakemake makes", message)
    assert re.search(r"held_out_change is -0\.3; look at \S+/rollouts\.parquet", message)
    assert "max_grad_norm" not in message
    ready(verdict="warn")
