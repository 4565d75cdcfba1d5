"""Faults of a training and around it: how each of faults.yaml is caused, and mended where Snakemake is called again."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from scripts.stage.paths import STORE
from scripts.stage.training_folder import TrainingFolder
from tests.slurm.chain import STEPS, Chain
from tests.slurm.cluster import Cluster
from tests.slurm.fault import MIDDLE, Fault, Outcome, at_each_step, suffer

__all__ = ["FAULTS", "Fault", "Outcome", "suffer"]


def _cancel(chain: Chain) -> None:
    job = chain.job()["id"]
    chain.strike()
    chain.cluster.run("scancel", job)
    assert chain.end() == 1
    time.sleep(3)
    assert [it["id"] for it in chain.jobs()] == [job], "a job was submitted after the scancel"


def _scancel_running(chain: Chain) -> None:
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


def _scancel_pending(chain: Chain) -> None:
    with _no_room(chain.cluster):
        chain.start()
        chain.job("PENDING")
        _cancel(chain)
    chain.until(lambda: not chain.processes(), 60)
    chain.start()


def _requeue(chain: Chain) -> None:
    chain.strike()
    chain.cluster.run("scontrol", "requeue", chain.job("RUNNING")["id"])


def _preempt(chain: Chain) -> None:
    chain.strike()
    chain.cluster.run("srun", "--partition=urgent", "--exclusive", "--nodes=3", "sleep", "3")


def _lose(chain: Chain, place: int, how: str) -> None:
    host = chain.hosts()[place]
    chain.strike()
    (chain.cluster.kill_host if how == "killed" else chain.cluster.disconnect)(host)
    chain.until(lambda: host not in chain.job()["nodes"] and chain.jobs("RUNNING"))
    highest = max(chain.steps())
    chain.until(lambda: max(chain.steps()) > highest)
    (chain.cluster.start_host if how == "killed" else chain.cluster.reconnect)(host)


def _start_slow_from_the_middle(chain: Chain, seconds: int = 1) -> None:
    """Train to the middle, and from there slowly, or it may be done too soon."""
    at_each_step(chain, f"time.sleep({seconds} * (state.global_step >= {MIDDLE}))")
    chain.start()
    chain.until_step(MIDDLE)


def _lose_the_only_host(chain: Chain) -> None:
    """Cut off a host where the training goes on; Slurm, once it reaches the host, would end it before it sees that."""
    owner = chain.root / "scripts/stage/owner.py"
    owner.write_text(re.sub(r"(?m)^HEARTBEAT_SECONDS = .*", "HEARTBEAT_SECONDS = 4.0", owner.read_text()))
    _start_slow_from_the_middle(chain, seconds=3)
    host = chain.hosts()[0]
    chain.strike()
    chain.cluster.disconnect(host)
    chain.until(lambda: chain.telling("took over; ending at once"))
    chain.cluster.reconnect(host)


def _away(chain: Chain, seconds: float) -> None:
    chain.strike()
    chain.cluster.stop_controller()
    time.sleep(seconds)
    chain.cluster.start_controller()


def _away_at_submission(chain: Chain) -> None:
    (chain.directory / "preflight.json").unlink()
    chain.start()
    chain.until(lambda: "rule preflight" in chain.said())
    _away(chain, 60)


def _kill_snakemake(chain: Chain) -> None:
    _start_slow_from_the_middle(chain)
    chain.strike()
    chain.kill()
    chain.start()


def _kill_snakemake_while_pending(chain: Chain) -> None:
    with _no_room(chain.cluster):
        chain.start()
        chain.job("PENDING")
        chain.strike()
        chain.kill()
        chain.start()
        chain.until(lambda: chain.submitted() == 2)
        time.sleep(5)


def _kill(chain: Chain, place: int, words: str) -> None:
    host = chain.hosts()[place]
    chain.strike()
    if not chain.cluster.kill_processes(host, words):
        raise AssertionError(f"nothing on {host} bears the words {words}")


def _crash(chain: Chain) -> None:
    """Let the trainer fail by itself, see that it did so once, mend it, and call Snakemake again."""
    mend = at_each_step(chain, f"assert state.global_step != {MIDDLE}, 'the optimizer tripped'")
    chain.start()
    assert chain.end() == 1
    chain.strike()
    assert len(TrainingFolder(chain.run).attempts) == 1, "a failure of its own was tried again"
    mend()
    chain.start()


def _take_port(chain: Chain) -> None:
    command = ("python", "-m", "http.server", "6379")
    chain.cluster.run("bash", "-c", '"$@" > /dev/null 2>&1 &', "bash", *command, host="node1")
    try:
        chain.strike()
        chain.start()
        assert chain.end() == 1
    finally:
        chain.cluster.kill_processes("node1", " ".join(command))
    chain.start()


def _let_no_ray_start(chain: Chain) -> None:
    chain.cluster.run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/tmp/ray", host="node2")  # noqa: S108
    try:
        chain.strike()
        chain.start()
        assert chain.end() == 1
    finally:
        chain.cluster.run("umount", "/tmp/ray", host="node2")  # noqa: S108
    chain.start()


def _pass_a_limit(chain: Chain) -> None:
    as_fast_as_it_can = at_each_step(chain, f"time.sleep({60 * chain.runtime / STEPS})")
    chain.start()
    chain.until(lambda: [it for it in TrainingFolder(chain.run).attempts if it["outcome"] == "unfinished"])
    chain.strike()
    as_fast_as_it_can()


def _hang(chain: Chain) -> None:
    at_each_step(chain, f"time.sleep(1000 * (state.global_step == {MIDDLE} and self.job.resume_from is None))")
    chain.start()
    chain.until_step(MIDDLE)
    chain.strike()


def _fill_disk(chain: Chain) -> None:
    filler = chain.root / "results" / STORE / "filler"
    chain.strike()
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(100_000))
    assert chain.end() == 1
    filler.unlink()
    chain.start()


def _act_of(name: str, *arguments: Any) -> Callable[[Chain], None]:
    return lambda chain: globals()[f"_{name}"](chain, *arguments)


FAULTS = {
    name: Fault(name, **entry | {"act": _act_of(*entry["act"])})
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
