"""The exceptions that a user is meant to read, and how a program ends with them."""

import os
import signal
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something a person can put right: the message says what, where (file, line, key) and what to do."""


class CutOffError(UserError):
    """Something from outside ended the work (a kill, a lost node): the next attempt may go well."""


class ExhaustedError(CutOffError):
    """The data ended before the step that was aimed at; the next attempt aims at one that can be reached."""


def shortened(text: str, length: int) -> str:
    """A text of at most so many characters, for a message; dots stand for what is left out."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


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
        sys.exit(f"error: {error.filename}: {error.strerror}")
    sys.exit(status or 0)
