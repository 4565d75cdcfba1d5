"""Start NeMo-RL's driver in a Slurm job by ray.sub, and watch.

NeMo-RL takes no request to stop, and saves before the deadline computed by the command. An earlier end (signal, time
limit, kill) costs the steps since the last checkpoint.
"""

import signal
import time
from pathlib import Path

from scripts.backends.nemo_rl.checkpoints import pass_over_newer, refuse_repeated_weights, seal_finished
from scripts.backends.nemo_rl.command import DRIVER_STARTED, Launch
from scripts.backends.nemo_rl.containers import mark_of
from scripts.backends.nemo_rl.data_left import note_sealed, note_standstill, reach_of
from scripts.backends.nemo_rl.demonstrations import write_rows
from scripts.backends.nemo_rl.metrics import StepLog
from scripts.backends.nemo_rl.outcome import data_ended
from scripts.backends.nemo_rl.pools import ask_addresses
from scripts.backends.nemo_rl.ray_sub import RaySub
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.backends.nemo_rl.training import ROLLOUTS
from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import CutOffError, ExhaustedError, StalledError, UserError
from scripts.evaluate.gate import refuse_divergence
from scripts.files import write_json
from scripts.recipe.site import NemoRlSite, Site
from scripts.records import Manifest, read_if_there
from scripts.stage.progress import forget_beyond
from scripts.stage.rundir import Checkpoint, newest_checkpoint, newest_step
from scripts.stage.store import prune_checkpoints

STARTUP = "startup.json"
ROWS = "rows"  # the splits of SFT
# Ray's driver answers SIGTERM with the signal's number as its status, or aborts while it shuts down.
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT)
KILLED = {int(signal.SIGTERM), *(-number for number in SIGNALS), *(128 + number for number in SIGNALS)}


def train(job: TrainingJob, allocation: Allocation) -> None:
    """Start the driver and watch to the end; ``run/startup.json`` notes the seconds to the first step.

    Afterwards `job.stop` has a reason where training is to be continued. UserError: training failed; CutOffError: the
    next attempt may go well.
    """
    launch = launch_of(job, allocation.site)
    ask_addresses(launch.runtime)
    if job.config.algorithm == "sft":
        for split in (launch.train_split, launch.validation_split):
            write_rows(job.train_split.with_name(split.name), split)
    pass_over_newer(job.run, job.resume_from)
    forget_beyond(job.run, job.start)
    watch = _Watch(job, launch)
    cluster = RaySub(launch, allocation.job, job.stage_directory.absolute() / "logs")
    try:
        cluster.watch(watch.is_over)
    finally:
        watch.look(is_over=True)
    _judge(job, launch, watch, cluster)


def launch_of(job: TrainingJob, site: Site) -> Launch:
    """Return a start of the stage's driver on the site; `save_by` leaves the site's margin before the end."""
    runtime = Runtime(job.stage, job.settings, release_of(job.config.release["name"]), site)
    parent, model = job.parent_model, job.config.model
    splits = job.run / ROWS if job.config.algorithm == "sft" else job.train_split.parent
    last, save_by = _last_step(job), None
    is_other = job.resume_from is not None or last != job.planned  # than the schedule NeMo-RL makes of max_num_steps
    if job.stop.deadline is not None:
        save_by = job.stop.deadline - runtime.nemo_rl.save_seconds - startup_seconds(job.run, runtime.nemo_rl)
    return Launch(
        runtime=runtime,
        model=str(parent.resolve()) if parent else model.name.rstrip("/"),
        train_split=(splits / job.train_split.name).absolute(),
        validation_split=(splits / "val-split.jsonl").absolute(),
        checkpoints=(job.run / "checkpoints").absolute(),
        logs=(job.run / "logs").absolute(),
        max_num_steps=last,
        schedule_steps=job.planned if job.config.is_asynchronous and is_other else None,
        seed=job.config.seed,
        save_by=save_by,
        mark=mark_of(runtime.image),
        teachers={role.partition(".")[2]: str(path.resolve()) for role, path in job.roles.items()},
        environments=_environments(job.train_split.with_name("manifest.json")),
    )


def _environments(manifest: Path) -> tuple[str, ...]:
    splits = read_if_there(manifest, Manifest)
    return tuple(splits["train"].get("environments", {})) if splits else ()


def _last_step(job: TrainingJob) -> int:
    """Return the driver's last step: the planned step, or the step where the data surely end.

    A job to an earlier step ends the driver once the step is saved, so that weights are as if training went on.
    """
    newest = Checkpoint(job.start, job.resume_from) if job.resume_from else None
    is_asynchronous, planned = job.config.is_asynchronous, job.planned or 0
    return reach_of(job.run, newest, planned, job.rows).step if is_asynchronous else planned


def startup_seconds(run: Path, nemo_rl: NemoRlSite) -> float:
    """Return seconds from start to training loop: the longest of an attempt, else the site's."""
    return max(_startups(run), default=nemo_rl.startup_seconds)


def _startups(run: Path) -> list[float]:
    return (read_if_there(run / STARTUP, dict[str, list[float]]) or {}).get("seconds", [])


