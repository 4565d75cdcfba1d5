"""Snakemake's lock on the working directory, where the Snakemake that took it is known to be dead.

Snakemake leaves its lock behind when it is killed and then asks every later call for ``--unlock``, because its lock
does not say who took it. So each call leaves a note of itself beside the lock; when every note is of a process of this
host that has ended, the lock is nobody's and is removed. A training that outlived its Snakemake is no reason to keep
it: the run directory has an owner of its own (scripts.stage.owner), and the next attempt waits for it.
"""

import json
import os
import socket
from pathlib import Path

from scripts.processes import is_running, process_start


def remove_dead_lock(directory: Path) -> list[str]:
    """Remove the lock below a ``.snakemake`` directory if all that may have taken it are dead, and leave our own note.

    Returns the lines to tell the user: what was removed, or who on another host may hold the lock.
    """
    notes = directory / "stagecoach"
    notes.mkdir(parents=True, exist_ok=True)
    alive, elsewhere, dead = _holders(notes)
    locks = list((directory / "locks").glob("*.lock"))
    lines = []
    if locks and elsewhere and not alive:
        lines = [f"locked, perhaps by {', '.join(elsewhere)}; if that is dead: snakemake --unlock"]
    elif locks and dead and not alive:
        lines = ["removed the lock of a Snakemake that was killed"]
        dead = [*locks, *dead]
    for path in dead:
        path.unlink(missing_ok=True)
    mine = [socket.gethostname(), os.getpid(), process_start(os.getpid())]
    (notes / f"{socket.gethostname()}.{os.getpid()}.json").write_text(json.dumps(mine), encoding="utf-8")
    return lines


def holders(directory: Path) -> list[str]:
    """The other processes that may hold the lock below a ``.snakemake`` directory, in words."""
    alive, elsewhere, _ = _holders(directory / "stagecoach")
    return [*(f"process {pid}" for pid in alive if pid != os.getpid()), *elsewhere]


def _holders(notes: Path) -> tuple[list[int], list[str], list[Path]]:
    """Of the calls that left a note: those alive on this host, those of other hosts, and the notes of dead ones."""
    alive, elsewhere, dead = [], [], []
    for note in notes.glob("*.json"):
        try:
            host, pid, start = json.loads(note.read_text(encoding="utf-8"))
        except (ValueError, FileNotFoundError):
            continue
        if host != socket.gethostname():
            elsewhere.append(f"process {pid} on {host}")
        elif is_running(pid, start):
            alive.append(pid)
        else:
            dead.append(note)
    return alive, elsewhere, dead
