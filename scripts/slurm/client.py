"""Questions and orders to Slurm: jobs with nodes and time limits, requeueing, steps within a job's allocation."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
NOISE = re.compile(r".*(resolve_ctls_from_dns_srv|fetch_config|_establish_config_source|Try \".* --help\").*")
NO_CONTROLLER = ("Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were")


class SlurmUnreachableError(UserError):
    """Slurm's controller does not answer, perhaps only for now."""


@dataclass(frozen=True)
class Job:
    """A Slurm job by its controller; `end` in seconds since the epoch, `cpus_per_node` of the allocation.

    Of a heterogeneous job the fields tell the first component, `beside` the nodes of the others.
    """

    id: str
    state: str
    nodes: tuple[str, ...]
    end: float | None
    cpus_per_node: int
    requeues: bool
    restarts: int
    partition: str = ""
    account: str = ""
    beside: tuple[str, ...] = ()


def own_job_id() -> str | None:
    """Return the id of the Slurm job around this process."""
    return os.environ.get("SLURM_JOB_ID")


def job_of(job_id: str) -> Job | None:
    """Return a job, None when Slurm has no record of it. SlurmUnreachableError without an answer."""
    try:
        fields, *others = _components("job", job_id)
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    names, *beside = (_hostnames(component.get("NodeList", "")) for component in (fields, *others))
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
        tuple(node for nodes in beside for node in nodes),
    )


def _hostnames(nodes: str) -> tuple[str, ...]:
    return tuple(ask("scontrol", "show", "hostnames", nodes).split()) if nodes not in ("(null)", "") else ()


def own_job() -> Job:
    """Return the Slurm job around this process."""
    if (job_id := own_job_id()) is None:
        raise UserError("the process runs in no Slurm job")
    if (job := retry_unreachable(lambda: job_of(job_id))) is None:
        raise UserError(f"Slurm does not know job {job_id}, the job of this process")
    return job


def retry_unreachable(question: Callable[[], Answer]) -> Answer:
    """Return the answer to a question, repeated for ten minutes while Slurm's controller is away."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return question()
        except SlurmUnreachableError:
            if time.monotonic() > until:
                raise
        time.sleep(5)


def has_ended(job_id: str) -> bool | None:
    """Return whether a job's processes have ended; None without an answer from Slurm."""
    try:
        job = job_of(job_id)
    except UserError:
        return None
    return job is None or job.state in ENDED_STATES or job.state in ("PENDING", "REQUEUED")


def accounted_state(job_id: str) -> str:
    """Return a job's final state by the accounting database; empty where it does not tell."""
    with suppress(UserError):
        return ask("sacct", "-X", "--noheader", "--parsable2", "--format=State", f"--jobs={job_id}")
    return ""


def canceller_of(job_id: str) -> str | None:
    """Return the number of another user who cancelled a job; None where the accounting database does not tell."""
    found = re.match(r"CANCELLED by (\d+)", accounted_state(job_id))
    return found[1] if found and int(found[1]) != os.getuid() else None


def wait_for_job(job_id: str, every: float = 10.0) -> None:
    """Wait until a job, running or pending, is gone for good."""
    while True:
        with suppress(SlurmUnreachableError):
            if (job := job_of(job_id)) is None or job.state in ENDED_STATES:
                return
        time.sleep(every)


def requeue_own_job(job: Job) -> None:
    """Put the batch job around this process back into the queue; UserError when Slurm refuses.

    Slurm ends the job's processes then, this one among them.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ask("scontrol", "requeue", job.id)
    time.sleep(120)
    raise UserError(f"Slurm job {job.id}: requeued two minutes ago, but processes still run")


def show(entity: str, name: str) -> dict[str, str]:
    """Return the fields of ``scontrol show`` for a node or the like, or for a job's first component."""
    return _components(entity, name)[0]


def _components(entity: str, name: str) -> list[dict[str, str]]:
    lines = ask("scontrol", "show", entity, "--oneliner", name).splitlines() or [""]
    fields = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]
    return sorted(fields, key=lambda component: int(component.get("HetJobOffset", "0")))


def ask(*command: str) -> str:
    """Return a Slurm command's output; UserError with its message, SlurmUnreachableError without a controller."""
    return run_client(command, client_environment()).stdout


def run_client(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command in an environment to its end; errors as of `ask`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: not found; Slurm's client programs must be in PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachableError(f"{' '.join(command)}: no answer within a minute") from None
    if done.returncode != 0:
        message = in_one_line(done.stderr) or f"exit status {done.returncode}"
        kind = SlurmUnreachableError if any(words in message for words in NO_CONTROLLER) else UserError
        raise kind(f"{' '.join(command)}: {message}")
    return done


def in_one_line(errors: str) -> str:
    """Return a Slurm command's messages in a line, without the program's name and lookups of its configuration."""
    lines = [re.sub(r"^\w+: ((error|fatal): )?", "", line.strip()) for line in errors.splitlines()]
    return "; ".join(line for line in lines if line and not NOISE.fullmatch(line))


def client_environment() -> dict[str, str]:
    """Return this process's environment without the settings of the job step around it, which bind nested steps.

    By SLURM_HET_SIZE srun takes the first component of a heterogeneous job; without the variable srun takes none.
    """
    kept = {"SLURM_JOB_ID", "SLURM_CONF", "SLURM_HET_SIZE"}
    own = ("SLURM_", "SRUN_", "SBATCH_", "SQUEUE_", "SCONTROL_", "SINFO_")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(own)}


def step_command(job: Job, nodes: tuple[str, ...], gres: str, output: str) -> list[str]:
    """Return srun's command line, without the program, for a task on each node beside the job's other steps.

    `gres` is asked of each node. `output` is the pattern of the log files; %N in it stands for the node. When one task
    fails, all are ended.
    """
    count = str(len(nodes))
    return [
        *("srun", "--overlap", "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=1"),
        *(f"--jobid={job.id}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", f"--cpus-per-task={job.cpus_per_node}"),
        *([f"--gres={gres}"] if gres else []),
        *(f"--output={output}", "--open-mode=append"),
    ]


def epoch(local: str) -> float | None:
    """Convert Slurm's time to seconds since the epoch; None for an unknown time."""
    try:
        return time.mktime(time.strptime(local, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
