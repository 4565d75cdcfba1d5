"""Confine a server for a model's code as far as this machine can, and report the rest.

The layers: Landlock; a seccomp filter; namespaces (`scripts.rewards.enclosure`); another user in place of root. The
kernel may lack or refuse any of them, so a process tries each before the server starts. Without a layer for files, or
as root, no server starts; other missing layers are reported.
"""

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EACCES
from functools import partial
from pathlib import Path

from scripts.rewards import enclosure, landlock, seccomp
from scripts.rewards.confine import THREADS, become, capability_to_read, may_change_user, set_limit, threads_of
from scripts.rewards.kernel import (
    PR_SET_PDEATHSIG,
    capabilities,
    is_mapped,
    is_root_of_the_machine,
    keep_capabilities,
    prctl,
)

_FIRST_OWN_USER, _OWN_USERS, _NOBODY = 61184, 4336, 65534  # numbers that no account has, by systemd's table
_SWITCH = "gym_servers.<server>.confined: false starts it with your rights"


@dataclass(frozen=True)
class Wanted:
    """The rights of a server.

    Attributes:
        readable: Files and folders to read and run.
        home: The only folder to write to.
        network: Whether the server reaches the network.
        talks: Whether the server's processes talk by Unix and TCP sockets and /dev/shm, as Ray's do.
    """

    readable: tuple[Path, ...]
    home: Path
    network: bool
    talks: bool


@dataclass
class Layers:
    """The layers that this machine gives a server.

    Attributes:
        user: The user that a server of root becomes; None for the user of the trainer.
        landlock: The version of Landlock; 0 for none.
        enclosed: Whether the server has new namespaces.
        own_processes: Whether the server has a new /proc, too.
        filtered: Whether the server has a seccomp filter.
        reads_as_root: Whether the server keeps root's right to read, since `user` cannot read Python.
        lacks: The missing protection in words, with the reason.
        refusal: Why no server may start.
    """

    user: int | None = None
    landlock: int = 0
    enclosed: bool = False
    own_processes: bool = False
    filtered: bool = False
    reads_as_root: bool = False
    lacks: list[str] = field(default_factory=list)
    refusal: str | None = None


def layers_for(wanted: Wanted) -> Layers:
    """Find out the layers of a server on this machine; a process tries each."""
    found = Layers()
    try:
        found.user = _own_user(wanted.home)
    except OSError as error:
        found.refusal = f"it would run as root: {_words(error)}; train as another user, or {_SWITCH}"
        return found

    without_landlock = _tried(partial(_try_landlock, wanted))
    if without_landlock is None:
        found.landlock = landlock.version()

    unenclosed = _tried(partial(_try_enclosure, wanted, found.user, own_processes=True))
    found.enclosed = found.own_processes = unenclosed is None
    without_processes = unenclosed
    if not found.enclosed and found.landlock:  # by which the container's /proc keeps the environments of others
        unenclosed = _tried(partial(_try_enclosure, wanted, found.user, own_processes=False))
        found.enclosed = unenclosed is None

    if not found.landlock and not found.enclosed:
        found.refusal = (
            f"its files cannot be confined: Landlock: {without_landlock}; namespaces: {unenclosed}; use a node with "
            f"Linux 5.13 or newer whose boot parameter lsm= has landlock, or {_SWITCH}"
        )
        return found
    unfiltered = _tried(partial(seccomp.install, _filter(wanted, found)))
    found.filtered = unfiltered is None

    unreadable = None if found.enclosed else _tried(partial(_run_python_as, found.user))
    if unreadable is not None:
        # Landlock bounds what it reads as root, and the filter refuses to open files by handles.
        found.reads_as_root = bool(capability_to_read(capabilities())) and found.filtered
        if not found.reads_as_root or _tried(partial(_give_up_root, found.user, reads_as_root=True)) is not None:
            found.refusal = f"it cannot run as another user than root: {unreadable}; or {_SWITCH}"
            return found

    reasons = {
        "namespaces": unenclosed,
        "a /proc of its own": without_processes if found.enclosed else None,
        "a seccomp filter": unfiltered,
        "Landlock": without_landlock,
        "Python": unreadable,
    }
    if 0 < found.landlock < landlock.SCOPES:
        reasons["Landlock"] = f"version {found.landlock} knows neither signals nor sockets (Linux 6.12 does)"
    may = _may_still(wanted, found)
    if may:
        why = "; ".join(f"{layer}: {reason}" for layer, reason in reasons.items() if reason is not None)
        found.lacks = [f"it may {', '.join(may)} ({why})"]
    return found


