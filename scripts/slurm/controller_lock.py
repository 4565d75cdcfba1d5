"""Remove Snakemake's lock on the working directory after the death of its Snakemake.

A killed Snakemake leaves its lock behind, and later calls then ask for ``--unlock``, because the lock names no holder.
So each call leaves a note beside the lock; once every noted process of this host has ended, the lock is removed. A
training that outlived its Snakemake does not keep the lock: its store has an owner (scripts.stage.owner), for whose
end the next attempt waits.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from snakemake.persistence.file import FilePersistence

from scripts.processes import is_running, process_start


def remove_dead_lock(directory: Path) -> list[str]:
    """Remove the lock below a ``.snakemake`` directory if all possible holders are dead, and leave a note of this call.

    Returns lines for the user: the removal, or the possible holder on another host.
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


def keep_locks_of_others() -> None:
    """Let Snakemake remove its own locks alone, and read again where another call's lock goes meanwhile.

    Two calls for different runs hold locks in one folder, which Snakemake removes at the end of the first.
    """
    read, remove_all = FilePersistence._read_locks, FilePersistence._delete_locks

    def read_locks(self: FilePersistence) -> list[tuple[str, str]]:
        while Path(self._lockdir).is_dir():
            with suppress(FileNotFoundError):
                return list(read(self))
        return []

    def delete_locks(self: FilePersistence) -> None:
        if not self._lockfile:  # of snakemake --unlock
            remove_all(self)
        for lock in self._lockfile.values():
            Path(lock).unlink(missing_ok=True)
        self._lockfile.clear()

    FilePersistence._read_locks, FilePersistence._delete_locks = read_locks, delete_locks


def holders(directory: Path) -> list[str]:
    """Name the other processes that may hold the lock below a ``.snakemake`` directory."""
    alive, elsewhere, _ = _holders(directory / "stagecoach")
    return [*(f"process {pid}" for pid in alive if pid != os.getpid()), *elsewhere]


def _holders(notes: Path) -> tuple[list[int], list[str], list[Path]]:
    """Sort the noted calls: alive on this host, on other hosts, and the notes of dead calls."""
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
