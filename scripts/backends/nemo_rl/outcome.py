"""Why a start of NeMo-RL's driver ended, by the logs: the exit status is 0 in half of all failures."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from scripts.files import read_tail

TAIL_BYTES = 1 << 20
SHOWN = 5
COLLECTION_OVER, COLLECTION_FAILED = "Trajectory collection stopped", "Error in trajectory collection"
TRACED = re.compile(r"\s*(\++ |echo )")  # ray.sub runs with `set -x`, which prints the text of its steps' scripts too
TRACEBACK = r"^Traceback \(most recent call last\)"
ENDED = re.compile(r"(?:\[FATAL\] |-judge_)(\w+)(?: load balancer| replica (\d+)|-(\d+)\])")
READY = re.compile(r"\[INFO\] (\w+) ready: (\d+)/(\d+)$")
STEP_LOGS = ("sandbox/*.log", "sandbox.log", "ray-head.log", "ray-worker-*.log", "external_judge_*/[!v]*.log")
SIGNS = yaml.safe_load(Path(__file__).with_name("outcome.yaml").read_text(encoding="utf-8"))
HOPELESS = re.compile("|".join(sign["pattern"] for sign in SIGNS["driver"] if sign.get("at_once")))


@dataclass(frozen=True)
class Cause:
    """Why a driver ended: unfinished (as asked), exhausted (no data left), lost (worth another attempt) or failed.

    `spoils`: the imported model must not be trained.
    """

    kind: Literal["unfinished", "exhausted", "lost", "failed"]
    what: str
    log: Path
    lines: tuple[str, ...] = ()
    spoils: bool = False

    def __str__(self) -> str:
        """Return the cause with the lines of the log."""
        return "\n  ".join([f"{self.what}; {self.log} says:", *self.lines])


def cause_of(driver_log: Path | None, cluster_log: Path, directory: Path) -> Cause | None:
    """Return the first sign in the driver's log, else in ray.sub's; None without a sign.

    A container that did not start counts first, then a judge that ended, of which the driver may fail. `directory` has
    the logs of the cluster's steps, and ``ENDED`` after a failed step, with the reason of a node whose setup failed.
    """
    ended = directory / "ENDED"
    if refusal := refused_container(directory) or lost_judge(cluster_log, directory):
        return refusal
    for log, source in ((driver_log, "driver"), (ended, "setup"), (cluster_log, "cluster")):
        lines = read_tail(log, TAIL_BYTES) if log is not None else []
        if log == cluster_log:
            lines = [line for line in lines if not TRACED.match(line)]
        for sign in SIGNS[source]:
            if found := [number for number, line in enumerate(lines) if re.search(sign["pattern"], line)]:
                start = max(0, len(lines) - SHOWN if sign["pattern"] == TRACEBACK else found[-1] - 1)
                shown = tuple(lines[start : start + SHOWN])
                return Cause(sign["kind"], sign["what"], log, shown, sign.get("spoils", False))
    if ended.exists():
        steps = (log for log in step_logs(directory) if log.stat().st_size)
        log = min(steps, key=lambda log: log.stat().st_mtime, default=cluster_log)
        return Cause("lost", "a node's step ended before the driver", log, tuple(read_tail(log, TAIL_BYTES)[-SHOWN:]))
    return None


def refused_container(directory: Path) -> Cause | None:
    """Return why a job step's container did not start, in pyxis' and enroot's words; None without a sign."""
    for log in step_logs(directory):
        lines = [line for line in read_tail(log) if "pyxis: " in line]
        for sign in SIGNS["container"]:
            if found := [line for line in lines if re.search(sign["pattern"], line)]:
                return Cause(sign["kind"], sign["what"], log, tuple(found[-SHOWN:]))
    return None


def lost_judge(cluster_log: Path, directory: Path) -> Cause | None:
    """Return why a pool of judges ended or never answered, by run_in_allocation.sh and its replicas."""
    lines = read_tail(cluster_log, TAIL_BYTES)
    said = [line for log in sorted(directory.glob("external_judge_*/replica_*.log")) for line in read_tail(log)]
    for sign in SIGNS["judges"]:
        if found := [line for line in [*lines, *said] if re.search(sign["pattern"], line)]:
            known = _known_of_pools(found, lines, directory)
            return Cause(sign["kind"], sign["what"], cluster_log, (*found[-SHOWN:], *known))
    return None


def _known_of_pools(found: list[str], lines: list[str], directory: Path) -> Iterator[str]:
    """Yield nodes and last words of what ended by the lines `found`; without names, the pools that are not up."""
    named = {(match[1], match[2] or match[3]): None for line in found for match in ENDED.finditer(line)}
    for name, replica in named:
        yield from (line for line in lines if line.startswith(f"[INFO] {name} replica {replica}: "))
        log = directory / f"external_judge_{name}" / (f"vllm_{replica}.log" if replica else "load_balancer.log")
        yield f"{log}: {(read_tail(log) or ['is empty'])[-1]}"
    ready = {match[1]: match for line in lines if (match := READY.match(line))}
    for match in () if named else ready.values():
        if match[2] != match[3]:
            yield f"{match[0]}; see {directory / f'external_judge_{match[1]}'}"


def step_logs(directory: Path) -> Iterator[Path]:
    """Yield the logs of the cluster's job steps."""
    return (log for name in STEP_LOGS for log in directory.glob(name))


def data_ended(driver_log: Path) -> bool:
    """Return whether the thread of rollouts came to the end of the data, by the driver's whole log."""
    with driver_log.open(encoding="utf-8", errors="replace") as lines:
        found = {words for line in lines for words in (COLLECTION_FAILED, COLLECTION_OVER) if words in line}
    return found == {COLLECTION_OVER}