def _may_still(wanted: Wanted, found: Layers) -> list[str]:
    """Return in words the acts of a server that no layer refuses."""
    may = []
    has_scopes = found.landlock >= landlock.SCOPES
    if found.reads_as_root:
        may.append("read as root in Python's, the system's and the caches' folders, and count others' open files")
    if not found.own_processes:
        may.append("see the command lines of other processes")
    if not found.enclosed and found.user is None and not has_scopes:
        may.append("end and stop other processes of your user")
    if not found.enclosed and not found.filtered:
        may.append("change limits and priorities of other processes of its user, and use System V's shared memory")
        if found.user is None:
            may.append("change modes, times and sizes of your files")
    if not found.filtered:
        may.append("use keyrings, io_uring, other families of sockets, and calls of the kernel that it does not need")
    has_sockets = wanted.talks or not found.filtered
    if has_sockets and not found.enclosed and found.landlock < landlock.UNIX_SOCKETS:
        may.append("connect to Unix sockets that its user may write to")
    if has_sockets and not has_scopes and not (found.enclosed and not wanted.network):
        may.append("connect to Unix sockets with abstract names")
    if wanted.talks and not found.enclosed:
        may.append(f"write to {enclosure.SHARED_MEMORY}")
    if has_sockets and not found.enclosed and not wanted.network:
        may.append("reach the network")
    return may


def _own_user(home: Path) -> int | None:
    """Return the user for a server of root, and give that user the home; None where root is no root outside.

    OSError where root cannot become another user.
    """
    if os.geteuid() != 0:
        return None
    own = _FIRST_OWN_USER + os.getpid() % _OWN_USERS
    for user in (own, _NOBODY):
        if is_mapped(user) and may_change_user(capabilities()):
            os.chown(home, user, user)
            return user
    if is_root_of_the_machine():
        raise PermissionError("root cannot become another user here, without CAP_SETUID and CAP_SETGID")
    return None


def _try_landlock(wanted: Wanted) -> None:
    """Put this process under Landlock's rules; OSError where the kernel refuses."""
    landlock.restrict(_rules(wanted, enclosed=False))


def _try_enclosure(wanted: Wanted, user: int | None, own_processes: bool) -> None:
    """Enter namespaces, with the root furnished in a further process; OSError where the kernel refuses."""
    enclosure.leave(wanted.network)
    refused = _tried(partial(_furnish_and_run_python, wanted, user, own_processes))
    if refused is not None:
        raise OSError(refused)


def _furnish_and_run_python(wanted: Wanted, user: int | None, own_processes: bool) -> None:
    """Make the root of a server, and become its user; OSError where the kernel refuses."""
    enclosure.furnish(wanted.readable, wanted.home, own_processes)
    _run_python_as(user)


def _tried(act: Callable[[], object]) -> str | None:
    """Do something in a forked process; return why the attempt failed, or None."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "ended"
        try:
            act()
            said = ""
        except BaseException as error:
            said = _words(error)
        finally:
            os.write(writing, f"{said}.".encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        said = answers.read().decode()
    os.waitpid(child, 0)
    return None if said == "." else said.removesuffix(".") or "the process that tried it ended"


def _words(error: BaseException) -> str:
    """Return an error in words, with the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" at {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)


