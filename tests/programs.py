"""A program of ours run inside the test's own process, which spares the second that a Python needs to start; and waiting."""

import contextlib
import io
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

from scripts.errors import run_program
from scripts.program import run_command_line
from tests.conftest import ROOT


def run(module: str, *arguments: object) -> subprocess.CompletedProcess:
    """What ``python -m module arguments`` in the repository's root would print, and its exit status."""
    words = [str(word) for word in arguments]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", [module, *words]),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main = import_module(module).main
            (run_command_line if signature(main).parameters else run_program)(main)
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status, file=err)
                status = 1
    return subprocess.CompletedProcess([module, *words], status, out.getvalue(), err.getvalue())


def until(condition: Callable[[], Any], seconds: float = 60, told: Callable[[], str] = str) -> Any:
    """Wait for a condition; what it returned. AssertionError, with what is `told` then: it did not come in time."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s; {told()}"
        time.sleep(0.02)
    return result
