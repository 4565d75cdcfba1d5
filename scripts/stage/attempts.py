"""Attempts at a training, of which ``attempts.jsonl`` has a line as each begins and ends."""

from collections.abc import Iterable
from typing import Any, Literal, Required, TypedDict

from scripts.records import Code, Count, Image


class Attempt(TypedDict, total=False):
    """A line of attempts.jsonl."""

    event: Required[Literal["begin", "end"]]
    step: Required[Count]
    time: Required[float]
    outcome: str
    call: int
    host: str
    slurm_job: str | None
    nodes: Count
    gpus: Count
    code: Code | None
    image: Image | None
    gym_verdicts: Count
    hosts: list[str]
    sniff: dict[str, Any]
    blamed: list[str]
    step_seconds: float | None


def attempts_from(lines: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return the attempts that lines of attempts.jsonl describe, oldest first; one without an end was killed.

    `from` is the first step, `to` the last, `time` the beginning and `ended` the end (None: killed), in seconds since
    the epoch. What a line does not tell is None.
    """
    attempts: list[dict[str, Any]] = []
    for entry in lines:
        if entry["event"] == "begin":
            begun = {"from": entry["step"], "outcome": "killed", "ended": None}
            attempts.append({**dict.fromkeys(Attempt.__annotations__), **entry, **begun})
        elif attempts:
            told = {key: entry[key] for key in ("outcome", "blamed", "step_seconds") if key in entry}
            attempts[-1] |= told | {"to": entry["step"], "ended": entry["time"]}
    return attempts


def carried(lines: Iterable[Attempt], step: int) -> list[dict[str, Any]]:
    """Return the lines of another training's attempts up to a step, at which the last that has an end ends as amended.

    Nodes are left out: `left_out` knows them from the other folder.
    """
    taken: list[dict[str, Any]] = []
    is_before = False
    for entry in lines:
        if entry["event"] == "begin":
            is_before = entry["step"] < step
        if is_before:
            without_nodes = {key: value for key, value in entry.items() if key not in ("hosts", "sniff", "blamed")}
            taken.append(without_nodes | {"step": min(entry["step"], step)})
    if taken and taken[-1]["event"] == "end":
        taken.append({"event": "end", "step": step, "outcome": "amended", "time": taken[-1]["time"]})
    return taken
