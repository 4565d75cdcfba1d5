"""Faults around a training: people and other jobs, hosts and their network, Slurm's controller, Snakemake."""

import contextlib
import time
from typing import Any

from tests.slurm.chain import STAGE, Chain
from tests.slurm.cluster import Cluster
from tests.slurm.fault import MIDDLE, at_each_step, fault

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


def _start_slow_from_the_middle(chain: Chain) -> None:
    """Train to the middle, and from there a step a second until it is resumed, or it may be done too soon."""
    at_each_step(chain, f"time.sleep(state.global_step >= {MIDDLE} and self.job.resume_from is None)")
    chain.start()
    chain.until_step(MIDDLE)


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


@fault(
    "the network of the only host broken",
    r"on node2 \(Slurm job 1\).* took over; ending at once",
    at_once=True,
    cluster=SOON,
)
def only_host_cut_off(chain: Chain) -> None:
    _start_slow_from_the_middle(chain)
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


@fault(
    "Snakemake killed while it trains, and started again",
    r"Slurm job 1 trains the stage; waiting",
    jobs=2,
    at_once=True,
)
def snakemake_killed(chain: Chain) -> None:
    _start_slow_from_the_middle(chain)
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
