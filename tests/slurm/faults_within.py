"""Faults of the training itself: Ray, its processes, its node, its time limit, its disk."""

import contextlib
from typing import Any

from scripts.stage.attempts import read_attempts
from tests.slurm.chain import STAGE, STEPS, Chain
from tests.slurm.cluster import Cluster
from tests.slurm.fault import MIDDLE, at_each_step, fault

# On several nodes: Ray and the driver


def _kill(chain: Chain, host: str, words: str) -> None:
    chain.strike()
    if not chain.cluster.kill_processes(host, words):
        raise AssertionError(f"nothing on {host} bears the words {words}")


@fault(
    "raylet of a worker node killed",
    r"rank \d on node\d is gone.*; trying again from step \d+",
    nodes=2,
    jobs=2,
)
def raylet_worker(chain: Chain) -> None:
    _kill(chain, chain.hosts()[1], "raylet/raylet")


@fault(
    "raylet of the head killed",
    r"(node\d: .*; see .*ray-node\d\.log|Ray: .*|rank \d on node\d is gone.*); trying again from step \d+",
    nodes=2,
    jobs=2,
)
def raylet_head(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "raylet/raylet")


@fault(
    "driver killed",
    r"(the driver was killed|step: srun: error: node\d).*; see .*; trying again from step \d+",
    nodes=2,
    jobs=2,
)
def driver_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "scripts.backends.trl.driver")


@fault(
    "a rank's process killed",
    r"rank \d on node\d is gone, killed or out of memory: .*; trying again from step \d+",
    nodes=2,
    jobs=2,
)
def rank_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[1], "ray::RayTrainWorker")


@fault(
    "trainer killed (one node)", r"killed with Slurm job \d+ \(FAILED on node\d\); trying again from step \d+", jobs=2
)
def trainer_killed(chain: Chain) -> None:
    _kill(chain, chain.hosts()[0], "scripts.train.run")


def _crash(chain: Chain) -> None:
    """Let the trainer fail by itself, see that it did so once, mend it, and call Snakemake again."""
    mend = at_each_step(chain, f"assert state.global_step != {MIDDLE}, 'the optimizer tripped'")
    chain.start()
    assert chain.end() == 1
    chain.strike()
    assert len(read_attempts(chain.run)) == 1, "a failure of its own was tried again"
    mend()
    chain.start()


@fault(
    "the trainer fails by itself",
    r"AssertionError: the optimizer tripped",
    rf"{STAGE}: not tried again: it failed for a reason of its own; see .*attempts\.log",
    at_once=True,
    jobs=2,
    failures=1,
)
def crash(chain: Chain) -> None:
    _crash(chain)


@fault(
    "a rank fails by itself",
    r"AssertionError: the optimizer tripped",
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
    r"node1: .*slurm\.ports\.gcs.*; see .*ray-node1\.log",
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


# Time limits. Until the first one, steps are slowed down, so that a fast machine meets it too


LIMIT = {"runtime": 1, "at_once": True}
AT_LIMIT = rf"{STAGE}: unfinished at step .* s are left before the deadline\); to be continued"


def _pass_a_limit(chain: Chain) -> None:
    as_fast_as_it_can = at_each_step(chain, f"time.sleep({60 * chain.runtime / STEPS})")
    chain.start()
    chain.until(lambda: [it for it in read_attempts(chain.run) if it["outcome"] == "unfinished"])
    chain.strike()
    as_fast_as_it_can()


@fault("time limit", AT_LIMIT, r"goes back into the queue", site={"margin": 20}, **LIMIT)
def limit(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault("time limit", AT_LIMIT, r"goes back into the queue", nodes=2, site={"margin": 50}, runtime=2, at_once=True)
def limit_2_nodes(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault(
    "time limit where Slurm never requeues",
    AT_LIMIT,
    jobs=5,
    site={"margin": 20, "requeue": False},
    cluster={"requeue": False},
    **LIMIT,
)
def limit_no_requeue(chain: Chain) -> None:
    _pass_a_limit(chain)


@fault(
    "a step that hangs until Slurm's time limit",
    r"killed with Slurm job \d+ \(TIMEOUT on node\d\); trying again from step \d+",
    jobs=2,
    **LIMIT,
)
def overshoot(chain: Chain) -> None:
    at_each_step(chain, f"time.sleep(1000 * (state.global_step == {MIDDLE} and self.job.resume_from is None))")
    chain.start()
    chain.until_step(MIDDLE)
    chain.strike()


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
