"""Start NeMo-RL's driver in a Slurm job by ray.sub, within judges' pools if any, and watch.

NeMo-RL takes no request to stop, and saves before the deadline computed by the command. An earlier end (signal, time
limit, kill) costs the steps since the last checkpoint.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from scripts.backends.nemo_rl.checkpoints import (
    note_sealed,
    note_standstill,
    pass_over_newer,
    reach_of,
    refuse_repeated_weights,
    seal_finished,
)
from scripts.backends.nemo_rl.command import (
    DRIVER_STARTED,
    START_POOLS,
    Launch,
    ask_addresses,
    cluster_environment,
    pools_of,
)
from scripts.backends.nemo_rl.demonstrations import write_rows
from scripts.backends.nemo_rl.metrics import StepLog
from scripts.backends.nemo_rl.outcome import HOPELESS, TAIL_BYTES, cause_of, data_ended, refused_container, step_logs
from scripts.backends.nemo_rl.releases import Release, release_of
from scripts.backends.nemo_rl.runtime import Runtime, clear, container_environment, mark_of
from scripts.backends.protocol import Allocation, TrainingJob
from scripts.errors import CutOffError, ExhaustedError, StalledError, UserError, warn
from scripts.evaluate.gate import refuse_divergence
from scripts.files import write_json
from scripts.recipe.site import NemoRlSite, Site, Slurm
from scripts.records import Manifest, read_if_there
from scripts.slurm.client import Job
from scripts.stage.rundir import Checkpoint
from scripts.stage.store import prune_checkpoints
from scripts.stage.training_folder import TrainingFolder

STARTUP = "startup.json"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
HIGHEST_PORT = 28_000  # of NeMo-RL's own, before main
LOOK_SECONDS = 2.0
END_SECONDS = 60.0
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
    rows = job.config.loop.folder_of_rows(job.train_split, job.run)
    if rows != job.train_split.parent:
        for name in (job.train_split.name, "val-split.jsonl"):
            write_rows(job.train_split.with_name(name), rows / name)
    pass_over_newer(job.training, job.resume_from)
    job.training.forget_beyond(job.start)
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
    splits = read_if_there(job.train_split.with_name("manifest.json"), Manifest)
    newest = Checkpoint(job.start, job.resume_from) if job.resume_from else None
    # The planned step, or where the data surely end. A job to an earlier step ends the driver once that step is saved,
    # so that weights are as if training went on.
    last, save_by = reach_of(job.config, job.training, newest, job.planned or 0, job.rows).step, None
    is_other = job.resume_from is not None or last != job.planned  # than the schedule NeMo-RL makes of max_num_steps
    if job.stop.deadline is not None:
        seconds = runtime.nemo_rl.save_seconds + startup_seconds(job.training, runtime.nemo_rl)
        save_by = job.stop.deadline - seconds
    return Launch(
        runtime=runtime,
        model=str(parent.resolve()) if parent else model.name.rstrip("/"),
        data=job.config.loop.folder_of_rows(job.train_split, job.run).absolute(),
        run=job.run.absolute(),
        max_num_steps=last,
        schedule_steps=job.planned if job.config.is_asynchronous and is_other else None,
        seed=job.config.seed,
        save_by=save_by,
        mark=mark_of(runtime.image),
        teachers={role.partition(".")[2]: str(path.resolve()) for role, path in job.roles.items()},
        environments=tuple(splits["train"].get("environments", {})) if splits else (),
    )


def startup_seconds(training: TrainingFolder, nemo_rl: NemoRlSite) -> float:
    """Return seconds from start to training loop: the longest of an attempt, else the site's."""
    return max(_startups(training), default=nemo_rl.startup_seconds)


def _startups(training: TrainingFolder) -> list[float]:
    return (read_if_there(training.path / STARTUP, dict[str, list[float]]) or {}).get("seconds", [])


