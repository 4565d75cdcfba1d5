"""The system calls of untrusted code, as a seccomp filter that refuses all others.

Written in classic BPF, which the kernel loads without a privilege; many clusters lack libseccomp.
"""

import os
import platform
import socket
import struct
from errno import ENOSYS, ENOTTY, EPERM
from functools import cache

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
