"""Put this process and its children into new namespaces: a root with few folders, processes, shared memory, network.

Root makes namespaces at once, another user only within a user namespace, to which many clusters and containers say no.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scripts.rewards.kernel import CAP_SYS_ADMIN, capabilities, mount, pivot_root, unmount, unshare

DEVICES = tuple(Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom"))
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its own, or said to be shared
_NEW_MOUNTS, _NEW_USERS, _NEW_IPC, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x10000000, 0x8000000, 0x20000000, 0x40000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
# Options of a mount that a user namespace may not drop: as statvfs reports them, as mount takes them.
_KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
_SET_FLAGS, _UP = 0x8914, 1


def leave(network: bool) -> None:
    """Enter new namespaces of mounts, IPC, child processes and, without `network`, networks.

    OSError where the kernel refuses.
    """
    namespaces = _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESSES
    if not network:
        namespaces |= _NEW_NETWORK
    user, group = os.geteuid(), os.getegid()
    if capabilities() >> CAP_SYS_ADMIN & 1:
        unshare(namespaces)
    else:
        unshare(_NEW_USERS | namespaces)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if not network:
        _start_loopback()


def _start_loopback() -> None:
    """Make 127.0.0.1 work in a new network."""
    request = struct.pack("16sh14x", b"lo", _UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, request)


def furnish(readable: Iterable[Path], home: Path, own_processes: bool) -> None:
    """Make a root of folders to read and a home to write to, in the first child process after `leave`.

    Devices are harmless, shared memory is new. /proc is new with `own_processes`, and else the old one: a container
    that hides parts of /proc keeps everybody inside from a new one.

    Raises:
        OSError: The kernel refuses a mount.
    """
    os.umask(0o022)
    mount("none", Path("/"), flags=_RECURSIVE | _PRIVATE)
    root = home / "root"
    root.mkdir(exist_ok=True)
    mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=755")
    for path in _outermost(readable):
        _show(path, root)
    _bind(home, root, recursive=False)
    for device in DEVICES:
        if device.exists():
            _bind(device, root)
    for name, target in _LINKS.items():
        (root / "dev" / name).symlink_to(target)
    (root / "dev/shm").mkdir()
    mount("tmpfs", root / "dev/shm", "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=1777")
    (root / "proc").mkdir()
    if own_processes:
        mount("proc", root / "proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    else:
        mount("/proc", root / "proc", flags=_BIND | _RECURSIVE)
    (root / "old").mkdir()
    pivot_root(root, root / "old")
    os.chdir("/")
    unmount(Path("/old"))
    Path("/old").rmdir()
    mount("none", Path("/"), flags=_REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return paths and the targets of links, without paths inside of others."""
    wanted = set()
    for path in paths:
        with suppress(OSError):  # what this user cannot reach is not there
            if path.exists():
                wanted |= {path, path.resolve()}
    return sorted(path for path in wanted if not any(parent in wanted for parent in path.parents))


def _show(path: Path, root: Path) -> None:
    """Show a path in a new root, to be read; a link stays a link."""
    shown = root / path.relative_to("/")
    if path.is_symlink():
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.symlink_to(path.readlink())
        return
    with suppress(PermissionError):  # what this user cannot reach is not there
        _bind(path, root)
        _make_read_only(shown)


def _bind(path: Path, root: Path, recursive: bool = True) -> None:
    """Mount a file or folder again at the same place of a new root."""
    shown = root / path.relative_to("/")
    shown.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shown.mkdir(exist_ok=True)
    else:
        shown.touch()
    mount(str(path), shown, flags=_BIND | (_RECURSIVE if recursive else 0))


def _make_read_only(shown: Path) -> None:
    """Refuse to write to a mounted folder, and to all mounts below."""
    mounted = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    places = [Path(place.encode().decode("unicode_escape")) for place in mounted]
    for place in places:
        if place == shown or shown in place.parents:
            set_already = os.statvfs(place).f_flag
            kept = sum(flag for reported, flag in _KEPT.items() if set_already & reported)
            mount("none", place, flags=_REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | kept)
