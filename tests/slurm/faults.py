"""Faults, each caused for real while a stage trains through Slurm, and what is to come of them."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.train.attempts import read_attempts
from tests.conftest import Workflow
from tests.slurm.chain import SAVE_PERIOD, STAGE, Chain
from tests.slurm.cluster import Cluster, ClusterError

MIDDLE = 4 * SAVE_PERIOD + SAVE_PERIOD // 2
FAULTS: dict[str, "Fault"] = {}


@dataclass(frozen=True)
class Fault:
    """A fault: what it is in words, how it is caused and mended, on how many nodes, and what a person is to read.

    `act` gets a chain whose stage trains and is in the middle, unless `at_once`: then Snakemake has not been called
    yet. `failures` are the jobs that Snakemake is to call failed, `jobs` those it submits at most.
    """

    name: str
    what: str
    act: Callable[[Chain], None]
    nodes: int = 1
    reads: tuple[str, ...] = ()
    at_once: bool = False
    failures: int = 0
    jobs: int = 1
    runtime: int = 60
    site: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    volume_mb: int = 0


@dataclass
class Outcome:
    """What came of a fault: steps trained twice, seconds without a new one, lines read, what was not as it should."""

    lost: int
    seconds: float
    attempts: int
    jobs: int
    calls: int
    read: list[str]
    problems: list[str]


def fault(what: str, *reads: str, **options: Any) -> Callable[[Callable[[Chain], None]], Callable[[Chain], None]]:
    """Enter a function that causes a fault into the list."""

    def enter(act: Callable[[Chain], None]) -> Callable[[Chain], None]:
        name = act.__name__.replace("_", "-")
        FAULTS[name] = Fault(name, what, act, reads=reads, **options)
        return act

    return enter


def suffer(one: Fault, base: Workflow, root: Path, cluster: Cluster, expected: str | None = None) -> Outcome:
    """Train the stage on the cluster through the fault, and judge the outcome.

    `expected` are the weights of a run without a fault, where they are known.
    """
    with Chain(base, root, cluster, one.nodes, one.runtime, **one.site) as chain:
        problems = []
        try:
            if not one.at_once:
                chain.start()
                chain.until_step(MIDDLE)
            one.act(chain)
            if status := chain.end():
                problems.append(f"Snakemake ended with {status}")
            elif chain.weights() != (expected or chain.weights()):
                problems.append("the weights are not those of an undisturbed run")
            chain.until(lambda: not chain.processes(), 60)
        except (AssertionError, TimeoutError, ClusterError, OSError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        jobs = chain.submitted()
        if jobs > one.jobs:
            problems.append(f"{jobs} jobs were submitted, and {one.jobs} would do")
        if (failures := chain.said().count("Error in rule train")) > one.failures:
            problems.append(f"Snakemake showed {failures} failures instead of {one.failures}")
        problems += chain.faults_of_the_log() + chain.processes()
        read = [chain.telling(pattern) or f"NOT SAID: {pattern}" for pattern in one.reads]
        problems += [line for line in read if line.startswith("NOT SAID")]
        attempts = [it for it in read_attempts(chain.run) if it["outcome"] != "waited"]
        return Outcome(chain.lost_steps(), chain.stood_still(), len(attempts), jobs, len(chain.calls), read, problems)


# On several nodes: Ray and the driver


def _kill(chain: Chain, host: str, words: str) -> None:
    chain.strike()
    if not chain.cluster.kill_processes(host, words):
        raise AssertionError(f"nothing on {host} bears the words {words}")


@fault(
    "raylet of a worker node killed",
    r"node\d: Ray ended .*; see .*ray-node\d\.log; trying again from step 40",
    nodes=2,
    jobs=2,
)
def raylet_worker(chain: Chain) -> None:
    _kill(chain, chain.hosts()[1], "raylet/raylet")


@fault(
    "raylet of the head killed",
    r"node\d: Ray ended .*; see .*ray-node\d\.log; trying again from step 40",
    nodes=2,
    jobs=2,
)
def raylet_head(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "raylet/raylet")


@fault("driver killed", r"node\d: the driver was killed \(SIGKILL\).*; trying again from step 40", nodes=2, jobs=2)
def driver_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "scripts.train.trl_driver")


@fault(
    "a rank's process killed",
    r"rank 1 on node\d is gone, killed or out of memory",
    r"cut off.*; trying again from step 40",
    nodes=2,
    jobs=2,
)
def rank_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[1], "ray::RayTrainWorker")


@fault(
    "trainer killed (one node)", r"killed with Slurm job \d+ \(FAILED on node\d\); trying again from step 40", jobs=2
)
def trainer_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "scripts.train.run")


CRASH = "    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:\n"


def _crash(chain: Chain) -> None:
    """Let the trainer fail by itself, see that it did so once, mend it, and call Snakemake again."""
    file = chain.root / "scripts/train/trl_backend.py"
    whole = file.read_text()
    assert CRASH in whole
    raising = f"        if state.global_step == {MIDDLE}:\n            raise RuntimeError('the optimizer tripped')\n"
    file.write_text(whole.replace(CRASH, CRASH + raising))
    chain.start()
    assert chain.end() == 1
    chain.strike()
    assert len(read_attempts(chain.run)) == 1, "a failure of its own was tried again"
    file.write_text(whole)
    chain.start()


@fault(
    "the trainer fails by itself",
    r"RuntimeError: the optimizer tripped",
    rf"{STAGE}: not tried again: it failed for a reason of its own; see .*attempts\.log",
    at_once=True,
    jobs=2,
    failures=1,
)
def crash(chain: Chain) -> None:
    _crash(chain)


@fault(
    "a rank fails by itself",
    r"RuntimeError: the optimizer tripped",
    rf"{STAGE}: not tried again: it failed for a reason of its own; see .*attempts\.log",
    nodes=2,
    at_once=True,
    jobs=2,
    failures=1,
)
def rank_crash(chain: Chain) -> None:
    _crash(chain)


@contextlib.contextmanager
def _program(cluster: Cluster, host: str, *command: str) -> Any:
    """A program that runs on a host meanwhile."""
    cluster.run("bash", "-c", '"$@" > /dev/null 2>&1 &', "bash", *command, host=host)
    try:
        yield
    finally:
        cluster.kill_processes(host, " ".join(command))


@fault(
    "Ray's port taken on the head",
    r"node1: port 6379 of .* cannot be used .* set slurm\.ports\.gcs .*; see .*ray-node1\.log",
    rf"{STAGE}: not tried again: two attempts in a row .* made no new step beyond 0",
    nodes=2,
    at_once=True,
    jobs=3,
    failures=1,
)
def port_taken(chain: Chain) -> None:
    with _program(chain.cluster, "node1", "python", "-m", "http.server", "6379"):
        chain.strike()
        chain.start()
        assert chain.end() == 1
    chain.start()


@fault(
    "a node on which Ray cannot start",
    r"node2.*; see .*ray-node2\.log",
    rf"{STAGE}: not tried again: two attempts in a row .* made no new step beyond 0",
    nodes=2,
    at_once=True,
    jobs=3,
    failures=1,
    site={"ray_start_seconds": 60},
)
def ray_cannot_start(chain: Chain) -> None:
    chain.cluster.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/tmp/ray", host="node2")  # noqa: S108
    try:
        chain.strike()
        chain.start()
        assert chain.end() == 1
    finally:
        chain.cluster.run("umount", "/tmp/ray", host="node2")  # noqa: S108
    chain.start()


# Time limits. The margin is wide, so that there is a limit half a minute after the start


LIMIT = {"runtime": 1, "at_once": True}
AT_LIMIT = rf"{STAGE}: unfinished at step .* s are left before the deadline\); to be continued"


def _pass_a_limit(chain: Chain) -> None:
    chain.start()
    chain.until(lambda: [it for it in read_attempts(chain.run) if it["outcome"] == "unfinished"], 100)
    chain.strike()


@fault("time limit", AT_LIMIT, r"goes back into the queue", site={"margin": 38}, **LIMIT)
def limit(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault("time limit", AT_LIMIT, r"goes back into the queue", nodes=2, site={"margin": 25}, **LIMIT)
def limit_2_nodes(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault(
    "time limit where Slurm never requeues",
    AT_LIMIT,
    jobs=5,
    site={"margin": 38, "requeue": False},
    cluster={"requeue": False},
    **LIMIT,
)
def limit_no_requeue(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault(
    "a step that hangs until Slurm's time limit",
    r"killed with Slurm job \d+ \(TIMEOUT on node\d\); trying again from step 40",
    jobs=2,
    **LIMIT,
)
def overshoot(chain: Chain) -> None:
    file = chain.root / "scripts/train/trl_backend.py"
    whole = file.read_text()
    hang = f"        if state.global_step == {MIDDLE} and self.job.resume_from is None:\n            time.sleep(1000)\n"
    file.write_text(whole.replace(CRASH, CRASH + hang))
    chain.start()
    chain.until_step(MIDDLE)
    chain.strike()


# What people and other jobs do


def _cancel(chain: Chain) -> None:
    job = chain.job()["id"]
    chain.strike()
    chain.cluster.run("scancel", job)
    assert chain.end() == 1
    time.sleep(3)
    assert [it["id"] for it in chain.jobs()] == [job], "a job was submitted after the scancel"


@fault(
    "scancel of a running training",
    rf"{STAGE}: not tried again: somebody cancelled its Slurm job; call snakemake again",
    nodes=2,
    jobs=2,
    failures=1,
)
def scancel_running(chain: Chain) -> None:
    _cancel(chain)
    chain.until(lambda: not chain.processes(), 60)
    chain.start()


@contextlib.contextmanager
def _no_room(cluster: Cluster) -> Any:
    """A job of somebody else's on all hosts, meanwhile."""
    job = cluster.run(
        *("sbatch", "--parsable", "--output=/dev/null", "--exclusive", f"--nodes={len(cluster.hosts)}"),
        "--wrap=sleep 1000",
    ).strip()
    try:
        yield
    finally:
        cluster.run("scancel", job)