class _Watch:
    """Look at a running driver: steps, checkpoints, requests to stop, standstill."""

    def __init__(self, job: TrainingJob, launch: Launch) -> None:
        self.job, self.logs, self.nemo_rl = job, launch.logs, launch.runtime.nemo_rl
        penalty = job.config.loss_fn.get("reference_policy_kl_penalty") or 0
        measures_kl = penalty > 0 or job.config.loop != "grpo"
        samples = job.config.samples_per_step if job.config.loop in ("sft", *ROLLOUTS) else None
        self.steps = StepLog(launch.logs, job.run / "metrics.jsonl", measures_kl, samples)
        self.last_news = time.time()
        self.startup_seconds = startup_seconds(job.run, self.nemo_rl)
        self.last_step = job.start
        self.until = launch.max_num_steps
        self.stalled: str | None = None

    def is_over(self) -> bool:
        """Look, and return whether to end the driver: at a request to stop, or after a standstill."""
        self.look()
        if self.steps.last_step < self.job.max_num_steps:
            refuse_divergence(self.job.stage, self.job.settings.running_gate, self.job.run, self.steps.last_step)
        if self.job.stop.signalled:
            print(f"{self.job.stage}: {self.job.stop.reason}: ending the driver, which takes no request", flush=True)
            return True
        if self.until > self.job.max_num_steps and newest_step(self.job.run) >= self.job.max_num_steps:
            print(f"{self.job.stage}: ending the driver at step {self.job.max_num_steps}, which is saved", flush=True)
            return True
        patience = self.nemo_rl.stall_seconds + (0 if self.last_step > self.job.start else self.startup_seconds)
        if time.time() - self.last_news > patience:
            self.stalled = f"no new step for {patience:.0f} s (site's nemo_rl.stall_seconds)"
        return self.stalled is not None

    def look(self, is_over: bool = False) -> None:
        """Log new steps, seal new checkpoints."""
        if self.steps.follow(is_over):
            if self.last_step == self.job.start:
                self._note_startup()
            self.last_step = self.steps.last_step
            self.last_news = time.time()
            print(f"{self.job.stage}: step {self.steps.last_step} of {self.until}", flush=True)
        sealed, checkpointing = seal_finished(self.job.run), self.job.settings.checkpointing
        for checkpoint in sealed:
            self.last_news = time.time()
            print(f"{self.job.stage}: checkpoint of step {checkpoint.step}", flush=True)
            if self.job.config.is_asynchronous:
                note_sealed(self.job, checkpoint)
            refuse_repeated_weights(self.job.run)
        if sealed and checkpointing.keep_steps:  # NeMo-RL keeps all checkpoints then
            prune_checkpoints(self.job.run, checkpointing)

    def _note_startup(self) -> None:
        started = float((self.logs / DRIVER_STARTED).read_text(encoding="utf-8"))
        seconds = max(0.0, round(time.time() - self.steps.last_seconds - started, 1))
        write_json(self.job.run / STARTUP, {"seconds": [*_startups(self.job.run), seconds]})


def _judge(job: TrainingJob, launch: Launch, watch: _Watch, cluster: RaySub) -> None:
    """Raise, or ask for continuation, where the driver ended before its step; the status says little."""
    newest = newest_checkpoint(job.run, job.max_num_steps)
    reached = newest.step if newest else 0
    if reached == job.max_num_steps or job.stop.signalled:
        return
    log, status = cluster.driver_log() or cluster.log, cluster.process.returncode
    cause = cluster.cause()
    is_end = cause is not None and cause.kind == "exhausted"
    if watch.stalled or is_end:
        raise _standstill(job, watch, newest, log, is_end)
    if cause is None and status in KILLED:
        raise CutOffError(f"NeMo-RL's driver was killed (status {status}) after the checkpoint of step {reached}")
    if cause is None:
        raise UserError(
            f"NeMo-RL's driver ended with status {status} at step {reached} of {job.max_num_steps} and gave no reason "
            f"that is known; see {log}"
        )
    if cause.kind == "unfinished":
        job.stop.ask(cause.what)
        return
    if cause.spoils and (imported := launch.runtime.import_of(launch.model)) and imported.exists():
        aside = imported.rename(imported.with_name(f"spoilt_{imported.name}.{time.time():.0f}"))
        print(f"{job.stage}: set the import aside as {aside}", flush=True)
    ended = f"NeMo-RL ended with status {status} after the checkpoint of step {reached}: {cause}"
    raise CutOffError(ended) if cause.kind == "lost" else UserError(ended)


def _standstill(job: TrainingJob, watch: _Watch, newest: Checkpoint | None, log: Path, is_end: bool) -> CutOffError:
    """Return why nothing moves; at the end of the data asynchronous loops say so (`is_end`) or wait for ever."""
    is_end = is_end or (job.config.is_asynchronous and data_ended(log))
    if job.config.is_asynchronous:
        note_standstill(job, newest, watch.last_step, is_end)
    if is_end:
        return ExhaustedError(f"its data ended at step {watch.last_step}, before {job.max_num_steps}; see {log}")
    return StalledError(f"{watch.stalled}, at step {newest.step if newest else 0}; see {log}")
