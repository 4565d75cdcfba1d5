"""Lock the calling process up: from then on the process computes, reads standard input and prints, no more.

By mechanisms of the Linux kernel that need no privilege: resource limits; a seccomp filter, which refuses all but the
system calls of computing, written in classic BPF, since many clusters lack libseccomp; Landlock (5.13), which leaves
only Python's files to be read and, from Linux 6.12 on, no signal and no abstract socket to leave. They keep a model's
code from harm and from cheating, and are no defence against an attack on the kernel.
"""

import ctypes
import os
import platform
import resource
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import ENOSYS, ENOTTY, EPERM
from functools import cache
from pathlib import Path

_THREADS = 16384  # of all processes of the user together, beside those that run when the sandbox starts
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER, _SIGKILL = 1, 22, 38, 2, 9
_CAPSET, _CAPABILITY_VERSION = {"x86_64": 126, "aarch64": 91}, 0x20080522
_PR_SET_KEEPCAPS, _CAPABILITIES_TO_READ, _NOBODY = 8, 0b110, 65534  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_CLOSE_RANGE = 436
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
_LANDLOCK_EXECUTE, _LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 0, 1 << 2, 1 << 3
_LANDLOCK_OF_FILES = 0b111 | 1 << 14 | 1 << 15  # to run, write, read, truncate and control a file
_LANDLOCK_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many a version of it knows; 16 from the fifth on
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Names with their numbers on x86_64 and on aarch64; a dash where the architecture has no such call.
_ALLOWED = """
read 0 63, write 1 64, close 3 57, close_range 436 436, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, stat 4 -,
fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, dup 32 23, dup2 33 -,
dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226,
mremap 25 216, madvise 28 233, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
restart_syscall 219 128, pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102, futex 202 98,
set_robust_list 273 99, rseq 334 293, sched_yield 24 124, sched_getaffinity 204 123, exit 60 93,
exit_group 231 94, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getrlimit 97 163, sysinfo 99 179,
uname 63 160, getcpu 309 168, getrandom 318 278, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177
"""
_FIRST_CALL_OF_LINUX_5 = 424  # from here on libraries ask for calls that the kernel may lack, and do without
_FIRST_X32_CALL = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def _argument(place: int, high: bool = False) -> tuple[int, ...]:
    """Load the low or the high half of a call's argument."""
    return (_LOAD, 0, 0, 16 + 8 * place + 4 * high)


# Each condition on an argument skips the next instruction, a refusal, where the condition holds.


