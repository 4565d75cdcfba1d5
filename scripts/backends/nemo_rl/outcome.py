"""Why a start of NeMo-RL's driver ended, by the logs: the exit status is 0 in half of all failures."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from scripts.files import read_tail

TAIL_BYTES = 1 << 20
SHOWN = 5
COLLECTION_OVER, COLLECTION_FAILED = "Trajectory collection stopped", "Error in trajectory collection"
TRACED = re.compile(r"\s*(\++ |echo )")  # ray.sub runs with `set -x`, which prints the text of its steps' scripts too
TRACEBACK = r"^Traceback \(most recent call last\)"
Kind = Literal["unfinished", "exhausted", "lost", "failed"]


@dataclass(frozen=True)
class Cause:
    """Why a driver ended: unfinished (as asked), exhausted (no data left), lost (worth another attempt) or failed."""

    kind: Kind
    what: str
    log: Path
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the cause with the lines of the log."""
        return "\n  ".join([f"{self.what}; {self.log} says:", *self.lines])


class _Sign(NamedTuple):
    pattern: str
    kind: Kind
    what: str


DRIVER_SIGNS = (
    _Sign(r"Timeout has been reached", "unfinished", "its deadline came; it saved and stopped"),
    _Sign(r"No space left on device", "failed", "the disk is full; make room"),
    _Sign(
        r"Trajectory collector stopped: .*'data_exhausted': True, 'errored': False",
        "exhausted",
        "the data ended before max_num_steps",
    ),
    _Sign(
        r"[Pp]olicy generation refit failed|failed during refit",
        "failed",
        "the generator did not take the policy's weights (refit)",
    ),
    _Sign(r"CUDA out of memory|torch\.OutOfMemoryError|OutOfMemoryError: CUDA", "failed", "a GPU ran out of memory"),
    _Sign(
        r"GatedRepoError|401 Client Error|Repository Not Found", "failed", "the hub refused a model; is HF_TOKEN set?"
    ),
    _Sign(r"OverridesError|ConfigAttributeError|ConfigKeyError", "failed", "its config refused an override"),
    _Sign(r"AssertionError", "failed", "one of its own checks failed"),
    _Sign(r"NCCL (error|timeout)|Watchdog caught collective operation timeout", "lost", "NCCL failed between nodes"),
    _Sign(r"died because of an error raised in its creation task", "failed", "an actor failed when it was made"),
    _Sign(
        r"ActorDiedError|NodeDiedError|node.* (died|was terminated)|raylet .*died", "lost", "Ray lost a node or actor"
    ),
    _Sign(r"[Ee]rror in async loop|in async loop:", "failed", "an exception ended its asynchronous loop"),
    _Sign(TRACEBACK, "failed", "an exception ended it"),
)
SETUP_SIGNS = (_Sign(r"^error: ", "lost", "a node could not be set up"),)
CLUSTER_SIGNS = (
    _Sign(r"Timed out waiting for all workers", "lost", "not every node joined Ray"),
    _Sign(
        r"Timed out waiting for sandbox|Sandbox .* (died|not ready)",
        "lost",
        "the sandbox did not come up on every node",
    ),
    _Sign(r"Background srun '?[\w-]+'? .*(died|exited)", "lost", "a job step ended before the driver"),
    _Sign(
        r"(?i)no such (file|image)|pyxis: (?!.*completed).*(error|fail|couldn't)|enroot.*(ERROR|failed)",
        "failed",
        "a container did not start",
    ),
    _Sign(
        r"GRES detected is|unbound variable|shared_fs_canary not visible", "failed", "ray.sub refused its environment"
    ),
    _Sign(r"srun: error: .*(Node failure|node_fail)|CANCELLED.*DUE TO NODE FAILURE", "lost", "a node failed"),
)


def cause_of(driver_log: Path | None, cluster_log: Path, directory: Path) -> Cause | None:
    """Return the first sign in the driver's log, else in ray.sub's; None without a sign.

    `directory` has the logs of the cluster's steps, and ``ENDED`` after a failed step, with the reason where the setup
    of a node failed.
    """
    ended = directory / "ENDED"
    for log, signs in ((driver_log, DRIVER_SIGNS), (ended, SETUP_SIGNS), (cluster_log, CLUSTER_SIGNS)):
        lines = read_tail(log, TAIL_BYTES) if log is not None else []
        if log == cluster_log:
            lines = [line for line in lines if not TRACED.match(line)]
        for sign in signs:
            found = [number for number, line in enumerate(lines) if re.search(sign.pattern, line)]
            if found:
                start = max(0, len(lines) - SHOWN if sign.pattern == TRACEBACK else found[-1] - 1)
                return Cause(sign.kind, sign.what, log, tuple(lines[start : start + SHOWN]))
    if ended.exists():
        log = _shortest_lived(directory) or cluster_log
        return Cause("lost", "a node's step ended before the driver", log, tuple(read_tail(log, TAIL_BYTES)[-SHOWN:]))
    return None


def data_ended(driver_log: Path) -> bool:
    """Return whether the thread of rollouts came to the end of the data, by the driver's whole log."""
    with driver_log.open(encoding="utf-8", errors="replace") as lines:
        found = {words for line in lines for words in (COLLECTION_FAILED, COLLECTION_OVER) if words in line}
    return found == {COLLECTION_OVER}


def _shortest_lived(directory: Path) -> Path | None:
    """Return the log of the step that ended first: the sandbox's or a worker's."""
    logs = [*directory.glob("sandbox/*.log"), *directory.glob("sandbox.log"), *directory.glob("ray-worker-*.log")]
    return min((log for log in logs if log.stat().st_size), key=lambda log: log.stat().st_mtime, default=None)
