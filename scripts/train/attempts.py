"""What each attempt at a stage came to, one line each in the run directory."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from scripts.errors import UserError


def begin_attempt(run: Path, step: int) -> None:
    """Note that an attempt begins at a step; without an end line it was killed."""
    _append(
        run, {"event": "begin", "step": step, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    )


def end_attempt(run: Path, step: int, outcome: str) -> None:
    """Note how the attempt ended: finished, unfinished or failed, and at which step its newest checkpoint is."""
    _append(run, {"event": "end", "step": step, "outcome": outcome, "time": time.time()})


def read_attempts(run: Path) -> list[dict[str, Any]]:
    """Each attempt with its first step and outcome (killed when it has no end), oldest first."""
    attempts: list[dict[str, Any]] = []
    path = run / "attempts.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["event"] == "begin":
            attempts.append({"from": entry["step"], "outcome": "killed", "host": entry["host"], "time": entry["time"]})
        elif attempts:
            attempts[-1] |= {"to": entry["step"], "outcome": entry["outcome"]}
    return attempts


def refuse_a_third_vain_attempt(run: Path, number: int, step: int, log: str) -> None:
    """UserError when this is a retry and the two attempts before it, of the same call, both began at this step.

    `number` counts the attempts of one call of the workflow from 1, `step` is the newest checkpoint's.
    """
    before = read_attempts(run)[-(number - 1) :] if number > 1 else []
    vain = [attempt for attempt in before[-2:] if attempt["from"] == step]
    if len(vain) == 2:
        outcomes = " and ".join(attempt["outcome"] for attempt in vain)
        raise UserError(
            f"{run}: two attempts in a row ({outcomes}) made no new step beyond {step}; not trying again: see {log}"
        )


def _append(run: Path, entry: dict[str, Any]) -> None:
    path = run / "attempts.jsonl"
    cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut else "") + json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
