"""Refuse calls of the kernel by a seccomp filter, written in classic BPF, since many clusters lack libseccomp."""

import ctypes
import os
import platform
import socket
import struct
from errno import EAFNOSUPPORT, ENOSYS, ENOTTY, EPERM
from functools import cache

from scripts.rewards.kernel import ARCHITECTURES, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, prctl

Step = tuple[int, int, int, int]
"""An instruction: a code, two jumps and an operand."""

_MODE_FILTER = 2
_FIRST_CALL_OF_LINUX_5 = 424  # from here on libraries ask for calls that the kernel may lack, and do without
_FIRST_X32_CALL = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NO_ERROR = 0  # the call is not made, and returns 0

# Names with their numbers on x86_64 and on aarch64; a dash where the architecture has no such call.
_COMPUTING = """
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
# What a server with children of its own never needs: other processes, the machine, and what Landlock cannot refuse.
_NEVER_NEEDED = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_getfd 438 438,
process_madvise 440 440, process_mrelease 448 448, migrate_pages 256 238, move_pages 279 239,
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429,
fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, open_tree_attr 467 467,
unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
add_key 248 217, request_key 249 218, keyctl 250 219, kexec_load 246 104, kexec_file_load 320 294,
init_module 175 105, finit_module 313 273, delete_module 176 106, create_module 174 -, reboot 169 142,
swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, quotactl_fd 443 443, syslog 103 116,
sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, modify_ldt 154 -, settimeofday 164 170,
clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, lookup_dcookie 212 18, nfsservctl 180 42,
name_to_handle_at 303 264, open_by_handle_at 304 265, vhangup 153 58, uselib 134 -,
shmget 29 194, shmctl 31 195, shmat 30 196, shmdt 67 197, msgget 68 186, msgctl 71 187, msgrcv 70 188,
msgsnd 69 189, semget 64 190, semctl 66 191, semtimedop 220 192, semop 65 193, mq_open 240 180, mq_unlink 241 181,
fanotify_init 300 262, fanotify_mark 301 263,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
setxattrat 463 463, removexattrat 466 466, file_setattr 469 469
"""
# By which an owner changes files, whatever Landlock refuses.
_CHANGING_MODES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88
"""


def _argument(place: int, high: bool = False) -> Step:
    """Load the low or the high half of a call's argument."""
    return (_LOAD, 0, 0, 16 + 8 * place + 4 * high)


# Each condition on an argument skips the next instruction, a refusal, where the condition holds.


