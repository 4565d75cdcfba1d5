"""Remove Snakemake's lock on the working directory after the death of its Snakemake.

A killed Snakemake leaves its lock behind, and later calls then ask for ``--unlock``, because the lock names no holder.
So each call leaves a note of itself and its locks; a dead call's locks are removed, and locks that no call noted once
every noted process of this host has ended. A training that outlived its Snakemake does not keep the lock: its store
has an owner (scripts.stage.owner), for whose end the next attempt waits.
"""

import json
import os
import socket
from collections.abc import Iterable
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
    removed = [lock for lock in locks if lock.name in {name for names in dead.values() for name in names}]
    lines = []
    if dead and not alive and not elsewhere:
        removed = locks
    elif elsewhere and not alive and locks != removed:
        lines = [f"locked, perhaps by {', '.join(elsewhere)}; if that is dead: snakemake --unlock"]
    if removed:
        lines = ["removed the lock of a Snakemake that was killed", *lines]
    for path in [*removed, *dead]:
        path.unlink(missing_ok=True)
    _note(directory, [])
    return lines


def keep_locks_of_others() -> None:
    """Let Snakemake note its locks, remove these alone, and read again where another call's lock goes meanwhile.

    Two calls for different runs hold locks in one folder, which Snakemake removes at the end of the first.
    """
    read, write = FilePersistence._read_locks, FilePersistence._write_locks
    remove_all = FilePersistence._delete_locks

    def read_locks(self: FilePersistence) -> list[tuple[str, str]]:
        while Path(self._lockdir).is_dir():
            with suppress(FileNotFoundError):
                return list(read(self))
        return []

    def write_locks(self: FilePersistence, lock_type: str, keys: Iterable[str]) -> None:
        write(self, lock_type, keys)
        _note(Path(self._lockdir).parent, [Path(lock).name for lock in self._lockfile.values()])

    def delete_locks(self: FilePersistence) -> None:
        if not self._lockfile:  # of snakemake --unlock
            remove_all(self)
            return
        _note(Path(self._lockdir).parent, [])
        for lock in self._lockfile.values():
            Path(lock).unlink(missing_ok=True)
        self._lockfile.clear()

    FilePersistence._read_locks, FilePersistence._write_locks = read_locks, write_locks
    FilePersistence._delete_locks = delete_locks


def holders(directory: Path) -> list[str]:
    """Name the other processes that may hold the lock below a ``.snakemake`` directory."""
    alive, elsewhere, _ = _holders(directory / "stagecoach")
    return [*(f"process {pid}" for pid in alive if pid != os.getpid()), *elsewhere]


def _note(directory: Path, locks: list[str]) -> None:
    host, pid = socket.gethostname(), os.getpid()
    mine = [host, pid, process_start(pid), *locks]
    (directory / "stagecoach" / f"{host}.{pid}.json").write_text(json.dumps(mine), encoding="utf-8")


def _holders(notes: Path) -> tuple[list[int], list[str], dict[Path, list[str]]]:
    """Sort the noted calls: alive on this host, on other hosts, and by the notes of dead calls their locks' names."""
    alive, elsewhere, dead = [], [], {}
    for note in notes.glob("*.json"):
        try:
            host, pid, start, *locks = json.loads(note.read_text(encoding="utf-8"))
        except (ValueError, FileNotFoundError):
            continue
        if host != socket.gethostname():
            elsewhere.append(f"process {pid} on {host}")
        elif is_running(pid, start):
            alive.append(pid)
        else:
            dead[note] = locks
    return alive, elsewhere, dead
