"""What each attempt at a stage came to, one line each in the run directory."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from scripts.errors import UserError
from scripts.records import Code, Count, Image, read_lines
from scripts.slurm.client import own_job_id


class Attempt(TypedDict):
    """A line of attempts.jsonl."""

    event: Literal["begin", "end"]
    step: Count
    time: float
    outcome: NotRequired[str]
    call: NotRequired[int]
    host: NotRequired[str]
    slurm_job: NotRequired[str | None]
    nodes: NotRequired[Count]
    gpus: NotRequired[Count]
    code: NotRequired[Code | None]
    image: NotRequired[Image | None]


def begin_attempt(
    run: Path,
    step: int,
    call: int = 0,
    nodes: int = 1,
    gpus: int = 0,
    code: dict[str, Any] | None = None,
    image: dict[str, Any] | None = None,
) -> None:
    """Note that an attempt begins at a step; without an end line it was killed.

    `call`: which call it belongs to; `gpus`: those of all nodes together; `code` and `image`: what trains, as
    scripts.stage.provenance tells.
    """
    place = {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": own_job_id(), "nodes": nodes, "gpus": gpus}
    what = {"code": code, "image": image}
    _append(run, [{"event": "begin", "step": step, "call": call, **place, **what, "time": time.time()}])


def end_attempt(run: Path, step: int, outcome: str) -> None:
    """Note how the attempt ended and at which step its newest checkpoint is.

    `outcome`: finished, unfinished (stopped on request), exhausted (its data ended; the next one aims no further),
    lost (a node), failed, or waited (for another job, training nothing).
    """
    _append(run, [{"event": "end", "step": step, "outcome": outcome, "time": time.time()}])


def read_attempts(run: Path) -> list[dict[str, Any]]:
    """Each attempt with its first step and outcome (killed when it has no end), oldest first.

    `time` is when it began and `ended` when it ended (None: killed), in seconds since the epoch.
    """
    attempts: list[dict[str, Any]] = []
    for entry in read_lines(run / "attempts.jsonl", Attempt):
        if entry["event"] == "begin":
            kept = ("host", "time", "call", "slurm_job", "nodes", "gpus", "code", "image")
            begun = {"from": entry["step"], "outcome": "killed", "ended": None}
            attempts.append(begun | {key: entry.get(key) for key in kept})
        elif attempts:
            attempts[-1] |= {"to": entry["step"], "outcome": entry.get("outcome", "killed"), "ended": entry["time"]}
    return attempts


def attempts_in(run: Path, step: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The attempts whose steps are in the checkpoint of this step, newest first, each with the last of its steps.

    An attempt's steps count up to where a later attempt went on.
    """
    for attempt in reversed(read_attempts(run)):
        if attempt["outcome"] != "waited" and attempt["from"] < step:
            yield attempt, step
            step = attempt["from"]


def attempts_of(run: Path, call: int) -> list[dict[str, Any]]:
    """The attempts that belong to one call of Snakemake, oldest first."""
    return [attempt for attempt in read_attempts(run) if attempt["call"] == call]


def without_progress(run: Path, call: int, step: int) -> str | None:
    """How the last two attempts ended when both belong to this call and began at this step; None: another may.

    Another may after one that found where its data end: the next one aims at an earlier step.
    `call` 0 is a person's own, who may try as often as she likes; `step` is the newest checkpoint's.
    """
    last = [attempt for attempt in attempts_of(run, call) if attempt["outcome"] != "waited"][-2:]
    if (
        call
        and len(last) == 2
        and all(attempt["from"] == step and attempt["outcome"] != "exhausted" for attempt in last)
    ):
        return f"two attempts in a row ({last[0]['outcome']} and {last[1]['outcome']}) made no new step beyond {step}"
    return None


def refuse_without_progress(run: Path, call: int, step: int, log: str) -> None:
    """UserError when the two attempts of this call before made no new step."""
    if stuck := without_progress(run, call, step):
        raise UserError(f"{run}: {stuck}; not trying again: see {log}")


def _append(run: Path, entries: list[dict[str, Any]]) -> None:
    path = run / "attempts.jsonl"
    cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + "".join(json.dumps(entry) + "\n" for entry in entries))
        file.flush()
        os.fsync(file.fileno())
