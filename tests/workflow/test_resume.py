"""Interrupted work goes on; a training that nothing links to is counted, found again, and removed only when asked for."""

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scripts.files import read_json
from scripts.stage.training_folder import TrainingFolder
from tests.gym.verify import PYTHON, needs_gym
from tests.programs import until
from tests.stages import logged


def program(snakemake: subprocess.Popen) -> psutil.Process:
    """The training program below a Snakemake, once it is there."""

    def found() -> psutil.Process | None:
        for process in psutil.Process(snakemake.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "scripts.train.run" in process.cmdline() and "python" in process.name():
                    return process
        return None

    return until(found)


def train_by_hand(workflow, results: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess:
    """Train rlvr1 in a folder of results without Snakemake."""
    program = ("python", "-m", "scripts.train.run", "--recipe", "config/recipes/short.yaml")
    return workflow.run(*program, "--results", str(results), "--stage", "rlvr1", *options, check=check)


@pytest.fixture
def longer(copied):
    """The finished tree with rlvr1 asked for more steps; and the weights that an undisturbed run of them gives."""
    copied.edit("rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, grpo: {max_num_steps: 12},")
    return copied


def begin(workflow) -> subprocess.Popen:
    """Snakemake on rlvr1, in the background."""
    return workflow.begin("snakemake", "results/short/rlvr1/ckpt")


def wait_for_step(workflow, step: int) -> None:
    log = (
        workflow.results / "rlvr1/run/metrics.jsonl"
    )  # of the training before, with its 3 steps, until this one begins
    until(lambda: log.exists() and len(log.read_text().splitlines()) == step, 90, workflow.said)


def record(workflow) -> dict:
    return read_json(workflow.results / "rlvr1/ckpt/record.json")


def outcomes(workflow) -> list[str]:
    """How the attempts at rlvr1 that were not killed ended."""
    return [it["outcome"] for it in TrainingFolder(workflow.results / "rlvr1/run").attempts if it["ended"] is not None]


def test_a_killed_training_is_resumed_and_a_terminated_one_saves_its_step_and_goes_on_within_the_call(longer):
    killed = begin(longer)
    wait_for_step(longer, 5)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (longer.results / "rlvr1/ckpt/record.json").exists()
    snakemake = begin(longer)
    wait_for_step(longer, 9)
    program(snakemake).send_signal(signal.SIGTERM)
    assert snakemake.wait(600) == 0
    assert outcomes(longer) == ["unfinished", "finished"]
    assert record(longer)["step"] == 12
    trained = [step["step"] for step in logged(longer.results / "rlvr1/run")]
    assert sorted({*trained}) == list(range(1, 13)) and len(trained) <= 13, "but the step that was killed none was lost"
    assert "rlvr1: resumes from step " in longer.said()


def test_a_killed_snakemake_needs_no_unlock_and_the_training_it_left_is_waited_for(longer):
    snakemake = begin(longer)
    orphan = program(snakemake)
    wait_for_step(longer, 2)
    orphan.suspend()  # else its few steps are over before Snakemake has begun
    os.kill(snakemake.pid, signal.SIGKILL)
    snakemake.wait()
    again = begin(longer)
    until(lambda: "waiting for it to end" in longer.said() or again.poll() is not None, 120, longer.said)
    orphan.resume()
    assert again.wait(600) == 0
    assert "removed the lock of a Snakemake that was killed" in longer.said()
    assert "waiting for it to end" in longer.said() and f"process {orphan.pid} on " in longer.said()
    assert record(longer)["step"] == 12
    assert outcomes(longer) == ["finished"]


def test_a_deadline_ends_a_training_as_unfinished_with_its_step_saved(longer):
    results = longer.untrained("rlvr1")
    done = train_by_hand(longer, results, "--deadline", "1", check=False)
    assert done.returncode == 75
    assert re.search(r"unfinished at step 1 of \d+ \(0 s are left before the deadline\); to be continued", done.stdout)
    assert (results / "rlvr1/run/checkpoints/step_1").is_dir()


def test_a_changed_setting_trains_that_stage_alone_and_the_run_before_is_shown_and_comes_back(copied):
    stages = ("sft", "rlvr1", "rlhf")
    command = ("python", "-m", "scripts.commands")
    before, old = {stage: copied.content(stage) for stage in stages}, record(copied)["identity"]
    copied.edit("rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, seed: 9,")
    assert copied.planned() == {"rlvr1"}
    assert re.search(r"rlvr1 +trains again +3 of 3 .*seed 3 -> 9", copied.run(*command, "plan").stdout)
    assert re.search(r"rlvr1 +stale", copied.run(*command, "status").stdout)
    copied.snakemake("results/short/rlvr1/ckpt", "results/short/rlvr1/hf")
    assert {stage for stage in stages if copied.content(stage) != before[stage]} == {"rlvr1"}
    assert re.search(r"rlvr1 +fresh", copied.run(*command, "status").stdout)
    assert old in copied.run(*command, "discard", "--dry-run").stdout

    new = record(copied)["identity"]
    copied.edit(" seed: 9,", "")
    output = copied.snakemake("results/short/rlvr1/ckpt", "results/short/rlvr1/hf")
    assert "step 3 of identity" in output and "already trained; publishing it" in output
    assert copied.content("rlvr1") == before["rlvr1"]
    refused = copied.run(*command, "discard", "results/short/rlvr1/run", check=False)
    assert refused.returncode == 1 and "results/short/rlvr1/ckpt/weights leads to it" in refused.stdout
    assert new in copied.run(*command, "discard", "--dry-run").stdout
    copied.run(*command, "discard")
    assert not (copied.root / "results/store" / new).exists() and (copied.root / "results/store" / old).exists()
    assert new not in copied.run(*command, "discard", "--dry-run").stdout


@pytest.mark.slow
def test_a_stage_is_trained_again_as_asked_into_a_folder_of_its_own(copied):
    target, asked = "results/short/rlvr1/ckpt", ("--config", "again=rlvr1")
    identity, before = record(copied)["identity"], copied.content("rlvr1")
    dry = copied.snakemake("--dry-run", target, *asked)
    assert re.search(r"^rule train: stage=rlvr1;", dry, re.M)
    assert re.search(r"rlvr1 +trains again +3 of 3 .*as asked", dry)
    said = copied.snakemake(target, *asked)
    folder = copied.root / f"results/store/{identity}.again-1"
    assert f"rlvr1: trains again, as asked, in results/store/{folder.name}" in said
    assert f"rlvr1: was trained again: its weights equal those of store/{identity}, bit for bit" in said
    assert [step["step"] for step in logged(folder)] == [1, 2, 3] and copied.content("rlvr1") == before
    assert (record(copied)["identity"], record(copied)["again"]["weights"]) == (identity, "equal")
    assert copied.planned(target) == set()


def test_a_job_that_would_only_publish_again_asks_for_one_node_and_five_minutes_and_no_other_does(copied):
    copied.edit(
        "checkpointing: {save_period: 1}", "checkpointing: {save_period: 1}\n    resources: {nodes: 4, runtime: 240}"
    )
    forced = copied.snakemake("--dry-run", "--force", "results/short/rlvr1/ckpt")
    assert "nodes=1, runtime=5," in forced
    copied.edit("sft: {max_num_steps: 30}", "sft: {max_num_steps: 29}")
    assert "nodes=4, runtime=240," in copied.snakemake("--dry-run", "results/short/rlvr1/ckpt"), (
        "its parent trains first"
    )
    copied.edit("sft: {max_num_steps: 29}", "sft: {max_num_steps: 30}")
    shutil.rmtree((copied.results / "rlvr1/run").resolve())
    assert "nodes=4, runtime=240," in copied.snakemake("--dry-run", "--force", "results/short/rlvr1/ckpt")


def test_a_stage_that_fails_for_its_own_reason_fails_once_and_points_to_its_log(copied):
    copied.edit("optimizer: {lr: 1.0e-3}", "optimizer: {lr: 2.0e-3}")
    tokens = copied.results / "rlvr1/tokens"
    shutil.rmtree(tokens)
    tokens.write_text("no folder")
    output = copied.snakemake("results/short/rlvr1/ckpt", check=False)
    assert "rlvr1: not tried again: it failed for a reason of its own" in output
    assert "see results/short/rlvr1/logs/attempts.log" in output
    assert outcomes(copied) == ["failed"]
    assert (copied.results / "rlvr1/logs/attempts.log").read_text().count("rlvr1: starts") == 2, "once before the edit"


def test_a_training_that_is_killed_before_any_step_is_tried_twice(longer):
    longer.edit("save_period: 1", "save_period: 100")
    (longer.results / "rlvr1/run").unlink()  # of the training before
    snakemake = begin(longer)
    for count in (1, 2):
        until(lambda count=count: len(TrainingFolder(longer.results / "rlvr1/run").attempts) == count, 90, longer.said)
        program(snakemake).kill()
    assert snakemake.wait(600) == 1
    assert "two attempts in a row (killed and killed) made no new step beyond 0" in longer.said()


def gym_server(trainer: psutil.Process) -> psutil.Process:
    """The server of Gym's that a trainer has started."""
    (server,) = [child for child in trainer.children() if "scripts.rewards.gym_server" in child.cmdline()]
    return server


@pytest.mark.long
@needs_gym
def test_a_stage_whose_gym_server_is_killed_goes_on_to_the_weights_it_has_by_the_verifier_here(copied):
    with (copied.root / "config/sites/laptop.yaml").open("a") as site:
        site.write(f"gym_python: {PYTHON}\n")
    by_verifier = copied.content("rlvr1")
    copied.edit(
        "rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, gym: {version: 0.4.0, servers: [math_with_judge]},"
    )
    snakemake = begin(copied)
    wait_for_step(copied, 1)
    gym_server(program(snakemake)).kill()
    wait_for_step(copied, 2)
    trainer = program(snakemake)
    server = gym_server(trainer)
    trainer.kill()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, 10)
    assert snakemake.wait(600) == 0, copied.said()
    assert outcomes(copied) == ["finished"], "the killed attempt has no end"
    assert copied.content("rlvr1") == by_verifier
    log = (copied.results / "rlvr1/logs/attempts.log").read_text()
    assert log.count("Gym's server math_with_judge gives no answer and is started anew: it ended with status -9") == 1
