"""Remove unused trainings; a kill at any moment leaves all or nothing of one, and the next call goes on.

::

    <store>/<identity>/                   held by the lock, with the purpose to discard, while links are looked for
    <store>/.<identity>.<hex>.leaving/    renamed, still whole, until links were looked for once more
    <store>/.<identity>.<hex>.removing/   doomed: the files are being removed

A publisher holds the training's lock, so publishing and discarding never meet. A publisher without the right to write
there links first and looks at the lock then (scripts.stage.stage); discarding takes the lock first and looks for links
then. So the later of the two always sees the earlier. The second look is for a link shown late by a file server, and
for a lock taken over while the process stood still.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from scripts.errors import CutOffError, UserError, user_name
from scripts.files import amount, fsync_directory
from scripts.stage.owner import DISCARDS, Held, describe, hold, is_alive, read_owner
from scripts.stage.paths import STORE
from scripts.stage.training_folder import TrainingFolder
from scripts.stage.uses import Uses, find_uses

AT_ONCE = 50
"""Number of trainings held by their locks during one search for links."""
MOST_TRIES = 3
PAUSE = 0.2
LEAVING, REMOVING = "leaving", "removing"
TRASH = re.compile(rf"\.(?P<name>.+?)(?:\.[0-9a-f]{{16}})?\.(?P<state>{LEAVING}|{REMOVING})")
PLACES = ("*", "*/*", "*/sample-*/*")


@dataclass(frozen=True)
class Discarded:
    """Outcome for a training: bytes freed, or why the training `stays`; `is_trouble`: for no use that is known."""

    folder: Path
    freed: int = 0
    stays: str = ""
    is_trouble: bool = False


def line_of(result: Discarded, is_dry: bool = False) -> str:
    """Describe the outcome for a training; `is_dry`: nothing was removed."""
    freed = f"{amount(result.freed)}{'' if is_dry else ' freed'}"
    if not result.stays:
        return freed
    return f"stays: {result.stays}" + (f"; {freed}" if result.freed else "")


def trainings(root: Path) -> list[Path]:
    """Return the folders of the store."""
    folders = (root / STORE).glob("[!.]*")
    return sorted(path for path in folders if path.is_dir() and not path.is_symlink())


def unlinked(root: Path) -> list[Path]:
    """Return the trainings without a use; none while a place is unreadable."""
    uses = find_uses(root)
    return [folder for folder in trainings(root) if reason_to_stay(folder, uses) is None]


def tree_bytes(folder: Path) -> int:
    """Return the bytes freed by removing a folder; a file with a name elsewhere stays."""
    names: dict[tuple[int, int], int] = {}
    freed = 0
    for inside, _, files in os.walk(folder):
        for name in files:
            with suppress(FileNotFoundError):
                state = os.lstat(os.path.join(inside, name))  # noqa: PTH118 - a hundred thousand times
                inode = (state.st_dev, state.st_ino)
                names[inode] = names.get(inode, 0) + 1
                if names[inode] == state.st_nlink:
                    freed += 512 * state.st_blocks
    return freed


def reason_to_stay(folder: Path, uses: Uses) -> Discarded | None:
    """Return why a training stays: for a use, or a possible use; None without one."""
    if users := uses.of(folder):
        more = f", and {len(users) - 1} more" if len(users) > 1 else ""
        return Discarded(folder, stays=f"{users[0]} leads to it{more}")
    exports = folder / "exports/owner.json"
    if is_alive(exports, only_read=True):
        return Discarded(folder, stays=f"{describe(read_owner(exports))} exports from it")
    if uses.unknown:
        return Discarded(folder, stays=uses.words_of_unknown(), is_trouble=True)
    return None


def reason_not_removable(folder: Path, mounts: Iterable[str]) -> Discarded | None:
    """Return why the files of a training cannot all be removed; None where the caller can remove all."""

    def trouble(stays: str) -> Discarded:
        return Discarded(folder, stays=stays, is_trouble=True)

    if folder.is_symlink():
        return trouble("it is a link; remove the link and what it leads to yourself")
    real = os.path.realpath(folder)
    for mount in mounts:
        if mount == real or mount.startswith(f"{real}{os.sep}"):
            return trouble(f"{mount} is a disk of its own; unmount it first")
    errors: list[OSError] = []
    if refusal := _refusal(folder.parent, {folder.name}):
        return trouble(refusal)
    for inside, folders, files in os.walk(folder, onerror=errors.append):
        if refusal := _refusal(Path(inside), {*folders, *files}):
            return trouble(refusal)
    if errors and not isinstance(errors[0], FileNotFoundError):
        return trouble(f"{errors[0].filename} cannot be read ({errors[0].strerror})")
    return None


def _refusal(folder: Path, names: set[str]) -> str:
    """Say why the caller may not remove named entries of a folder; empty where the caller may."""
    try:
        state = folder.stat()
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            mode = f"{stat.S_IMODE(state.st_mode):04o}"
            return f"{folder} is {user_name(state.st_uid)}'s, of mode {mode}, and you may not remove what is in it"
        if not state.st_mode & stat.S_ISVTX or os.geteuid() in (0, state.st_uid):
            return ""
        for name in sorted(names):
            owner = (folder / name).lstat().st_uid
            if owner != os.geteuid():
                return f"{folder / name} is {user_name(owner)}'s, who alone may remove it from that folder (mode +t)"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})"
    return ""


def discard(folder: Path, root: Path) -> int:
    """Remove a training and return the bytes freed; UserError for a training in use, or not removable."""
    (result,) = discard_all([folder], root)
    if result.stays:
        raise UserError(f"{folder}: stays: {result.stays}")
    return result.freed


def discard_all(folders: list[Path], root: Path) -> Iterator[Discarded]:
    """Remove trainings, and yield the outcome for each."""
    for start in range(0, len(folders), AT_ONCE):
        yield from _discard_some(folders[start : start + AT_ONCE], root)


def _discard_some(folders: list[Path], root: Path) -> Iterator[Discarded]:
    """Hold the trainings, look for links, rename, look again, and remove with no lock held."""
    mounts = [disk.mountpoint for disk in psutil.disk_partitions(all=True)]
    staying: list[Discarded] = []
    doomed: list[tuple[Path, Path]] = []
    with ExitStack() as stack:
        locks = _Locks(stack)
        for folder in folders:
            reason = reason_not_removable(folder, mounts) or locks.take(folder)
            staying += [reason] if reason else []
        uses = find_uses(root)
        leaving: dict[Path, Path] = {}
        for folder, lock in locks.of.items():
            reason = reason_to_stay(folder, uses) or _rename_away(folder, lock, leaving)
            staying += [reason] if reason else []
        uses = find_uses(root) if leaving else uses
        for folder, away in leaving.items():
            reason = _reason_to_come_back(folder, away, locks.of[folder], uses)
            if reason:
                staying.append(reason)
                continue
            gone = away.with_suffix(f".{REMOVING}")
            away.rename(gone)
            doomed.append((folder, gone))
        for parent in {folder.parent for folder in leaving}:
            fsync_directory(parent)
    yield from staying
    for folder, gone in doomed:
        yield _remove(folder, gone)


class _Locks:
    """The locks of trainings, held until the end of a stack; None where a full disk has no room for a lock."""

    def __init__(self, stack: ExitStack) -> None:
        self.of: dict[Path, Held | None] = {}
        self._stack = stack
        self._by_file: dict[Path, Held | None] = {}

    def take(self, folder: Path) -> Discarded | None:
        """Hold a training; return the reason where the lock is not to be had."""
        owner_file = TrainingFolder(folder).owner_file
        if owner_file not in self._by_file:  # of several run directories of a stage there is one
            try:
                held = self._stack.enter_context(hold(owner_file, purpose=DISCARDS, makes_folder=False))
            except UserError:
                return Discarded(folder, stays=f"{describe(read_owner(owner_file))} is at work here")
            except FileNotFoundError:
                return Discarded(folder, stays="it is gone already")
            except OSError as error:
                # On a full disk there is no room for a lock, and to make room is what discard is for.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    return Discarded(folder, stays=f"no lock can be made there ({error.strerror})", is_trouble=True)
                if is_alive(owner_file, only_read=True):
                    return Discarded(folder, stays=f"{describe(read_owner(owner_file))} is at work here")
                held = None
            self._by_file[owner_file] = held
        self.of[folder] = self._by_file[owner_file]
        return None


def _rename_away(folder: Path, lock: Held | None, leaving: dict[Path, Path]) -> Discarded | None:
    """Rename a training to a hidden name in the same folder; return the reason where renaming fails."""
    away = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.{LEAVING}")
    if lock is not None:
        lock.rest()
        if not lock.is_in(TrainingFolder(folder).owner_file):
            return Discarded(folder, stays="its lock was taken over while this process stood still", is_trouble=True)
    try:
        folder.rename(away)
    except OSError as error:
        return Discarded(folder, stays=f"it cannot be renamed ({error.strerror})", is_trouble=True)
    leaving[folder] = away
    return None


def _reason_to_come_back(folder: Path, away: Path, lock: Held | None, uses: Uses) -> Discarded | None:
    """Bring a renamed training back where a use turns up; return the use."""
    training = TrainingFolder(folder)
    owner_file = away / "owner.json" if training.is_in_store else training.owner_file
    reason = reason_to_stay(folder, uses)
    if lock is not None and not lock.is_in(owner_file):
        reason = Discarded(folder, stays="its lock was taken over while this process stood still", is_trouble=True)
    if lock is None and owner_file.exists() and not reason:
        owner = read_owner(owner_file) or {}
        is_at_work = is_alive(owner_file, only_read=True) and owner.get("purpose") != DISCARDS
        reason = Discarded(folder, stays=f"{describe(owner)} is at work here") if is_at_work else None
    if reason is None:
        return None
    place = put_back(away, folder)
    if place == folder:
        return reason
    return Discarded(folder, stays=f"{reason.stays}; as it was begun anew meanwhile, what was there is now {place}")


def put_back(away: Path, folder: Path) -> Path:
    """Give a renamed training the old name, or a free one where a new training has begun; return the place."""
    others = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    place = folder
    while True:
        try:
            away.rename(place)
            fsync_directory(place.parent)
            return place
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            place = next(others)


def _remove(folder: Path, gone: Path) -> Discarded:
    """Remove a doomed folder; a rest that resists is left to the next call."""
    with suppress(OSError):
        (gone / "owner.json").unlink()
    size = tree_bytes(gone)
    for _ in range(MOST_TRIES):  # a process may still write there
        shutil.rmtree(gone, ignore_errors=True)
        if not os.path.lexists(gone):
            return Discarded(folder, freed=size)
        time.sleep(PAUSE)
    left = tree_bytes(gone)
    why = _why_left(gone)
    return Discarded(
        folder,
        freed=max(0, size - left),
        stays=f"a rest of it in {gone} ({why}); the next call goes on",
        is_trouble=True,
    )


def _why_left(gone: Path) -> str:
    errors: list[str] = []

    def note(_: Callable, path: str, error: tuple) -> None:
        errors.append(f"{path}: {getattr(error[1], 'strerror', error[1])}")

    shutil.rmtree(gone, onerror=note)
    return errors[0] if errors else "no reason given"


# --- what a kill left ---


def finish_discards(root: Path, uses: Uses | None = None) -> Iterator[Discarded]:
    """Go on with removals cut off by a kill, and yield the outcome for each.

    A training renamed but not yet doomed comes back where a use is found. A living process goes on by itself.
    """
    for away, folder, state in _trash_of(root):
        if state == REMOVING:
            yield _remove(folder, away)
            continue
        owner_file = away / "owner.json"
        if is_alive(owner_file, only_read=True):
            continue
        uses = uses or find_uses(root)
        reason = reason_to_stay(folder, uses)
        is_discarders = (read_owner(owner_file) or {"purpose": DISCARDS}).get("purpose") == DISCARDS
        gone = away.with_suffix(f".{REMOVING}")
        with suppress(FileNotFoundError):  # another process was first
            if reason or not is_discarders:
                place = put_back(away, folder)
                why = reason.stays if reason else "a process had taken it over"
                yield Discarded(folder, stays=f"brought back as {place}, for {why}")
                continue
            away.rename(gone)
            fsync_directory(gone.parent)
            yield _remove(folder, gone)


def take_back(folder: Path) -> None:
    """Bring back a training renamed by a killed process, for somebody now opens the training."""
    for away, place, state in _trash_in(folder.parent):
        if place != folder or state != LEAVING or folder.exists() or is_alive(away / "owner.json", only_read=True):
            continue
        with suppress(FileNotFoundError, PermissionError):  # another process was first, or may do it
            put_back(away, folder)
            print(f"{folder}: brought back, for a process was killed before it removed it", flush=True)


def _trash_of(root: Path) -> list[tuple[Path, Path, str]]:
    """Return the folders renamed by discarding below the results: present path, old path, progress."""
    stages = {path.parent for place in PLACES for path in root.glob(f"{place}/.run.*")}
    return [found for parent in (root / STORE, *sorted(stages)) for found in _trash_in(parent)]


def _trash_in(parent: Path) -> Iterator[tuple[Path, Path, str]]:
    try:
        names = sorted(os.listdir(parent))  # noqa: PTH208 - names alone are needed
    except OSError:
        return
    for name in names:
        match = TRASH.fullmatch(name)
        if match:
            yield parent / name, parent / match["name"], match["state"]


# --- who links without a lock ---


def await_discards(folder: Path) -> None:
    """Wait for a process that may discard a training, after the caller linked to the training without a lock.

    CutOffError for a training gone by then: the next attempt trains again.
    """
    owner_file = TrainingFolder(folder).owner_file
    while (read_owner(owner_file) or {}).get("purpose") == DISCARDS and is_alive(owner_file, only_read=True):
        time.sleep(PAUSE)
    if not folder.is_dir():
        raise CutOffError(f"{folder}: was discarded just now, for no stage had a link there; start again")
