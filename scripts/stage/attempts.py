"""Attempts at a training: a line as each begins and ends, in ``attempts.jsonl`` of its folder."""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from scripts.files import append_json, write_text
from scripts.records import Code, Count, Image, read_lines
from scripts.slurm.client import own_job_id
from scripts.stage.paths import STORE
from scripts.stage.progress import recent_steps, step_seconds

DAY = 86_400.0
FAILURES = 2


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


def begin_attempt(run: Path, step: int, call: int = 0, nodes: int = 1, gpus: int = 0, **more: Any) -> None:
    """Note that an attempt begins at a step; without an end line it was killed.

    `call` numbers the call of Snakemake, `gpus` counts the GPUs of all nodes; `more` are `code` and `image` as
    scripts.stage.provenance tells, the `gym_verdicts` of a stage that Gym's servers reward, a Slurm job's nodes as
    `hosts`, and `sniff` as scripts.slurm.nodes found them.
    """
    here = {"host": socket.gethostname(), "slurm_job": own_job_id()}
    _append(run, "begin", step, call=call, nodes=nodes, gpus=gpus, **more, **here)


def end_attempt(run: Path, step: int, outcome: str, blamed: Sequence[str] = ()) -> None:
    """Note an attempt's outcome, the step of its newest checkpoint, its median seconds of a step, and `blamed` nodes.

    `outcome`: finished, unfinished (stopped on request), exhausted (its data ended; the next attempt aims no further),
    lost (a node), stalled (no new step for too long), sick (a node, before the first step), failed, or waited (trained
    nothing, for another job does). Attempts carried over to an amended training end as amended.
    """
    begun, logged = read_attempts(run)[-1], recent_steps(run)
    is_own = logged and (run / "metrics.jsonl").stat().st_mtime > begun["time"] - 1  # file systems count more coarsely
    own = {it["step"]: it for it in logged if is_own and begun["from"] < it["step"] <= logged[-1]["step"]}
    _append(run, "end", step, outcome=outcome, blamed=[*blamed], step_seconds=step_seconds(own.values()))


def read_attempts(run: Path) -> list[dict[str, Any]]:
    """Return the attempts with first step and outcome (killed without an end), oldest first.

    `time` is the beginning and `ended` the end (None: killed), in seconds since the epoch.
    """
    attempts: list[dict[str, Any]] = []
    for entry in read_lines(run / "attempts.jsonl", Attempt):
        if entry["event"] == "begin":
            begun = {"from": entry["step"], "outcome": "killed", "ended": None}
            attempts.append({**dict.fromkeys(Attempt.__annotations__), **entry, **begun})
        elif attempts:
            told = {key: entry[key] for key in ("outcome", "blamed", "step_seconds") if key in entry}
            attempts[-1] |= told | {"to": entry["step"], "ended": entry["time"]}
    return attempts


def attempts_in(run: Path, step: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the attempts whose steps the checkpoint of a step contains, newest first, with the last of their steps."""
    for attempt in reversed(read_attempts(run)):
        if attempt["outcome"] != "waited" and attempt["from"] < step:
            yield attempt, step
            step = attempt["from"]


def attempts_of(run: Path, call: int) -> list[dict[str, Any]]:
    """Return the attempts of one call of Snakemake, oldest first."""
    return [attempt for attempt in read_attempts(run) if attempt["call"] == call]


def without_progress(run: Path, call: int, step: int) -> str | None:
    """Say how a call's last two attempts ended, if both began at the newest checkpoint's step; else None.

    An attempt that found where its data end does not count: the next one aims at an earlier step. Nor does `call` 0, a
    person's own, nor an attempt that a sick node ended.
    """
    last = [attempt for attempt in attempts_of(run, call) if attempt["outcome"] not in ("waited", "sick")][-2:]
    if call and len(last) == 2 and all(it["from"] == step and it["outcome"] != "exhausted" for it in last):
        return f"two attempts in a row ({last[0]['outcome']} and {last[1]['outcome']}) made no new step beyond {step}"
    return None


def carry_attempts(source: Path, run: Path, step: int) -> None:
    """Give a folder the attempts of another training up to a step, at which the last that has an end ends as amended.

    Nodes are left out: `left_out` knows them from the other folder.
    """
    carried: list[dict[str, Any]] = []
    is_before = False
    for entry in read_lines(source / "attempts.jsonl", Attempt):
        if entry["event"] == "begin":
            is_before = entry["step"] < step
        if is_before:
            without_nodes = {key: value for key, value in entry.items() if key not in ("hosts", "sniff", "blamed")}
            carried.append(without_nodes | {"step": min(entry["step"], step)})
    if carried and carried[-1]["event"] == "end":
        carried.append({"event": "end", "step": step, "outcome": "amended", "time": carried[-1]["time"]})
    write_text(run / "attempts.jsonl", "".join(f"{json.dumps(entry)}\n" for entry in carried))


def left_out(root: Path) -> dict[str, str]:
    """Return nodes to leave out, with reasons; `root` holds the results of all runs.

    A node is left out for a day after it was found sick or slow, and after two attempts that were lost or stood still,
    without a good attempt since. The nodes named by an attempt's message have failed, else all of them; of those, none
    is left out that nothing tells from the rest.
    """
    since, found, failed, suspects = time.time() - DAY, {}, Counter(), []
    files = [path for path in (root / STORE).glob("[!.]*/attempts.jsonl") if path.stat().st_mtime >= since]
    attempts = [attempt for path in files for attempt in read_attempts(path.parent) if attempt["time"] >= since]
    for attempt in sorted(attempts, key=lambda attempt: attempt["time"]):
        hosts, at = {*(attempt["hosts"] or ())}, time.strftime("%m-%d %H:%M", time.localtime(attempt["time"]))
        for kind in ("slow", "sick"):
            nodes = (attempt["sniff"] or {}).get(kind, {})
            found |= {node: f"{kind} on {at}: {why}" for node, why in nodes.items()}
        if attempt["outcome"] in ("lost", "stalled"):
            failed.update(blamed := {*attempt["blamed"]} or hosts)
            suspects.append(blamed if len(blamed) > 1 else set())
        elif attempt["outcome"] in ("finished", "unfinished", "exhausted"):
            failed = Counter({node: times for node, times in failed.items() if node not in hosts})
    often = {node for node, times in failed.items() if times >= FAILURES}
    often -= set().union(*(nodes for nodes in suspects if nodes <= often))
    return {node: f"failed {failed[node]} attempts" for node in sorted(often)} | found


def _append(run: Path, event: str, step: int, **told: Any) -> None:
    append_json(run / "attempts.jsonl", {"event": event, "step": step, **told, "time": time.time()})
