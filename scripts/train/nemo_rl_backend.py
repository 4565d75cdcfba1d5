"""Backend `nemo_rl`: NeMo-RL's driver in its containers, started within a Slurm job by its own ray.sub, and watched.

NeMo-RL takes no request to stop: it saves by itself before the deadline that its command computes. What ends it earlier
(a signal, the time limit, a kill) costs the steps since its last checkpoint.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.errors import CutOffError, UserError
from scripts.files import read_json, write_json
from scripts.launch.nemo_rl_command import DRIVER_STARTED, Launch, cluster_environment, driver_environment
from scripts.launch.slurm import client_environment
from scripts.recipe.releases import release_of
from scripts.train.backend import Place, TrainingJob
from scripts.train.nemo_rl_checkpoints import pass_over_newer, refuse_repeated_weights, seal_finished
from scripts.train.nemo_rl_metrics import StepLog
from scripts.train.nemo_rl_outcome import Cause, cause_of
from scripts.train.rundir import newest_checkpoint

LOOK_SECONDS = 2.0
END_SECONDS = 60.0
STARTUP = "startup.json"
KILLED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM)


def train(job: TrainingJob, place: Place) -> None:
    """Start the driver and watch it to its end; ``run/startup.json`` notes how long it took to its first step.

    Afterwards `job.stop` has a reason where it is to be continued. UserError: it failed for a reason of its own;
    CutOffError: the next attempt may go well.
    """
    launch = launch_of(job, place)
    pass_over_newer(job.run, job.resume_from)
    for name, value in driver_environment(launch).items():
        if value.startswith(launch.nemo_rl.cache) and "URL" not in name:
            Path(value).mkdir(parents=True, exist_ok=True)
    logs = job.run.absolute().parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    launch.logs.mkdir(parents=True, exist_ok=True)
    again = f"-{place.job.restarts}" if place.job.restarts else ""
    cluster_log = logs / f"ray-sub-{place.job.id}{again}.log"
    print(f"{job.stage}: ray.sub on {len(place.job.nodes)} nodes, image {launch.image}; see {cluster_log}", flush=True)
    with cluster_log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603
            ["bash", str(launch.checkout / "ray.sub")],  # noqa: S607
            cwd=launch.checkout,
            env=client_environment() | slurm_variables(place, launch.checkout) | cluster_environment(launch, logs),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    watch = _Watch(job, launch, logs, place.job.id)
    try:
        while process.poll() is None and not watch.is_over():
            time.sleep(LOOK_SECONDS)
    finally:
        _end(process)
        watch.look(is_over=True)
    _judge(job, watch, process.returncode, cluster_log)


def launch_of(job: TrainingJob, place: Place) -> Launch:
    """One start of the stage's driver in this Slurm job; `save_by` leaves the site's margin before the job's end."""
    config, nemo_rl = job.config, place.site.nemo_rl
    name = config["release"]["name"]
    if nemo_rl is None or name not in nemo_rl.checkouts:
        raise UserError(
            f"site {place.site.name}: nemo_rl.checkouts names no checkout of {name}; clone NeMo-RL at "
            f"{config['release']['revision']} and name the folder"
        )
    parent = job.parent_model.resolve() if job.parent_model else config["model"]["name"].rstrip("/")
    pretrained = job.parent_model.resolve() / "megatron" if job.parent_model else None
    save_by = None if job.stop.deadline is None else job.stop.deadline - nemo_rl.save_seconds
    return Launch(
        stage=job.stage,
        settings=place.stage,
        release=release_of(name),
        site=place.site,
        checkout=Path(nemo_rl.checkouts[name]),
        model=str(parent),
        train_split=job.train_split.absolute(),
        validation_split=job.train_split.with_name("val-split.jsonl").absolute(),
        checkpoints=(job.run / "checkpoints").absolute(),
        logs=(job.run / "logs").absolute(),
        max_num_steps=job.max_num_steps,
        seed=config["seed"],
        save_by=save_by,
        startup_seconds=startup_seconds(job.run, nemo_rl.startup_seconds),
        pretrained=pretrained.resolve() if pretrained is not None and pretrained.exists() else None,
    )


def startup_seconds(run: Path, expected: float) -> float:
    """Seconds from a driver's start to its training loop: the longest that an attempt here took, else as expected."""
    path = run / STARTUP
    return max(read_json(path)["seconds"]) if path.exists() else expected


