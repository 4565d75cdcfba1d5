"""Call the Linux kernel where Python has no function: prctl, capabilities, namespaces and mounts."""

import ctypes
import os
import platform
import struct
from functools import cache
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 8, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 1, 2, 6, 7, 21
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number of each architecture whose calls are known here."""
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION = 0x20080522


@cache
def libc() -> ctypes.CDLL:
    """Return the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    library.syscall.restype = ctypes.c_long
    library.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    return library


def prctl(option: int, first: int = 0, second: int = 0) -> None:
    """Set something of this process; OSError where the kernel refuses."""
    checked(libc().prctl(option, first, second, 0, 0))


def call(number: int, *arguments: int | ctypes.Array) -> int:
    """Make the kernel's call of a number; OSError where the kernel refuses."""
    passed = (ctypes.c_ulong(given) if isinstance(given, int) else given for given in arguments)
    return checked(libc().syscall(number, *passed))


def checked(result: int) -> int:
    """Return a call's result; OSError for a negative one."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def unshare(namespaces: int) -> None:
    """Leave some of the parent's namespaces for new ones; OSError where the kernel refuses."""
    checked(libc().unshare(namespaces))


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or a folder or file once more; OSError where the kernel refuses, naming the target."""
    made = libc().mount(source.encode(), os.fsencode(target), kind.encode() or None, flags, options.encode() or None)
    if made < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


def pivot_root(new: Path, old: Path) -> None:
    """Make a mounted folder the root, and put the old root at a folder in it."""
    arguments = (ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))
    checked(libc().syscall(_PIVOT_ROOT[platform.machine()], *arguments))


def unmount(folder: Path) -> None:
    """Take a mounted folder away, with all that is mounted below."""
    lazily = 2
    checked(libc().umount2(os.fsencode(folder), lazily))


def capabilities() -> int:
    """Return the capabilities that this process may use, a bit each: none, unless run by root."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("CapPrm:")[2].split()[0], 16)


def keep_capabilities(kept: int, for_programs: bool = False) -> None:
    """Give up all capabilities but some, which are among the first 32, and keep these `for_programs` run later too."""
    inherited = kept if for_programs else 0
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    sets = ctypes.create_string_buffer(struct.pack("=IIIIII", kept, kept, inherited, 0, 0, 0))
    call(_CAPSET[platform.machine()], header, sets)
    for number in range(32):
        if inherited >> number & 1:
            prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number)


def is_root_of_the_machine() -> bool:
    """Tell whether user 0 here is user 0 outside of this process's user namespace, where all ids are the same."""
    mapped = Path("/proc/self/uid_map").read_text().split()
    return os.geteuid() == 0 and mapped[:3] == ["0", "0", "4294967295"]


def is_mapped(user: int) -> bool:
    """Tell whether a user's number exists in this process's user namespace."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= user < first + count:
            return True
    return False
