"""Restrict this process's files, and more on newer kernels, by Landlock (Linux 5.13 and newer).

| version | Linux | adds |
| --- | --- | --- |
| 1 | 5.13 | files: run, read, write, list, make, remove |
| 2 | 5.19 | move and link files between folders; before, always refused |
| 3 | 6.2 | truncate files |
| 4 | 6.7 | bind and connect TCP sockets |
| 5 | 6.10 | control devices (ioctl) |
| 6 | 6.12 | abstract Unix sockets and signals of processes outside |
| 7 | 6.15 | (options of the audit log) |
| 8 | 7.0 | (all threads at once) |
| 9 | 7.1 | connect to Unix sockets by path |
| 10 | 7.2 | bind, connect and send by UDP |
"""

import ctypes
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from scripts.rewards.kernel import PR_SET_NO_NEW_PRIVS, call, prctl

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_FOR_VERSION, _RULE_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
_RIGHTS_OF_ONE_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_RIGHTS_OF_FIRST_VERSION = 13
_TCP, _UDP = 0b0011, 0b1100
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
TRUNCATION, SCOPES, UNIX_SOCKETS = 3, 6, 9
"""The first versions with rights to truncate a file, with scopes, and with a right to connect to a Unix socket."""
READ, RUN = _READ_FILE | _READ_DIR, _EXECUTE | _READ_FILE | _READ_DIR


def version() -> int:
    """Return the version of Landlock in the kernel; OSError where there is none."""
    return call(_CREATE_RULESET, 0, 0, _ASK_FOR_VERSION)


def all_rights(known: int) -> int:
    """Return all rights to files of a version."""
    rights = (1 << _RIGHTS_OF_FIRST_VERSION) - 1
    added = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEV, 9: _RESOLVE_UNIX}
    for since, right in added.items():
        if known >= since:
            rights |= right
    return rights


def ruleset(accesses: Mapping[Path, int], network: bool) -> int:
    """Return a descriptor of rules that refuse all acts that the kernel's Landlock knows, except some accesses.

    Args:
        accesses: The rights to each path and all below. A path that this process cannot open has no rights.
        network: Leave sockets of TCP and UDP alone.

    Raises:
        OSError: The kernel has no Landlock, or refuses a rule.
    """
    known = version()
    handled = struct.pack("=Q", all_rights(known))
    if known >= 4:
        sockets = _TCP | (_UDP if known >= 10 else 0)
        handled += struct.pack("=Q", 0 if network else sockets)
    if known >= SCOPES:
        handled += struct.pack("=Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = call(_CREATE_RULESET, ctypes.create_string_buffer(handled, len(handled)), len(handled), 0)
    for path, access in accesses.items():
        _allow(rules, path, access & all_rights(known))
    return rules


def _allow(rules: int, path: Path, access: int) -> None:
    """Add an access to a path, unless the path is missing or out of this user's reach."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # without a rule, Landlock refuses the path
    try:
        given = access if path.is_dir() else access & _RIGHTS_OF_ONE_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", given, opened), 12)
        call(_ADD_RULE, rules, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(opened)


def restrict(rules: int) -> None:
    """Put this process and its children under rules for good; OSError where the kernel refuses."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call(_RESTRICT_SELF, rules, 0)
