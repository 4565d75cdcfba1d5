"""Locks the calling process up: what it runs from then on computes, reads its standard input and prints, no more.

Three mechanisms of the Linux kernel, none of which needs a privilege: resource limits; a seccomp filter, which refuses
sockets, processes, signals and every way of writing to a file system; Landlock (5.13), which leaves only Python's own
files to be read. They keep a model's code from harm and from cheating. They are no defence against an attack on the
kernel itself.

RLIMIT_NPROC is not among them: it binds no root and counts all that a user runs anywhere on the machine, whereas the
filter lets nobody make a process, and threads are bounded by the memory.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from errno import ENOSYS, ENOTTY, EPERM
from functools import cache
from pathlib import Path

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: numbers on x86_64 and on aarch64; None where the architecture has no such call
_REFUSED = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "unshare": (272, 97),
    "setns": (308, 268),
    "prctl": (157, 167),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "shmctl": (31, 195),
    "semctl": (66, 191),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "creat": (85, None),
    "truncate": (76, 45),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fsetxattr": (190, 7),
    "fremovexattr": (199, 16),
    "open_by_handle_at": (304, 265),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # their arguments lie in memory, where no filter looks
_NO_TERMINAL = {"ioctl": (16, 29)}  # it may set a file's flags as well
_OPEN = {"open": (2, None, 1), "openat": (257, 56, 2)}  # the last number: which argument has the flags
_CLONE = (56, 220)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000
_FIRST_X32_CALL = 0x40000000

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER, _SIGKILL = 1, 22, 38, 2, 9
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR, _LANDLOCK_RULE_PATH_BENEATH = 1 << 2, 1 << 3, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def unavailable() -> str | None:
    """Why a process cannot be locked up on this machine, or None."""
    if not sys.platform.startswith("linux"):
        return f"untrusted code is confined by the Linux kernel, and this is {platform.system()}"
    if platform.machine() not in _ARCHITECTURES:
        return f"untrusted code is confined on {' and '.join(_ARCHITECTURES)}, and this is {platform.machine()}"
    return None


def prepare() -> None:
    """Work out beforehand what is the same for every process that this one forks to be locked up."""
    _libc(), _filter(), _readable()


def confine(cpu_seconds: int, memory: int, output: int) -> None:
    """Lock this process up for good.

    It may use `cpu_seconds` of all its threads' time, `memory` bytes of address space and write `output` bytes to what
    it has open, and it dies with its parent. Raises OSError where the kernel refuses: then nothing may be run.
    """
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    _hide_files()
    filter_code = _filter()
    program = _Program(len(filter_code) // 8, filter_code)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.syscall.restype = ctypes.c_long
    return libc


def _prctl(option: int, first: int, second: int) -> None:
    if _libc().prctl(option, first, second, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


@cache
def _filter() -> bytes:
    """The filter's instructions: each a code, two jumps and an operand."""
    column = list(_ARCHITECTURES).index(platform.machine())
    refuse, pretend_absent, no_terminal = _REFUSE | EPERM, _REFUSE | ENOSYS, _REFUSE | ENOTTY

    def when(number: int | None, *then: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        return [] if number is None else [(_IF_EQUAL, 0, len(then), number), *then]

    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _FIRST_X32_CALL),
        (_RETURN, 0, 0, _KILL),
    ]
    for *numbers, argument in _OPEN.values():
        code += when(
            numbers[column],
            (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
            (_IF_ANY_BIT, 0, 1, _WRITING),
            (_RETURN, 0, 0, refuse),
            (_RETURN, 0, 0, _ALLOW),
        )
    code += when(
        _CLONE[column],
        (_LOAD, 0, 0, _ARGUMENTS),
        (_IF_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    )
    for calls, answer in ((_REFUSED, refuse), (_ABSENT, pretend_absent), (_NO_TERMINAL, no_terminal)):
        for numbers in calls.values():
            code += when(numbers[column], (_RETURN, 0, 0, answer))
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _hide_files() -> None:
    """Let nothing be read but Python's and the system's libraries, where the kernel has Landlock."""
    handled = ctypes.c_uint64(_LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR)
    rules = _libc().syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if rules < 0:
        return
    for path in _readable():
        opened = os.open(path, os.O_PATH)
        access = handled.value if path.is_dir() else _LANDLOCK_READ_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, opened))
        _libc().syscall(_LANDLOCK_ADD_RULE, rules, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(opened)
    _libc().syscall(_LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


@cache
def _readable() -> tuple[Path, ...]:
    room = Path(__file__).resolve().parents[1]
    names = [name for name in sys.path if name and Path(name).resolve() != room.parent]
    names += [sys.prefix, str(Path(sys.base_prefix, "lib")), *sysconfig.get_paths().values()]
    names += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    names += ["/usr", "/lib", "/lib64", "/etc/localtime", "/dev/null", "/dev/urandom"]
    return tuple(path for path in {room, *(Path(name).resolve() for name in names if name)} if path.exists())
