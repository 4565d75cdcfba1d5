"""Errors for users, and the end of a program."""

import codecs
import errno
import grp
import os
import pwd
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from scripts.credentials import without_credentials

LONGEST = 1200
PLAIN = {"≥": ">=", "≤": "<=", "→": "->", "±": "+-"}
codecs.register_error("plain", lambda error: (PLAIN.get(error.object[error.start], "?"), error.start + 1))


class UserError(Exception):
    """A mistake that a person can mend; the message says what, where (file, line, key) and the remedy.

    Credentials in quoted text become stars, signs that a terminal obeys become escapes. A message of more than
    `LONGEST` characters loses its middle.
    """

    most = LONGEST

    def __init__(self, message: object) -> None:
        super().__init__(_cut(printable(without_credentials(str(message))), self.most))


class CutOffError(UserError):
    """An interruption from outside (a kill, a lost node); the next attempt may succeed."""


class ServiceError(UserError):
    """A server, or this machine, fails at what was asked; no row and no response is to blame."""


class StalledError(CutOffError):
    """A training that made no new step for too long and was ended; the next attempt may succeed."""


class ExhaustedError(CutOffError):
    """The data ended before the planned step; the next attempt aims at a reachable step."""


class LongError(UserError):
    """A message of many lines by nature: the last words of a failed program, a list of bad rows."""

    most = 20 * LONGEST


def _cut(message: str, most: int) -> str:
    """Return a message of at most `most` characters: first lines, the number of those left out, the last line."""
    if len(message) <= most:
        return message
    width = max(most // 4, (most - 50) // (message.count("\n") + 1)) - 5
    cut = width - width // 4
    parts = [x if len(x) <= width else f"{x[:cut]} ... {x[cut - width :]}" for x in message.split("\n")]
    ends = accumulate((len(line) + 1 for line in parts[:-1]), initial=len(parts[-1]) + 50)
    count = sum(end <= most for end in ends) - 1
    more = [f"  ... and {len(parts) - 1 - count} lines more ..."] if count < len(parts) - 1 else []
    return "\n".join([*parts[:count], *more, parts[-1]])


def printable(text: str) -> str:
    r"""Return a text for a terminal: signs without a picture become escapes such as ``\x1b``, lines and tabs stay."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else _escaped(sign) for sign in text)


def _escaped(sign: str) -> str:
    """Return a character's escape sequence, as Python writes it."""
    return sign.encode("unicode_escape").decode("ascii")


def shortened(text: str, length: int) -> str:
    """Return a text of at most `length` characters, cut with dots."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def explain_refusal(error: OSError) -> str:
    """Return the system's refusal in words; for a permission the owner, the mode and the remedy."""
    path = Path(os.path.realpath(str(error.filename)))
    if not isinstance(error, PermissionError):
        return f"{error.filename}: {error.strerror}"
    parents = [folder for folder in reversed(path.parents) if os.path.lexists(folder)]
    needs = [(folder, "enter", os.X_OK) for folder in (*parents, path) if folder.is_dir()]
    if os.path.lexists(path):
        needs += [(path, "read", os.R_OK), (path, "write to", os.W_OK)]
    needs.append((parents[-1], "write to", os.W_OK))
    barred, verb = next(((place, verb) for place, verb, mode in needs if not os.access(place, mode)), (None, ""))
    if barred is None:
        return f"{error.filename}: {error.strerror}"
    state = barred.stat()
    me, owner, group = user_name(os.geteuid()), user_name(state.st_uid), str(state.st_gid)
    with suppress(KeyError):
        group = grp.getgrgid(state.st_gid).gr_name
    folder = barred if barred.is_dir() else barred.parent
    is_shared = state.st_gid in {os.getegid(), *os.getgroups()}
    regroup = "" if is_shared else f"chgrp -R GROUP {folder} (a group of you both) and "
    return (
        f"{barred}: {me} may not {verb} it: it is {owner}'s, of group {group}, mode {stat.S_IMODE(state.st_mode):04o}; "
        f"let {owner} say {regroup}chmod -R g+rwX {folder}, and all who share the tree umask 002"
    )


def warn(says: object) -> None:
    """Print a warning."""
    print(f"warning: {printable(str(says))}", file=sys.stderr, flush=True)


def user_name(number: int) -> str:
    """Return the name of a user's number, or the number in words."""
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def write_any_text() -> None:
    """Let standard output and error take signs that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")


def run_program(main: Callable[[], int | None]) -> None:
    """Run a command-line program; a UserError ends the program with one message and status 1.

    The status is 75 (EX_TEMPFAIL) for a CutOffError.
    """
    write_any_text()
    try:
        status = main()
        sys.stdout.flush()
    except CutOffError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)
    except UserError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader of the output has gone
        _drop_output()
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.filename is not None:
            sys.exit(f"error: {UserError(explain_refusal(error))}")
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        sys.exit(f"error: {error.strerror}, for the output or for a file; free some, or write to another disk")
    sys.exit(status or 0)


def _drop_output() -> None:
    """Keep Python from writing the rest of the output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
