"""Backend `nemo_rl`: NeMo-RL's driver in its containers, started within a Slurm job by its own ray.sub, and watched.

NeMo-RL takes no request to stop: it saves by itself before the deadline that its command computes. What ends it earlier
(a signal, the time limit, a kill) costs the steps since its last checkpoint.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.backends.nemo_rl.checkpoints import pass_over_newer, refuse_repeated_weights, seal_finished
from scripts.backends.nemo_rl.cluster import RaySub, checkout_of
from scripts.backends.nemo_rl.command import DRIVER_STARTED, Launch
from scripts.backends.nemo_rl.export import handed_on
from scripts.backends.nemo_rl.metrics import StepLog
from scripts.backends.nemo_rl.outcome import Cause, cause_of, data_ended
from scripts.backends.nemo_rl.reach import note_sealed, note_standstill, planned_and_rows
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import CutOffError, ExhaustedError, UserError
from scripts.files import read_json, write_json
from scripts.stage.reach import forget_beyond
from scripts.stage.rundir import Checkpoint, newest_checkpoint
from scripts.stage.step_criteria import refuse_divergence

LOOK_SECONDS = 2.0
STARTUP = "startup.json"
# Ray's driver answers SIGTERM with the signal's number as its status, or aborts while it shuts down.
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT)
KILLED = {int(signal.SIGTERM), *(-number for number in SIGNALS), *(128 + number for number in SIGNALS)}


def train(job: TrainingJob, allocation: Allocation) -> None:
    """Start the driver and watch it to its end; ``run/startup.json`` notes how long it took to its first step.

    Afterwards `job.stop` has a reason where it is to be continued. UserError: it failed for a reason of its own;
    CutOffError: the next attempt may go well.
    """
    launch = launch_of(job, allocation)
    pass_over_newer(job.run, job.resume_from)
    forget_beyond(job.run, job.start)
    started = time.time()
    cluster = RaySub(launch, allocation.job, job.run.absolute().parent / "logs")
    watch = _Watch(job, launch, started)
    try:
        while cluster.is_running() and not watch.is_over():
            time.sleep(LOOK_SECONDS)
    finally:
        cluster.end()
        watch.look(is_over=True)
    _judge(job, watch, cluster)


def launch_of(job: TrainingJob, allocation: Allocation) -> Launch:
    """One start of the stage's driver in this Slurm job; `save_by` leaves the site's margin before the job's end."""
    config, site = job.config, allocation.site
    name = config.release["name"]
    checkout = checkout_of(name, config.release["revision"], site)
    parent = job.parent_model.resolve() if job.parent_model else config.model.name.rstrip("/")
    megatron = handed_on(parent) if job.parent_model else config.model.megatron
    save_by = None if job.stop.deadline is None else job.stop.deadline - site.nemo_rl.save_seconds
    return Launch(
        stage=job.stage,
        settings=job.settings,
        release=release_of(name),
        site=site,
        checkout=checkout,
        model=str(parent),
        train_split=job.train_split.absolute(),
        validation_split=job.train_split.with_name("val-split.jsonl").absolute(),
        checkpoints=(job.run / "checkpoints").absolute(),
        logs=(job.run / "logs").absolute(),
        max_num_steps=job.max_num_steps,
        schedule_steps=_schedule_steps(job),
        seed=config.seed,
        save_by=save_by,
        startup_seconds=startup_seconds(job.run, site.nemo_rl.startup_seconds),
        pretrained=Path(megatron.path) if megatron else None,
        pretrained_format=megatron.format if megatron else "megatron_bridge",
    )


def _schedule_steps(job: TrainingJob) -> int | None:
    """The steps of the learning rate's schedule where they are not max_num_steps, which NeMo-RL takes for them."""
    planned, _ = planned_and_rows(job)
    is_fresh = job.resume_from is None and job.max_num_steps == planned
    return None if is_fresh or not job.config.is_asynchronous else planned


def startup_seconds(run: Path, expected: float) -> float:
    """Seconds from a driver's start to its training loop: the longest that an attempt here took, else as expected."""
    path = run / STARTUP
    return max(read_json(path)["seconds"]) if path.exists() else expected


