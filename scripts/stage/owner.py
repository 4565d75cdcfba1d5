"""Who holds a stage: one process at a time may train in its run directory, on whatever host.

The owner file lies beside the run directory, because that is renamed when it is set aside. It is made by linking a
finished file to its name, which is atomic and exclusive on local file systems, NFS and Lustre alike, and needs no lock
daemon. A thread touches it while the owner lives; on the owner's own host the process table tells for certain, and of
another Slurm job Slurm does. An owner whose file was taken over all the same (its host lost the network, say) ends at
once when its thread sees that, and who took over waits that long before it begins.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from scripts.errors import UserError
from scripts.launch.slurm import has_ended, own_job_id

HEARTBEAT_SECONDS = 20.0
SILENCE_SECONDS = 300.0
FENCE_SECONDS = 5.0


@contextmanager
def hold(owner_file: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold what an owner file stands for while the block runs.

    Another living process that holds it is named, with its host and job, and waited for `patience` seconds; UserError
    after that. What a dead process left is taken over.
    """
    owner_file.parent.mkdir(parents=True, exist_ok=True)
    told, token, since = False, secrets.token_hex(8), time.monotonic()
    while not _take(owner_file, token):
        owner = read_owner(owner_file)
        holder = describe(owner)
        if time.monotonic() - since >= patience:
            raise UserError(f"{owner_file.parent}: {holder} trains here; wait for it or stop it, then start again")
        if not told:
            print(f"{owner_file.parent}: {holder} trains here; waiting for it to end", flush=True)
            told = True
        time.sleep(1 if owner is None or owner.get("host") == socket.gethostname() else 5)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(owner_file, token, stop), daemon=True)
    heart.start()
    try:
        yield
    finally:
        stop.set()
        heart.join()
        if _is_ours(owner_file, token):
            owner_file.unlink(missing_ok=True)


def _silence(owner_file: Path) -> float:
    """Seconds since the owner's last heartbeat by the file server's own clock; 0 when there is no owner."""
    probe = owner_file.with_name(f".{owner_file.name}.{secrets.token_hex(4)}.clock")
    try:
        probe.touch()
        return probe.stat().st_mtime - owner_file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def read_owner(owner_file: Path) -> dict[str, Any] | None:
    """The owner's record, or None when nobody holds it."""
    try:
        return json.loads(owner_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def describe(owner: dict[str, Any] | None) -> str:
    """An owner in words: process, host, Slurm job, since when."""
    if not owner:
        return "a process that left no name"
    job = f" (Slurm job {owner['slurm_job']})" if owner.get("slurm_job") else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    return f"process {owner['pid']} on {owner['host']}{job}, since {since}"


def is_alive(owner_file: Path, only_read: bool = False) -> bool:
    """Whether the process that made an owner file still runs.

    On its own host the process table tells: the process id exists and started when the owner did. From another host,
    or another container's process ids, it is dead when Slurm says that its job has ended (or that this is that very
    job, requeued), and otherwise alive while its heartbeat is younger than five minutes by the file server's own clock.
    Who `only_read`s asks no Slurm and trusts this host's clock, because the file server's takes a write to learn.
    """
    owner = read_owner(owner_file)
    if owner is None:
        return False
    if owner.get("host") == socket.gethostname():
        if owner.get("boot") != _boot():
            return False
        if owner.get("pid_namespace") == _pid_namespace():
            return process_start(owner["pid"]) == owner["process_start"]
    if (job := owner.get("slurm_job")) and (job == own_job_id() or (not only_read and has_ended(job))):
        return False
    if only_read:
        return 0 <= _age(owner_file) < SILENCE_SECONDS
    return owner_file.exists() and _silence(owner_file) < SILENCE_SECONDS


def _age(owner_file: Path) -> float:
    """Seconds since the owner's last heartbeat by this host's clock; -1 when there is no owner."""
    try:
        return max(0.0, time.time() - owner_file.stat().st_mtime)
    except FileNotFoundError:
        return -1.0


def _take(owner_file: Path, token: str) -> bool:
    if _link(owner_file, token):
        return True
    if is_alive(owner_file):
        return False
    # Only who makes the guard may remove a dead owner's file; a guard outlives its maker's death by a minute at most.
    guard = owner_file.with_name(f".{owner_file.name}.takeover")
    try:
        os.close(os.open(guard, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        with suppress(FileNotFoundError):
            if time.time() - guard.stat().st_mtime > 60:
                guard.unlink(missing_ok=True)
        return False
    displaced, silence = None, 0.0
    try:
        if not is_alive(owner_file):
            displaced, silence = read_owner(owner_file), _silence(owner_file)
            owner_file.unlink(missing_ok=True)
        taken = _link(owner_file, token)
    finally:
        guard.unlink(missing_ok=True)
    if taken and displaced and not _is_local(displaced) and silence < 2 * HEARTBEAT_SECONDS:
        time.sleep(HEARTBEAT_SECONDS + FENCE_SECONDS)
    return taken


def _is_local(owner: dict[str, Any]) -> bool:
    """Whether this process sees the owner's in its process table."""
    return (owner.get("host"), owner.get("pid_namespace")) == (socket.gethostname(), _pid_namespace())


def _link(owner_file: Path, token: str) -> bool:
    """Make the owner file, whole, if there is none."""
    mine = owner_file.with_name(f".{owner_file.name}.{secrets.token_hex(4)}.mine")
    record = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "boot": _boot(),
        "pid_namespace": _pid_namespace(),
        "slurm_job": own_job_id(),
        "since": time.time(),
        "token": token,
    }
    try:
        mine.write_text(json.dumps(record), encoding="utf-8")
        os.link(mine, owner_file)
    except FileExistsError:
        return False
    finally:
        mine.unlink(missing_ok=True)
    return True


def _is_ours(owner_file: Path, token: str) -> bool:
    owner = read_owner(owner_file)
    return owner is not None and owner.get("token") == token


def _beat(owner_file: Path, token: str, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        if not _is_ours(owner_file, token):
            print(f"{owner_file.parent}: {describe(read_owner(owner_file))} took over; ending at once", flush=True)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            os._exit(1)
        os.utime(owner_file)


def process_start(pid: int) -> int | None:
    """Clock ticks after boot at which a process started; None when there is none (or only its zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _boot() -> str:
    """An identifier that changes when the host is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _pid_namespace() -> str:
    """What tells apart containers of one host, whose process ids mean different processes."""
    return str(Path("/proc/self/ns/pid").readlink())
