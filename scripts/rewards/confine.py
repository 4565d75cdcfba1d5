"""Lock the calling process up: from then on the process computes, reads standard input and prints, no more.

By mechanisms of the Linux kernel that need no privilege: resource limits; a seccomp filter, which refuses all but the
system calls of computing (`scripts.rewards.seccomp`); Landlock, which leaves only Python's files to be read
(`scripts.rewards.landlock`). They keep a model's code from harm and from cheating, and are no defence against an
attack on the kernel.
"""

import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from scripts.rewards import landlock, seccomp
from scripts.rewards.kernel import (
    ARCHITECTURES,
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    CAP_SETGID,
    CAP_SETUID,
    PR_SET_KEEPCAPS,
    PR_SET_PDEATHSIG,
    call,
    capabilities,
    is_mapped,
    keep_capabilities,
    prctl,
)

THREADS = 16384
"""How many may run, of all processes of the user together, besides those that run when the confinement is made."""
NOBODY = 65534
_SIGKILL = 9
_CLOSE_RANGE = 436


def unavailable() -> str | None:
    """Say why a process cannot be locked up on this machine, or None."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        known, here = " and ".join(ARCHITECTURES), f"{platform.machine()} with {platform.system()}"
        return f"untrusted code is confined by Linux on {known}, and this is {here}"
    try:
        landlock.version()
    except OSError as error:
        return (
            f"untrusted code is confined by Landlock, which this kernel (Linux {platform.release()}) does not offer: "
            f"{error.strerror}; use a node with Linux 5.13 or newer whose boot parameter lsm= has landlock, and a "
            "container whose seccomp profile lets landlock_create_ruleset through"
        )
    return None


class Confinement:
    """The locks of all processes that this process forks, worked out beforehand.

    No file below the `hidden` folders can be read, even inside a folder of Python's libraries.
    """

    def __init__(self, hidden: list[Path], memory: int, output: int) -> None:
        self._filter = seccomp.for_computing()
        readable = _readable([path.resolve() for path in hidden])
        self._ruleset = landlock.ruleset(dict.fromkeys(readable, landlock.READ), network=False)
        self._limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: output,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: threads_of(os.getuid()) + THREADS,
        }
        self._capabilities = capabilities()
        self._parent = os.getpid()

    def enter(self, cpu_seconds: int) -> None:
        """Lock this forked process up for good, and close every open file but the streams and 3.

        The process may use `cpu_seconds`, all threads together, and dies with its parent. OSError where the kernel
        refuses: then nothing may be run.
        """
        for kind, limit in (self._limits | {resource.RLIMIT_CPU: cpu_seconds}).items():
            set_limit(kind, limit)
        if self._capabilities:
            _become_nobody(self._capabilities)
        prctl(PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)
        landlock.restrict(self._ruleset)
        call(_CLOSE_RANGE, 4, 0xFFFFFFFF, 0)
        seccomp.install(self._filter)


def set_limit(kind: int, limit: int) -> None:
    """Limit a resource of this process and its children, never above the limit that is set already."""
    most = resource.getrlimit(kind)[1]
    allowed = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (allowed, allowed))


def capability_to_read(held: int) -> int:
    """Return the least of some capabilities by which files of others are read, as a bit; 0 for none."""
    for number in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):
        if held >> number & 1:
            return 1 << number
    return 0


def may_change_user(held: int) -> bool:
    """Tell whether capabilities let a process become another user."""
    return bool(held >> CAP_SETUID & 1 and held >> CAP_SETGID & 1)


def become(user: int) -> None:
    """Become a user without groups, and keep root's capabilities to be asked for; OSError where the kernel refuses."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _become_nobody(held: int) -> None:
    """Leave root only the reading of files, and become subject to limits on threads.

    Where root cannot become another user, or nobody could not read Python, root stays a user without capabilities,
    whom the filter keeps from all that only the number 0 would allow.
    """
    reading = capability_to_read(held)
    if reading and may_change_user(held) and is_mapped(NOBODY):
        become(NOBODY)
    keep_capabilities(reading)


def threads_of(user: int) -> int:
    """Count the threads of a user's processes."""
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            status = tasks.stat()
            count += status.st_nlink - 2 if status.st_uid == user else 0
    return count


def _readable(hidden: list[Path]) -> list[Path]:
    room = Path(__file__).resolve().parents[1]
    folders = [Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    folders += [Path(name) for name in (*sysconfig.get_paths().values(), "/usr", "/lib", "/lib64", room)]
    for name in (*sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        with suppress(OSError):  # what this user cannot list, nothing is loaded from
            folders += _loadable(Path(name)) if name.startswith("/") else []
    outside = {path for folder in folders if folder.exists() for path in _outside(folder.resolve(), hidden)}
    return [*outside, *filter(Path.exists, map(Path, ("/etc/localtime", "/dev/null", "/dev/urandom")))]


def _loadable(folder: Path) -> Iterator[Path]:
    """List the modules in a folder of a search path, which may be anyone's home."""
    if folder.name in ("site-packages", "dist-packages"):
        yield folder
    elif folder.is_dir():
        for path in folder.iterdir():
            if {".py", ".so"} & set(path.suffixes) or (path / "__init__.py").exists():
                yield path


def _outside(folder: Path, hidden: list[Path]) -> list[Path]:
    """Return the folder, or its parts beside the hidden folders."""
    if not any(path.is_relative_to(folder) for path in hidden):
        return [folder]
    if folder in hidden:
        return []
    return [part for child in folder.iterdir() for part in _outside(child.resolve(), hidden)]
