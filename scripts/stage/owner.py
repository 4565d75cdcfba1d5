"""The lock of a training folder: one process at a time may train there, on whatever host.

The owner file appears by linking a finished file to its name: atomic and exclusive on local file systems, NFS and
Lustre, without a lock daemon. On the owner's host the process table says whether the owner lives, for Slurm jobs Slurm
does, elsewhere a heartbeat: a thread touches the file. An owner whose lock was taken over (its host had lost the
network, say) ends when the thread sees it, and the new owner waits as long before it begins.
"""

import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import psutil

from scripts.errors import UserError
from scripts.files import hidden_name, remove_leftovers
from scripts.processes import is_running, pid_namespace, process_start
from scripts.records import read_now
from scripts.slurm.client import has_ended, own_job_id

HEARTBEAT_SECONDS = 20.0
SILENCE_SECONDS = 300.0
FENCE_SECONDS = 5.0
FOLDERS_MADE = 5
"""How often a folder is made again after a discard in the moment before the lock was made."""
DISCARDS = "discards"
"""The purpose of an owner who may remove the folder, and looks for links with the lock in hand."""


class Owner(TypedDict):
    """owner.json, the lock of a training folder."""

    host: str
    pid: int
    since: float
    process_start: NotRequired[int | None]
    boot: NotRequired[str]
    pid_namespace: NotRequired[str]
    slurm_job: NotRequired[str | None]
    token: NotRequired[str]
    purpose: NotRequired[str]


@dataclass(frozen=True)
class Held:
    """A lock in the hands of the process, with the thread of the heartbeat."""

    token: str
    _stop: threading.Event
    _heart: threading.Thread
    has_waited: bool = False

    def is_in(self, owner_file: Path) -> bool:
        """Whether an owner file is the held lock, wherever the folder was moved."""
        return _is_ours(owner_file, self.token)

    def rest(self) -> None:
        """End the heartbeat, before the folder is moved: the thread would miss the lock and end the process."""
        self._stop.set()
        self._heart.join()


@contextmanager
def hold(
    owner_file: Path, timeout: float = 0.0, purpose: str | None = None, makes_folder: bool = True
) -> Iterator[Held]:
    """Hold the lock while the block runs; take over a dead process's.

    A living owner is named, with host and job, and waited for `timeout` seconds; then UserError. `purpose` stands in
    the owner file. FileNotFoundError for a missing folder, unless the lock `makes_folder`.
    """
    announced, token, since = False, secrets.token_hex(8), time.monotonic()
    while not _take(owner_file, token, purpose, makes_folder):
        owner = read_owner(owner_file)
        holder = describe(owner)
        if time.monotonic() - since >= timeout:
            raise UserError(f"{owner_file.parent}: {holder} is at work here; wait for it or stop it, then start again")
        if not announced:
            print(f"{owner_file.parent}: {holder} is at work here; waiting for it to end", flush=True)
            announced = True
        time.sleep(1 if owner is None or owner.get("host") == socket.gethostname() else 5)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(owner_file, token, stop), daemon=True)
    heart.start()
    held = Held(token, stop, heart, has_waited=announced)
    try:
        yield held
    finally:
        held.rest()
        if _is_ours(owner_file, token):
            owner_file.unlink(missing_ok=True)


def _silence(owner_file: Path, only_read: bool = False) -> float:
    """Return the seconds since the owner's last heartbeat; FileNotFoundError without an owner.

    The clock is the file server's, read by a write; this host's with `only_read`.
    """
    clock, beat = hidden_name(owner_file), owner_file.stat().st_mtime
    if only_read:
        return time.time() - beat
    clock.touch()
    now = clock.stat().st_mtime
    clock.unlink(missing_ok=True)
    return now - beat


def read_owner(owner_file: Path) -> dict[str, Any] | None:
    """Return the owner's record, or None."""
    try:
        return read_now(owner_file, Owner)
    except UserError:
        return {}


def describe(owner: dict[str, Any] | None) -> str:
    """Name an owner: process, host, Slurm job, since when."""
    if not owner:
        return "a process that left no name"
    job = f" (Slurm job {owner['slurm_job']})" if owner.get("slurm_job") else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"process {owner['pid']} on {owner['host']}{job}, since {since}"