def _is(place: int, *values: int, high: bool = False) -> list[Step]:
    """Hold where an argument is among some values."""
    tests = [(_IF_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return [_argument(place, high), *tests]


def _no_bits(place: int, bits: int) -> list[Step]:
    """Hold where an argument has none of some bits."""
    return [_argument(place), (_IF_ANY_BIT, 0, 1, bits & 0xFFFFFFFF)]


def _is_not(place: int, *values: int) -> list[Step]:
    """Hold where an argument is none of some values."""
    tests = [(_IF_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    jump_over_the_refusal = (_IF_AT_LEAST, 1, 1, 0)
    return [_argument(place), *tests, jump_over_the_refusal]


def _empties_no_file(place: int) -> list[Step]:
    """Hold where the flags of an opening do not empty the file, or open it to write."""
    writes = os.O_WRONLY | os.O_RDWR
    return [_argument(place), (_IF_ANY_BIT, 0, 2, os.O_TRUNC), (_IF_ANY_BIT, 1, 0, writes)]


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD, _FLAGS_OF_THREADS = 0x10000, 0x7D0F00
_FLAGS_OF_SOCKETS = 0x80800  # close-on-exec, non-blocking
_STREAM = socket.SOCK_STREAM | _FLAGS_OF_SOCKETS
_RLIMIT_STACK = 3
_STACK_OR_NO_NEW_LIMIT = [_argument(1), (_IF_EQUAL, 5, 0, _RLIMIT_STACK), _argument(2), (_IF_EQUAL, 0, 2, 0)]
_STACK_OR_NO_NEW_LIMIT += _is(2, 0, high=True)
# Numbers on x86_64 and on aarch64, the error where refused, the conditions.
_COMPUTING_IF = {
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

_NEW_NAMESPACES = 0x7E020000
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS, _NETLINK_ROUTE = 0, 1, 0
_CLONE3, _OPENAT2 = 435, 437  # on both architectures


def _numbers(table: str) -> list[int]:
    """Return the numbers of a table's calls on this machine's architecture."""
    column = 1 + list(ARCHITECTURES).index(platform.machine())
    chosen = (line.split()[column] for line in table.split(","))
    return [int(number) for number in chosen if number != "-"]


def _checked_calls(table: dict[str, tuple]) -> list[Step]:
    """Allow a table's calls where all of their conditions hold, and refuse them otherwise."""
    column = list(ARCHITECTURES).index(platform.machine())
    code: list[Step] = []
    for x86_64, aarch64, error, *conditions in table.values():
        number = (x86_64, aarch64)[column]
        if number is None:
            continue
        refuse = (_RETURN, 0, 0, _REFUSE | error)
        steps = [step for condition in conditions for step in (*condition, refuse)]
        code += [(_IF_EQUAL, 0, len(steps) + 1, number), *steps, (_RETURN, 0, 0, _ALLOW)]
    return code


def _beginning() -> list[Step]:
    """End a process of another architecture, and load the call's number."""
    kill = (_RETURN, 0, 0, _KILL)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, ARCHITECTURES[platform.machine()]),
        kill,
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _FIRST_X32_CALL),
        kill,
    ]


def _packed(code: list[Step]) -> bytes:
    """Return instructions as the kernel reads them."""
    return b"".join(struct.pack("=HBBI", *step) for step in code)


@cache
def for_computing() -> bytes:
    """Return a filter that allows only computing, reading files and writing open files."""
    code = [*_beginning(), *_checked_calls(_COMPUTING_IF)]
    for number in _numbers(_COMPUTING):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code += [(_IF_AT_LEAST, 0, 1, _FIRST_CALL_OF_LINUX_5), (_RETURN, 0, 0, _REFUSE | ENOSYS)]
    code.append((_RETURN, 0, 0, _REFUSE | EPERM))
    return _packed(code)


def for_servers(families: tuple[int, ...], only_itself: bool, keeps_modes: bool, keeps_sizes: bool) -> bytes:
    """Return a filter that refuses calls no server with child processes needs.

    Args:
        families: The families of sockets that may be made. Pairs of connected Unix sockets may be made always.
        only_itself: Refuse limits and priorities of other processes by number.
        keeps_modes: Leave modes, owners and times of files as they are, without an error, since programs that copy
            files expect none.
        keeps_sizes: Refuse to empty a file without opening it to write, which Landlock knows from version 3 on.
    """
    pairs = [kind | flags for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET) for flags in _flags_of_sockets()]
    unix_pairs = [] if socket.AF_UNIX in families else [_is(1, *pairs)]
    routes = [_argument(0), (_IF_EQUAL, 0, 3, socket.AF_NETLINK), *_is(2, _NETLINK_ROUTE)]
    table = {
        "clone": (56, 220, EPERM, _no_bits(0, _NEW_NAMESPACES)),
        "ioctl": (16, 29, EPERM, _is_not(1, _TIOCSTI, _TIOCLINUX, _TIOCSETD)),
        "socket": (41, 198, EAFNOSUPPORT, _is(0, *families), routes),
        "socketpair": (53, 199, EAFNOSUPPORT, _is(0, socket.AF_UNIX), *unix_pairs),
    }
    if only_itself:
        table |= {
            "prlimit64": (302, 261, EPERM, _is(0, 0)),
            "sched_setaffinity": (203, 122, EPERM, _is(0, 0)),
            "sched_setscheduler": (144, 119, EPERM, _is(0, 0)),
            "sched_setparam": (142, 118, EPERM, _is(0, 0)),
            "sched_setattr": (314, 274, EPERM, _is(0, 0)),
            "setpriority": (141, 140, EPERM, _is(0, _PRIO_PROCESS), _is(1, 0)),
            "ioprio_set": (251, 30, EPERM, _is(0, _IOPRIO_WHO_PROCESS), _is(1, 0)),
        }
    refused = _numbers(_NEVER_NEEDED)
    unknown = [_CLONE3]  # whose flags are out of a filter's sight, and without which the C library does
    if keeps_sizes:
        table |= {
            "openat": (257, 56, EPERM, _empties_no_file(2)),
            "open": (2, None, EPERM, _empties_no_file(1)),
        }
        refused += _numbers("truncate 76 45")
        unknown.append(_OPENAT2)
    code = [*_beginning(), *_checked_calls(table)]
    for number in refused:
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | EPERM)]
    if keeps_modes:
        for number in _numbers(_CHANGING_MODES):
            code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | _NO_ERROR)]
    for number in unknown:
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | ENOSYS)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return _packed(code)


def _flags_of_sockets() -> tuple[int, ...]:
    """Return all flags of a socket's type."""
    return (0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def install(program: bytes) -> None:
    """Put this process and its children under a filter for good; OSError where the kernel refuses."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    steps = ctypes.create_string_buffer(program)
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    pointer = ctypes.create_string_buffer(described)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(pointer))
