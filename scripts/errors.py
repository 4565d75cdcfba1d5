"""The one exception that a user is meant to read, and how a program ends with it."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something a person can put right: the message says what, where (file, line, key) and what to do."""


def run_program(main: Callable[[], int | None]) -> None:
    """Run a command-line program; a UserError ends it with one message and status 1, without a traceback."""
    try:
        status = main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    sys.exit(status or 0)