def _is(place: int, *values: int, high: bool = False) -> list[tuple[int, ...]]:
    tests = [(_IF_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return [_argument(place, high), *tests]


def _no_bits(place: int, bits: int) -> list[tuple[int, ...]]:
    return [_argument(place), (_IF_ANY_BIT, 0, 1, bits & 0xFFFFFFFF)]


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD, _FLAGS_OF_THREADS = 0x10000, 0x7D0F00
_STREAM = socket.SOCK_STREAM | 0x80800  # and its flags: close-on-exec, non-blocking
_RLIMIT_STACK = 3
_STACK_OR_NO_NEW_LIMIT = [_argument(1), (_IF_EQUAL, 5, 0, _RLIMIT_STACK), _argument(2), (_IF_EQUAL, 0, 2, 0)]
_STACK_OR_NO_NEW_LIMIT += _is(2, 0, high=True)
# Numbers on x86_64 and on aarch64, the error where refused, the conditions.
_CONDITIONAL = {
    "openat": (257, 56, EPERM, _no_bits(2, _WRITING)),
    "open": (2, None, EPERM, _no_bits(1, _WRITING)),
    "clone": (56, 220, EPERM, _no_bits(0, ~_FLAGS_OF_THREADS), [_argument(0), (_IF_ANY_BIT, 1, 0, _CLONE_THREAD)]),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
    "fcntl": (72, 25, EPERM, _is(1, 0, 1, 2, 3, 1030)),
    # FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": (16, 29, ENOTTY, _is(1, 0x5421, 0x5450, 0x5451)),
    "prlimit64": (302, 261, EPERM, _is(0, 0), _STACK_OR_NO_NEW_LIMIT),  # of this process
    "socketpair": (53, 199, EPERM, _is(0, socket.AF_UNIX), _no_bits(1, ~_STREAM)),
    # to no address
    "sendto": (44, 206, EPERM, _is(4, 0), _is(4, 0, high=True)),
}


@cache
def filter_program() -> bytes:
    """Return the instructions for this machine's architecture: each a code, two jumps and an operand."""
    column = list(ARCHITECTURES).index(platform.machine())
    allow, kill = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _KILL)
    code = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, ARCHITECTURES[platform.machine()]), kill),
        *((_LOAD, 0, 0, _NUMBER), (_IF_AT_LEAST, 0, 1, _FIRST_X32_CALL), kill),
    ]
    for x86_64, aarch64, error, *conditions in _CONDITIONAL.values():
        if (number := (x86_64, aarch64)[column]) is not None:
            refuse = (_RETURN, 0, 0, _REFUSE | error)
            steps = [step for condition in conditions for step in (*condition, refuse)]
            code += [(_IF_EQUAL, 0, len(steps) + 1, number), *steps, allow]
    for call in _ALLOWED.split(","):
        if (number := call.split()[1 + column]) != "-":
            code += [(_IF_EQUAL, 0, 1, int(number)), allow]
    code += [(_IF_AT_LEAST, 0, 1, _FIRST_CALL_OF_LINUX_5), (_RETURN, 0, 0, _REFUSE | ENOSYS)]
    code.append((_RETURN, 0, 0, _REFUSE | EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def unavailable() -> str | None:
    """Say why a process cannot be locked up on this machine, or None."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        known, here = " and ".join(ARCHITECTURES), f"{platform.machine()} with {platform.system()}"
        return f"untrusted code is confined by Linux on {known}, and this is {here}"
    try:
        _landlock_version()
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
        self._filter = filter_program()
        self._ruleset = _ruleset(_readable([path.resolve() for path in hidden]))
        self._limits = {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: output,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: _threads_of_user() + _THREADS,
        }
        status = Path("/proc/self/status").read_text()
        self._capabilities = int(status.partition("CapPrm:")[2].split()[0], 16)  # none, unless run by root
        self._parent = os.getpid()

    def enter(self, cpu_seconds: int) -> None:
        """Lock this forked process up for good, and close every open file but the streams and 3.

        The process may use `cpu_seconds`, all threads together, and dies with its parent. OSError where the kernel
        refuses: then nothing may be run.
        """
        for kind, limit in (self._limits | {resource.RLIMIT_CPU: cpu_seconds}).items():
            most = resource.getrlimit(kind)[1]
            allowed = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(kind, (allowed, allowed))
        if self._capabilities:
            _become_nobody(self._capabilities)
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0)
        if os.getppid() != self._parent:
            os._exit(1)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
        _call(_LANDLOCK_RESTRICT_SELF, self._ruleset, 0)
        _call(_CLOSE_RANGE, 4, 0xFFFFFFFF, 0)
        steps = ctypes.create_string_buffer(self._filter)
        program = ctypes.create_string_buffer(struct.pack("@HP", len(self._filter) // 8, ctypes.addressof(steps)))
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.syscall.restype = ctypes.c_long
    return libc


def _prctl(option: int, first: int, second: int) -> None:
    _checked(_libc().prctl(option, first, second, 0, 0))


def _call(number: int, *arguments: int | ctypes.Array) -> int:
    passed = (ctypes.c_ulong(given) if isinstance(given, int) else given for given in arguments)
    return _checked(_libc().syscall(number, *passed))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _become_nobody(capabilities: int) -> None:
    """Leave root only the reading of files, and become subject to limits on threads."""
    reading = capabilities & _CAPABILITIES_TO_READ
    _prctl(_PR_SET_KEEPCAPS, 1, 0)
    if reading:
        with suppress(OSError):  # where another user exists in this container, and root may become one
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    kept = ctypes.create_string_buffer(struct.pack("=IIIIII", reading, reading, 0, 0, 0, 0))
    _call(_CAPSET[platform.machine()], header, kept)


def _threads_of_user() -> int:
    count = 0
    for tasks in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            status = tasks.stat()
            count += status.st_nlink - 2 if status.st_uid == os.getuid() else 0
    return count


def _landlock_version() -> int:
    return _call(_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)


def restrict_files(readable: Iterable[Path], writable: Iterable[Path]) -> None:
    """Let this process and its children read and run files of some folders, and write to others, for good.

    OSError where the kernel has no Landlock.
    """
    files = (1 << _LANDLOCK_FILE_RIGHTS.get(_landlock_version(), 16)) - 1
    reading = _LANDLOCK_EXECUTE | _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR
    accesses = {path: reading for path in readable if path.exists()} | dict.fromkeys(writable, files)
    rules = _rules(struct.pack("=Q", files), accesses)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    _call(_LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _ruleset(readable: list[Path]) -> int:
    """Return a descriptor of Landlock's rules: refuse everything that this kernel can, but reading some paths."""
    version = _landlock_version()
    handled = struct.pack("=Q", (1 << _LANDLOCK_FILE_RIGHTS.get(version, 16)) - 1)
    if version >= 4:
        handled += struct.pack("=Q", 0b11)  # binding and connecting TCP sockets
    if version >= 6:
        handled += struct.pack("=Q", 0b11)  # abstract Unix sockets and signals of processes outside
    return _rules(handled, dict.fromkeys(readable, _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR))


def _rules(handled: bytes, accesses: dict[Path, int]) -> int:
    """Return a descriptor of rules that refuse what they handle, but an access to each path and all below."""
    rules = _call(_LANDLOCK_CREATE_RULESET, ctypes.create_string_buffer(handled, len(handled)), len(handled), 0)
    for path, access in accesses.items():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access if path.is_dir() else access & _LANDLOCK_OF_FILES, opened)
        _call(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_RULE_PATH_BENEATH, ctypes.create_string_buffer(rule), 0)
        os.close(opened)
    return rules


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