def _rules(wanted: Wanted, enclosed: bool) -> int:
    """Return a descriptor of Landlock's rules for a server."""
    everything = landlock.all_rights(landlock.version())
    accesses = dict.fromkeys(wanted.readable, landlock.RUN)
    accesses[Path("/proc")] = landlock.RUN
    written = [wanted.home, *enclosure.DEVICES]
    if enclosed or wanted.talks:
        written.append(enclosure.SHARED_MEMORY)
    accesses |= dict.fromkeys(written, everything)
    has_sockets = wanted.network or enclosed or wanted.talks
    return landlock.ruleset(accesses, network=has_sockets)


def _filter(wanted: Wanted, layers: Layers) -> bytes:
    """Return the seccomp filter of a server: Unix sockets where others are out of reach, or where Ray needs them."""
    families = []
    if wanted.network or wanted.talks or layers.enclosed:
        families += [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK]
    has_own_names = not wanted.network or layers.landlock >= landlock.SCOPES  # a network has its own abstract sockets
    if wanted.talks or (layers.enclosed and has_own_names) or layers.landlock >= landlock.UNIX_SOCKETS:
        families.append(socket.AF_UNIX)
    return seccomp.for_servers(
        tuple(families),
        only_itself=not layers.enclosed,
        keeps_modes=not layers.enclosed and layers.user is None,
        keeps_sizes=not layers.enclosed and layers.landlock < landlock.TRUNCATION,
    )


def _give_up_root(user: int | None, reads_as_root: bool) -> None:
    """Become the server's user, without capabilities, except one to read as root; OSError where the kernel refuses."""
    held = capabilities()
    if user is not None:
        become(user)
    keep_capabilities(capability_to_read(held) if reads_as_root else 0, for_programs=True)


def _run_python_as(user: int | None) -> None:
    """Become a server's user, and check that the user may run Python and read the libraries; OSError where not."""
    folders = [path for path in sys.path if path.startswith("/") and Path(path).is_dir()]
    _give_up_root(user, reads_as_root=False)
    for needed in (sys.executable, *folders):
        if not os.access(needed, os.R_OK | os.X_OK):
            raise PermissionError(EACCES, f"another user than root may not read {needed}")


def run_confined(wanted: Wanted, layers: Layers, serve: Callable[[], None]) -> int:
    """Run a server in a confined child process that ends with this process; return the exit code."""
    alive, held = os.pipe()
    if layers.enclosed:
        enclosure.leave(wanted.network)
    child = os.fork()
    if child == 0:
        os.close(held)
        status = 1
        try:
            _confine(wanted, layers, alive)
            status = _serve_and_reap(serve) if layers.enclosed else _serve(serve)
        finally:
            os._exit(status)
    os.close(alive)
    _, status = os.waitpid(child, 0)
    return _exit_code(status)


def _confine(wanted: Wanted, layers: Layers, alive: int) -> None:
    """Put this process under all layers; OSError where the kernel refuses a layer after all."""
    user = os.getuid() if layers.user is None else layers.user
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NPROC: threads_of(user) + THREADS}
    for kind, limit in limits.items():
        set_limit(kind, limit)
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, the training is not what ends
    if layers.enclosed:
        enclosure.furnish(wanted.readable, wanted.home, layers.own_processes)
    _give_up_root(layers.user, layers.reads_as_root)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)  # the parent ended before it could be the reason to end
    os.close(alive)
    if layers.landlock:
        landlock.restrict(_rules(wanted, layers.enclosed))
    if layers.filtered:
        seccomp.install(_filter(wanted, layers))


def _serve(serve: Callable[[], None]) -> int:
    """Run a server; return the exit status."""
    try:
        serve()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _serve_and_reap(serve: Callable[[], None]) -> int:
    """Run a server as the child of the first process, and wait for all orphans; return the server's exit code."""
    server = os.fork()
    if server == 0:
        os._exit(_serve(serve))
    while True:
        ended, status = os.wait()
        if ended == server:
            return _exit_code(status)


def _exit_code(status: int) -> int:
    """Return a process's exit code; for one that a signal ended, 128 and the signal's number."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
