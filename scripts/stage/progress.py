"""Read a training folder's logged steps (``metrics.jsonl``), and note the reach of each checkpoint (``reach.json``).

NeMo-RL's asynchronous training loses rows at every resume, so its data can end before the planned step; Snakemake, plan
and status read the note, and need not open checkpoints.
"""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Required, TypedDict

from scripts.files import read_tail, write_json
from scripts.records import Count, Reach, Reaches, parse_lines, read_if_there, read_lines

RECENT_STEPS = 50
REACH = "reach.json"


class Step(TypedDict, total=False):
    """Describe a line of metrics.jsonl."""

    step: Required[Count]
    seconds: float | None
    tokens: float | None
    reward_mean: float | None
    response_length_mean: float | None
    loss: float | None
    kl: float | None
    environment_rewards: dict[str, float | None] | None
    own_metrics: dict[str, float | None] | None
    timing: dict[str, float | None] | None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return all logged steps in order; for a step logged again after a resume the later line."""
    steps = {entry["step"]: entry for entry in read_lines(path, Step)}
    return [steps[step] for step in sorted(steps)]


def recent_steps(run: Path) -> list[dict[str, Any]]:
    """Return the last logged steps, in the order logged, whatever the log's size."""
    return list(parse_lines(read_tail(run / "metrics.jsonl")[-RECENT_STEPS:], Step))


def step_seconds(entries: Iterable[dict[str, Any]]) -> float | None:
    """Return the median seconds of logged steps; None without steps."""
    seconds = [entry["seconds"] for entry in entries if entry.get("seconds") is not None]
    return median(seconds) if seconds else None


def noted_reach(run: Path, start: int) -> Reach | None:
    """Return the noted reach of an attempt from step `start` (0: from none), or None."""
    noted = _noted(run).get(str(start))
    return Reach(**noted) if noted else None


def note_reach(run: Path, start: int, reach: Reach) -> None:
    """Note the reach of an attempt from step `start`."""
    write_json(run / REACH, _noted(run) | {str(start): asdict(reach)})


def forget_beyond(run: Path, start: int) -> None:
    """Forget the reach of checkpoints after step `start`, which are trained again."""
    if noted := _noted(run):
        write_json(run / REACH, {step: reach for step, reach in noted.items() if int(step) <= start})


def last_step(run: Path, start: int, planned: int) -> int:
    """Return the last step of a stage with newest step `start`: the end of its data, at most the planned step."""
    reach = noted_reach(run, start)
    return min(planned, reach.step) if reach and reach.is_end else planned


def _noted(run: Path) -> dict[str, dict[str, Any]]:
    return read_if_there(run / REACH, Reaches) or {}