@fault(
    "scancel of a pending training",
    rf"{STAGE}: not tried again: somebody cancelled its Slurm job; call snakemake again",
    at_once=True,
    jobs=2,
    failures=1,
)
def scancel_pending(chain: Chain) -> None:
    with _no_room(chain.cluster):
        chain.start()
        chain.job("PENDING")
        _cancel(chain)
    chain.until(lambda: not chain.processes(), 60)
    chain.start()


@fault("scontrol requeue by an administrator")
def admin_requeue(chain: Chain) -> None:
    chain.strike()
    chain.cluster.run("scontrol", "requeue", chain.job("RUNNING")["id"])


@fault("preempted by an urgent job")
def preempted(chain: Chain) -> None:
    chain.strike()
    chain.cluster.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "sleep", "3")


# Hosts and their network


def _lose(chain: Chain, place: int, how: str) -> None:
    host = chain.hosts()[place]
    chain.strike()
    (chain.cluster.kill_host if how == "killed" else chain.cluster.disconnect)(host)
    chain.until(lambda: host not in chain.job()["nodes"] and chain.jobs("RUNNING"))
    highest = max(chain.steps())
    chain.until(lambda: max(chain.steps()) > highest)
    if how == "killed":
        chain.cluster.start_host(host)
    else:
        chain.cluster.reconnect(host)