def slurm_variables(place: Place, submit_directory: Path) -> dict[str, str]:
    """What ray.sub reads of Slurm, which the executor's job step has stripped, and what lets its steps overlap."""
    job, slurm = place.job, place.site.slurm
    nodes = str(len(job.nodes))
    variables = {
        "SLURM_JOB_ID": job.id,
        "SLURM_JOB_NODELIST": ",".join(job.nodes),
        "SLURM_NODELIST": ",".join(job.nodes),
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_ACCOUNT": slurm.account or job.account or "none",
        "SLURM_SUBMIT_DIR": str(submit_directory),
        "SLURM_OVERLAP": "1",
        "SLURM_CPU_BIND": "none",
        "SLURM_MEM_PER_NODE": "0",
    }
    return variables | ({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {})


class _Watch:
    """What is seen of a driver while it runs: steps, checkpoints, requests to stop, standstill."""

    def __init__(self, job: TrainingJob, launch: Launch, logs: Path, job_id: str) -> None:
        self.job, self.launch, self.logs, self.job_id = job, launch, logs, job_id
        penalty = job.config["loss_fn"].get("reference_policy_kl_penalty", 0) or 0
        measures_kl = penalty > 0 or job.config["algorithm"] != "grpo"
        self.steps = StepLog(launch.logs, job.run / "metrics.jsonl", measures_kl)
        self.started = self.last_news = time.time()
        self.made_a_step = False
        self.stalled: str | None = None

    def is_over(self) -> bool:
        """Look, and say whether the driver is to be ended: a stop was requested, or nothing moves any more."""
        self.look()
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
            self.last_news = time.time()
            print(f"{self.job.stage}: step {self.steps.last_step} of {self.job.max_num_steps}", flush=True)
        for checkpoint in seal_finished(self.job.run):
            self.last_news = time.time()
            print(f"{self.job.stage}: checkpoint of step {checkpoint.step}", flush=True)
            refuse_repeated_weights(self.job.run)

    def _note_startup(self) -> None:
        path, started = self.job.run / STARTUP, self.launch.logs / DRIVER_STARTED
        before = read_json(path)["seconds"] if path.exists() else []
        seconds = time.time() - self.steps.last_seconds - float(started.read_text(encoding="utf-8"))
        write_json(path, {"seconds": [*before, max(0.0, round(seconds, 1))]})

    def cluster_logs(self) -> Path:
        """The directory of this start's logs; ray.sub adds the count of restarts to its name where it knows it."""
        found = sorted(self.logs.glob(f"{self.job_id}*-logs"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else self.logs

    def driver_log(self) -> Path | None:
        """The driver's log of this start; None when it did not get that far."""
        log = self.cluster_logs() / "ray-driver.log"
        return log if log.exists() and log.stat().st_mtime >= self.started - 1 else None


def _judge(job: TrainingJob, watch: _Watch, status: int, cluster_log: Path) -> None:
    """Say how the driver ended where the planned step is not there; what its status was says little."""
    newest = newest_checkpoint(job.run, job.max_num_steps)
    reached = newest.step if newest else 0
    if reached == job.max_num_steps or job.stop.signalled:
        return
    log = watch.driver_log()
    if watch.stalled:
        raise CutOffError(f"{watch.stalled}, at step {reached}; see {log or cluster_log}")
    cause = cause_of(log, cluster_log, watch.cluster_logs())
    if cause is None and status in KILLED:
        raise CutOffError(f"NeMo-RL's driver was killed (status {status}) after the checkpoint of step {reached}")
    if cause is None:
        raise UserError(
            f"NeMo-RL's driver ended with status {status} at step {reached} of {job.max_num_steps} and gave no reason "
            f"that is known; see {log or cluster_log}"
        )
    if cause.kind == "unfinished":
        job.stop.ask(cause.what)
        return
    raise (CutOffError if cause.kind == "lost" else UserError)("\n  ".join(_words(cause, status, reached)))


def _words(cause: Cause, status: int, reached: int) -> Iterator[str]:
    yield f"NeMo-RL ended with status {status} after the checkpoint of step {reached}: {cause.what}; {cause.log} says:"
    yield from cause.lines


def _end(process: subprocess.Popen) -> None:
    """End ray.sub and its job steps: their srun pass the signal on."""
    for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
