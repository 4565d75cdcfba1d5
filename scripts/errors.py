"""The exceptions that a user is meant to read, and how a program ends with them."""

import grp
import os
import pwd
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path


class UserError(Exception):
    """Something a person can put right: the message says what, where (file, line, key) and what to do."""


class CutOffError(UserError):
    """Something from outside ended the work (a kill, a lost node): the next attempt may go well."""


class ExhaustedError(CutOffError):
    """The data ended before the step that was aimed at; the next attempt aims at one that can be reached."""


def shortened(text: str, length: int) -> str:
    """A text of at most so many characters, for a message; dots stand for what is left out."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def explain_refusal(error: OSError) -> str:
    """What the system refused to do with a file; where others may not use it, whose it is, its mode and what to do."""
    path = Path(os.path.realpath(str(error.filename)))
    if not isinstance(error, PermissionError):
        return f"{error.filename}: {error.strerror}"
    there = [folder for folder in [*reversed(path.parents), path] if os.path.lexists(folder)]
    is_new = there[-1] != path
    closed = next((folder for folder in there if folder.is_dir() and not os.access(folder, os.X_OK)), None)
    if closed or (not is_new and not os.access(path, os.R_OK)):
        barred, verb = closed or path, "enter" if closed else "read"
    else:
        barred = path if not is_new and not os.access(path, os.W_OK) else there[-1 if is_new else -2]
        verb = "write to"
        if os.access(barred, os.W_OK):
            return f"{error.filename}: {error.strerror}"
    state = barred.stat()
    what = f"{barred}: {_name_of(os.geteuid(), 'pwd')} may not {verb} it"
    owner, group = _name_of(state.st_uid, "pwd"), _name_of(state.st_gid, "grp")
    whose = f"it is {owner}'s, of group {group}, mode {stat.S_IMODE(state.st_mode):04o}"
    shared = state.st_gid in {os.getegid(), *os.getgroups()}
    regroup = "" if shared else f"chgrp -R GROUP {barred} (a group of you both), "
    return (
        f"{what}: {whose}. For a tree that people share: {regroup}chmod -R g+rwX {barred}, by {owner}, and umask 002 "
        "before everybody's calls"
    )


def _name_of(number: int, database: str) -> str:
    """The name of a user (pwd) or group (grp); the number where this machine knows none."""
    try:
        return pwd.getpwuid(number).pw_name if database == "pwd" else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def run_program(main: Callable[[], int | None]) -> None:
    """Run a command-line program; a UserError ends it with one message, without a traceback.

    The status is then 1, and 75 (EX_TEMPFAIL) for a CutOffError.
    """
    try:
        status = main()
        sys.stdout.flush()
    except CutOffError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # whoever read the output wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"error: {explain_refusal(error)}")
    sys.exit(status or 0)
