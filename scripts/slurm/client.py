"""Slurm's answers and orders: jobs, their nodes and time limits, requeueing, and steps within a job's allocation."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from scripts.errors import UserError

ENDED_STATES = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
ENDED_BY_SLURM = {"NODE_FAIL", "PREEMPTED", "TIMEOUT", "BOOT_FAIL", "DEADLINE", "REVOKED"}
RETRY_SECONDS = 600.0
Answer = TypeVar("Answer")
NO_CONTROLLER = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were")


class SlurmUnreachableError(UserError):
    """Slurm's controller does not answer (its answer may come later)."""


@dataclass(frozen=True)
class Job:
    """A Slurm job as its controller sees it; `end` in seconds since the epoch, `cpus_per_node` of its allocation."""

    id: str
    state: str
    nodes: tuple[str, ...]
    end: float | None
    cpus_per_node: int
    requeues: bool
    restarts: int
    partition: str = ""
    account: str = ""


def own_job_id() -> str | None:
    """The Slurm job that this process runs in."""
    return os.environ.get("SLURM_JOB_ID")


def job_of(job_id: str) -> Job | None:
    """A job, or None when Slurm does not know it (any more). SlurmUnreachableError when it does not answer."""
    try:
        fields = show("job", job_id)
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    nodes = fields.get("NodeList", "(null)")
    names = hostnames(nodes) if nodes not in ("(null)", "") else ()
    return Job(
        job_id,
        fields["JobState"],
        names,
        epoch(fields.get("EndTime", "")),
        int(fields.get("NumCPUs", "1").split("-")[0]) // max(1, len(names)),
        fields.get("Requeue") == "1" and fields.get("BatchFlag") == "1",
        int(fields.get("Restarts", "0")),
        fields.get("Partition", ""),
        fields.get("Account", "").removeprefix("(null)"),
    )


def own_job() -> Job:
    """The job that this process runs in."""
    if (job_id := own_job_id()) is None:
        raise UserError("this process runs in no Slurm job")
    if (job := retry_unreachable(lambda: job_of(job_id))) is None:
        raise UserError(f"Slurm knows no job {job_id}, in which this process runs")
    return job


def retry_unreachable(question: Callable[[], Answer]) -> Answer:
    """The answer to a question, asked again for ten minutes while Slurm's controller is away."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return question()
        except SlurmUnreachableError:
            if time.monotonic() > until:
                raise
        time.sleep(5)


def has_ended(job_id: str) -> bool | None:
    """Whether a job's processes are known to have ended; None when Slurm does not answer."""
    try:
        job = job_of(job_id)
    except UserError:
        return None
    return job is None or job.state in ENDED_STATES or job.state in ("PENDING", "REQUEUED")


def wait_for_job(job_id: str, every: float = 10.0) -> None:
    """Return when Slurm says that a job is gone for good; a pending one is waited for as well."""
    while True:
        try:
            job = job_of(job_id)
        except SlurmUnreachableError:
            pass
        else:
            if job is None or job.state in ENDED_STATES:
                return
        time.sleep(every)


def requeue_own_job(job: Job) -> None:
    """Put this process's own batch job back into the queue; returns only if Slurm refuses, with UserError.

    Slurm ends the job's processes then, this one among them.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ask("scontrol", "requeue", job.id)
    time.sleep(120)
    raise UserError(f"Slurm job {job.id}: requeued itself two minutes ago, and its processes still run")


def show(entity: str, name: str) -> dict[str, str]:
    """The fields of what ``scontrol show`` says of a job, node or the like."""
    return dict(
        part.split("=", 1) for part in ask("scontrol", "show", entity, "--oneliner", name).split() if "=" in part
    )


def hostnames(node_list: str) -> tuple[str, ...]:
    """The names that a compressed list such as node[1-3] stands for."""
    return tuple(ask("scontrol", "show", "hostnames", node_list).split())


def ask(*command: str) -> str:
    """What a Slurm command prints. UserError with its message; SlurmUnreachableError when the controller is away."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=client_environment()
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]}: not found; Slurm's client programs must be in PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{' '.join(command)}: no answer within a minute") from None
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        kind = SlurmUnreachableError if any(words in message for words in NO_CONTROLLER) else UserError
        raise kind(f"{' '.join(command)}: {message}")
    return done.stdout


def client_environment() -> dict[str, str]:
    """This process's environment without the settings of the job step around it, which would bind nested steps."""
    kept = {"SLURM_JOB_ID", "SLURM_CONF"}
    own = ("SLURM_", "SRUN_", "SBATCH_", "SQUEUE_", "SCONTROL_", "SINFO_")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(own)}


def step_command(job: Job, nodes: tuple[str, ...], gpus_per_node: int, output: str) -> list[str]:
    """The srun command line, but for the program, of one task on each of these nodes, beside the job's other steps.

    `output` is the pattern of its log files; %N in it stands for the node. When one task fails, all are ended.
    """
    count = str(len(nodes))
    return [
        *("srun", "--overlap", "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=1"),
        *(f"--jobid={job.id}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={job.cpus_per_node}"),
        *([f"--gres=gpu:{gpus_per_node}"] if gpus_per_node else []),
        *(f"--output={output}", "--open-mode=append"),
    ]


def epoch(local: str) -> float | None:
    """A time as Slurm writes it, in seconds since the epoch; None: Slurm knows none."""
    try:
        return time.mktime(time.strptime(local, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