SOON = {"slurmd_timeout": 10}


@fault("the first host killed", nodes=2, cluster=SOON)
def first_host_killed(chain: Chain) -> None:
    _lose(chain, 0, "killed")


@fault("another host killed", nodes=2, cluster=SOON)
def other_host_killed(chain: Chain) -> None:
    _lose(chain, 1, "killed")


@fault("the network of the first host broken", nodes=2, cluster=SOON)
def first_host_cut_off(chain: Chain) -> None:
    _lose(chain, 0, "cut off")


@fault("the network of another host broken", nodes=2, cluster=SOON)
def other_host_cut_off(chain: Chain) -> None:
    _lose(chain, 1, "cut off")


@fault("the network of the only host broken", cluster=SOON)
def only_host_cut_off(chain: Chain) -> None:
    _lose(chain, 0, "cut off")


# Slurm's controller


def _away(chain: Chain, seconds: float) -> None:
    chain.strike()
    chain.cluster.stop_controller()
    time.sleep(seconds)
    chain.cluster.start_controller()


@fault("slurmctld away for 30 s while it trains")
def controller_away(chain: Chain) -> None:
    _away(chain, 30)


@fault("slurmctld away for 5 minutes while it trains")
def controller_away_5_minutes(chain: Chain) -> None:
    _away(chain, 300)


@fault("slurmctld away for a minute when the job is submitted", at_once=True)
def controller_away_at_submission(chain: Chain) -> None:
    (chain.directory / "preflight.json").unlink()
    chain.start()
    chain.until(lambda: "rule preflight" in chain.said())
    _away(chain, 60)


# Snakemake


@fault("Snakemake killed while it trains, and started again", r"Slurm job 1 trains it; waiting", jobs=2)
def snakemake_killed(chain: Chain) -> None:
    chain.strike()
    chain.kill()
    chain.start()


@fault("Snakemake killed while the job is pending, and started again", r"waiting", jobs=2, at_once=True)
def snakemake_killed_pending(chain: Chain) -> None:
    with _no_room(chain.cluster):
        chain.start()
        chain.job("PENDING")
        chain.strike()
        chain.kill()
        chain.start()
        chain.until(lambda: chain.submitted() == 2)
        time.sleep(5)


# The disk


@fault("disk full", r"the disk is full; make room and start again", volume_mb=40, jobs=2, failures=1)
def disk_full(chain: Chain) -> None:
    filler = chain.directory / "filler"
    chain.strike()
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(100_000))
    assert chain.end() == 1
    filler.unlink()
    chain.start()