def is_alive(owner_file: Path, only_read: bool = False) -> bool:
    """Whether the owner's process runs.

    On its host a process of the owner's id and start time runs. On another host, or in a container with process ids of
    its own, the Slurm job has not ended (nor is it this job, requeued) and the heartbeat is younger than five minutes.
    With `only_read` Slurm is not asked and nothing is written. Slurm is not asked about other users' jobs, which it may
    hide (PrivateData).
    """
    owner = read_owner(owner_file)
    if owner is None:
        return False
    if owner.get("host") == socket.gethostname() and owner.get("boot") != _boot():
        return False
    if _is_local(owner):
        return is_running(owner["pid"], owner["process_start"])
    if (job := owner.get("slurm_job")) and job == own_job_id():
        return False
    with suppress(FileNotFoundError):  # the owner has ended meanwhile
        is_asked = job and not only_read and owner_file.stat().st_uid == os.geteuid()
        return not (is_asked and has_ended(job)) and _silence(owner_file, only_read) < SILENCE_SECONDS
    return False


def _take(owner_file: Path, token: str, purpose: str | None = None, makes_folder: bool = True) -> bool:
    guard = owner_file.with_name(f".{owner_file.name}.takeover")
    if _link(owner_file, token, purpose, makes_folder):
        if not is_alive(guard):  # killed while it took over
            guard.unlink(missing_ok=True)
        return True
    if is_alive(owner_file):
        return False
    # Only the process that creates the guard may remove a dead owner's file. A guard older than a minute is a leftover.
    if not _link(guard, token, purpose, makes_folder):
        with suppress(FileNotFoundError):
            if abs(time.time() - guard.stat().st_mtime) > 60:
                guard.unlink(missing_ok=True)
        return False
    displaced, silence = read_owner(owner_file), math.inf
    try:
        if displaced is not None and not is_alive(owner_file):
            with suppress(FileNotFoundError):
                silence = _silence(owner_file)
            if read_owner(owner_file) == displaced:  # a living owner may have ended, and another have come
                owner_file.unlink(missing_ok=True)
        taken = _link(owner_file, token, purpose, makes_folder)
    finally:
        guard.unlink(missing_ok=True)
    if taken and displaced and not _is_local(displaced) and silence < 2 * HEARTBEAT_SECONDS:
        time.sleep(HEARTBEAT_SECONDS + FENCE_SECONDS)
    return taken


def _is_local(owner: dict[str, Any]) -> bool:
    """Whether the owner is in this process's process table."""
    return (owner.get("host"), owner.get("pid_namespace")) == (socket.gethostname(), pid_namespace())


def _link(owner_file: Path, token: str, purpose: str | None, makes_folder: bool) -> bool:
    """Make the owner file, whole, unless there is one; a folder discarded meanwhile is made again."""
    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "boot": _boot(),
        "pid_namespace": pid_namespace(),
        "slurm_job": own_job_id(),
        "since": time.time(),
        "token": token,
    }
    if purpose is not None:
        record["purpose"] = purpose
    for _ in range(FOLDERS_MADE):
        if makes_folder:
            owner_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _link_record(owner_file, record)
        except FileNotFoundError:
            if not makes_folder:
                raise
    return False


def _link_record(owner_file: Path, record: dict[str, Any]) -> bool:
    remove_leftovers(owner_file.parent, owner_file.name)
    mine = hidden_name(owner_file)
    try:
        mine.write_text(json.dumps(record), encoding="utf-8")
        os.link(mine, owner_file)
    except FileExistsError:
        return False
    finally:
        mine.unlink(missing_ok=True)
    return True


def _is_ours(owner_file: Path, token: str) -> bool:
    return (read_owner(owner_file) or {}).get("token") == token


def _beat(owner_file: Path, token: str, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        if not _is_ours(owner_file, token):
            print(f"{owner_file.parent}: {describe(read_owner(owner_file))} took over; ending at once", flush=True)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if process.name() != "tee":  # of the rule: writes down what was just said, and ends with this one
                        process.kill()
            os._exit(1)
        os.utime(owner_file)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