class _Watch:
    """What is seen of a driver while it runs: steps, checkpoints, requests to stop, standstill."""

    def __init__(self, job: TrainingJob, launch: Launch, started: float) -> None:
        self.job, self.launch = job, launch
        penalty = job.config.loss_fn.get("reference_policy_kl_penalty", 0) or 0
        measures_kl = penalty > 0 or job.config.algorithm != "grpo"
        self.steps = StepLog(launch.logs, job.run / "metrics.jsonl", measures_kl, job.config.rollouts_per_step)
        self.started = self.last_news = started
        self.made_a_step = False
        self.last_step = job.start
        self.is_asynchronous = job.config.is_asynchronous
        self.stalled: str | None = None

    def is_over(self) -> bool:
        """Look, and say whether the driver is to be ended: a stop was requested, or nothing moves any more."""
        self.look()
        if self.steps.last_step < self.job.max_num_steps:
            refuse_divergence(self.job.stage, self.job.settings.gate, self.job.run, self.steps.last_step)
        if self.job.stop.signalled:
            print(f"{self.job.stage}: {self.job.stop.reason}: ending the driver, which takes no request", flush=True)
            return True
        nemo_rl = self.launch.nemo_rl
        patience = nemo_rl.stall_seconds + (0 if self.made_a_step else self.launch.startup_seconds)
        if time.time() - self.last_news > patience:
            self.stalled = f"no new step for {patience:.0f} s (site's nemo_rl.stall_seconds)"
        return self.stalled is not None

    def look(self, is_over: bool = False) -> None:
        """Log what is new, seal what was saved."""
        ended = self.steps.follow(is_over)
        if ended and not self.made_a_step:
            self._note_startup()
        if ended:
            self.made_a_step = True
            self.last_step = self.steps.last_step
            self.last_news = time.time()
            print(f"{self.job.stage}: step {self.steps.last_step} of {self.job.max_num_steps}", flush=True)
        for checkpoint in seal_finished(self.job.run):
            self.last_news = time.time()
            print(f"{self.job.stage}: checkpoint of step {checkpoint.step}", flush=True)
            if self.is_asynchronous:
                note_sealed(self.job, checkpoint)
            refuse_repeated_weights(self.job.run)

    def _note_startup(self) -> None:
        path, started = self.job.run / STARTUP, self.launch.logs / DRIVER_STARTED
        before = read_json(path)["seconds"] if path.exists() else []
        seconds = time.time() - self.steps.last_seconds - float(started.read_text(encoding="utf-8"))
        write_json(path, {"seconds": [*before, max(0.0, round(seconds, 1))]})


def _judge(job: TrainingJob, watch: _Watch, cluster: RaySub) -> None:
    """Say how the driver ended where the planned step is not there; what its status was says little."""
    newest = newest_checkpoint(job.run, job.max_num_steps)
    reached = newest.step if newest else 0
    if reached == job.max_num_steps or job.stop.signalled:
        return
    log, status = cluster.driver_log(watch.started), cluster.process.returncode
    if watch.stalled:
        raise _standstill(job, watch, newest, log or cluster.log)
    cause = cause_of(log, cluster.log, cluster.cluster_logs())
    if cause is None and status in KILLED:
        raise CutOffError(f"NeMo-RL's driver was killed (status {status}) after the checkpoint of step {reached}")
    if cause is None:
        raise UserError(
            f"NeMo-RL's driver ended with status {status} at step {reached} of {job.max_num_steps} and gave no reason "
            f"that is known; see {log or cluster.log}"
        )
    if cause.kind == "unfinished":
        job.stop.ask(cause.what)
        return
    raise (CutOffError if cause.kind == "lost" else UserError)("\n  ".join(_words(cause, status, reached)))


def _standstill(job: TrainingJob, watch: _Watch, newest: Checkpoint | None, log: Path) -> CutOffError:
    """Why nothing moves any more; asynchronous training waits for ever where its data have ended."""
    is_end = watch.is_asynchronous and data_ended(log)
    if watch.is_asynchronous:
        note_standstill(job, newest, watch.last_step, is_end)
    if is_end:
        return ExhaustedError(f"its data ended at step {watch.last_step}, before {job.max_num_steps}; see {log}")
    return CutOffError(f"{watch.stalled}, at step {newest.step if newest else 0}; see {log}")


def _words(cause: Cause, status: int, reached: int) -> Iterator[str]:
    yield f"NeMo-RL ended with status {status} after the checkpoint of step {reached}: {cause.what}; {cause.log} says:"
    yield from cause.lines