class RaySub:
    """One start of ray.sub with a driver; output goes to `log`, output of job steps to a folder in `logs`."""

    def __init__(self, launch: Launch, job: Job, logs: Path) -> None:
        runtime, checkout = launch.runtime, launch.runtime.checkout
        has_pools = bool(pools_of(runtime))
        if has_pools and not job.beside:
            raise UserError(
                f"{runtime.name}: judges need {runtime.settings.nodes_beside} nodes in a second component of the Slurm "
                f"job, and job {job.id} has a single component; train by snakemake --profile slurm"
            )
        clear(job, runtime)
        for name, value in runtime.environment.items():
            if value.startswith(runtime.nemo_rl.cache) and "URL" not in name:
                Path(value).mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        (launch.run / "logs").mkdir(parents=True, exist_ok=True)
        again = f"-{job.restarts}" if job.restarts else ""
        left = logs / f"{job.id}-logs"
        if job.restarts and left.exists():  # older releases would take the signal files for new ones
            left.rename(logs / f"before{again}-{left.name}")
        self.logs, self.job, self.runtime, self.log = logs, job, runtime, logs / f"ray-sub-{job.id}{again}.log"
        self.started, self.read = time.time(), dict[Path, int]()
        nodes = f"{len(job.nodes)} nodes" + (f", judges on {len(job.beside)} nodes" if has_pools else "")
        print(f"{runtime.name}: ray.sub on {nodes}, image {runtime.image}; see {self.log}", flush=True)
        warn_of_ports(runtime.name, runtime.release)
        variables = slurm_variables(job, runtime.site.slurm, checkout)
        cpus = min(runtime.site.slurm.cpus_per_node or job.cpus_per_node, job.cpus_per_node)
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", str(checkout / (START_POOLS if has_pools else "ray.sub"))],  # noqa: S607
                cwd=checkout,
                env=container_environment() | variables | cluster_environment(launch, logs, cpus),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Wait for the end, or end ray.sub once `is_over` or hopeless."""
        try:
            while self.process.poll() is None and not is_over() and not self._is_hopeless():
                time.sleep(LOOK_SECONDS)
        finally:
            self.end()

    def _is_hopeless(self) -> bool:
        """Return whether a container did not start, or the driver survives a failure for nothing."""
        if (log := self.driver_log()) is not None:
            return any(map(HOPELESS.search, self._added(log)))
        logs = self.cluster_logs()  # v0.6.0's ray.sub would wait on
        return any(self._added(log) for log in step_logs(logs)) and refused_container(logs) is not None

    def _added(self, log: Path) -> list[str]:
        """Return the whole lines added to a log since the last look, of at most TAIL_BYTES."""
        with log.open("rb") as file:
            start = max(self.read.get(log, 0), file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines, end, _ = file.read().rpartition(b"\n")
        self.read[log] = start + len(lines + end)
        return lines.decode(errors="replace").splitlines()

    def end(self) -> None:
        """End ray.sub and the job steps, to which srun passes the signal, and remove their containers."""
        for number, patience in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, 10.0)):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        try:
            clear(self.job, self.runtime)
        except UserError as error:
            warn(str(error))

    def cluster_logs(self) -> Path:
        """Return the folder of this start's logs; some releases add the count of restarts to the name."""
        found = sorted(self.logs.glob(f"{self.job.id}*-logs"), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else self.logs

    def driver_log(self) -> Path | None:
        """Return the driver's log of this start; None without one."""
        log = self.cluster_logs() / "ray-driver.log"
        return log if log.exists() and log.stat().st_mtime >= self.started - 1 else None


def warn_of_ports(stage: str, release: Release) -> None:
    """Print a warning where this node's kernel lends the release's own ports to outgoing connections."""
    lent = PORT_RANGE.read_text(encoding="utf-8").split()
    if int(lent[0]) <= HIGHEST_PORT and "low_ports" not in release.can:
        cure = f"set net.ipv4.ip_local_reserved_ports={lent[0]}-{HIGHEST_PORT}"
        print(f"{stage}: this node's ephemeral ports include NeMo-RL's (docs/traps.md, trap 100); {cure}", flush=True)


def slurm_variables(job: Job, slurm: Slurm, submit_directory: Path) -> dict[str, str]:
    """Return Slurm's variables for ray.sub, stripped by the executor's job step, and those of overlapping steps."""
    variables = {
        "SLURM_JOB_ID": job.id,
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(job.nodes)),
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(job.nodes))),
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_ACCOUNT": job.account or slurm.account or "none",
        "SLURM_SUBMIT_DIR": str(submit_directory),
        "SLURM_OVERLAP": "1",
        "SLURM_CPU_BIND": "none",
        "SLURM_MEM_PER_NODE": "0",
    }
    if job.beside:
        groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": job.nodes, "SLURM_JOB_NODELIST_HET_GROUP_1": job.beside}
        variables |= {"SLURM_HET_SIZE": "2"} | {name: ",".join(names) for name, names in groups.items()}
    return variables | ({"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {})


class _Watch:
    """Look at a running driver: steps, checkpoints, requests to stop, standstill."""

    def __init__(self, job: TrainingJob, launch: Launch) -> None:
        self.job, self.nemo_rl, self.until = job, launch.runtime.nemo_rl, launch.max_num_steps
        penalty = job.config.loss_fn.get("reference_policy_kl_penalty") or 0
        measures_kl = job.config.loop.measures_kl(penalty)
        samples = job.config.loop.logged_samples(job.config)
        self.steps = StepLog(launch.run / "logs", job.training.log, measures_kl, samples)
        self.last_news, self.last_step = time.time(), job.start
        self.startup_seconds = startup_seconds(job.training, self.nemo_rl)
        self.stalled: str | None = None

    def is_over(self) -> bool:
        """Look, and return whether to end the driver: at a request to stop, or after a standstill."""
        self.look()
        if self.steps.last_step < self.job.max_num_steps:
            gate = self.job.settings.running_gate
            refuse_divergence(self.job.stage, gate, self.job.training, self.steps.last_step)
        if self.job.stop.signalled:
            print(f"{self.job.stage}: {self.job.stop.reason}: ending the driver, which takes no request", flush=True)
            return True
        if self.until > self.job.max_num_steps and self.job.training.newest_step >= self.job.max_num_steps:
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
        sealed, checkpointing = seal_finished(self.job.training), self.job.settings.checkpointing
        for checkpoint in sealed:
            self.last_news = time.time()
            print(f"{self.job.stage}: checkpoint of step {checkpoint.step}", flush=True)
            if self.job.config.is_asynchronous:
                note_sealed(self.job, checkpoint)
            refuse_repeated_weights(self.job.training)
        if sealed and checkpointing.keep_steps:  # NeMo-RL keeps all checkpoints then
            prune_checkpoints(self.job.training, checkpointing)

    def _note_startup(self) -> None:
        started = float((self.job.run / DRIVER_STARTED).read_text(encoding="utf-8"))
        seconds = max(0.0, round(time.time() - self.steps.last_seconds - started, 1))
        write_json(self.job.run / STARTUP, {"seconds": [*_startups(self.job.training), seconds]})


def _judge(job: TrainingJob, launch: Launch, watch: _Watch, cluster: RaySub) -> None:
    """Raise, or ask for continuation, where the driver ended before its step; the status says little."""
    newest = job.training.newest_checkpoint(job.max_num_steps)
    reached = newest.step if newest else 0
    if reached == job.max_num_steps or job.stop.signalled:
        return
    log, status = cluster.driver_log() or cluster.log, cluster.process.returncode
    cause = cause_of(cluster.driver_log(), cluster.log, cluster.cluster_logs())
    is_end = cause is not None and cause.kind == "exhausted"
    if watch.stalled or is_end:  # at the end of the data asynchronous loops say so, or wait for ever
        is_end = is_end or (job.config.is_asynchronous and data_ended(log))
        if job.config.is_asynchronous:
            note_standstill(job, newest, watch.last_step, is_end)
        if is_end:
            raise ExhaustedError(f"its data ended at step {watch.last_step}, before {job.max_num_steps}; see {log}")
        raise StalledError(f"{watch.stalled}, at step {reached}; see {log}")
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
