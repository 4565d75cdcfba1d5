"""A program of ours run inside the test's own process, which spares the second that a Python needs to start."""

import contextlib
import io
import runpy
import subprocess
import sys
from unittest.mock import patch

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
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = 0 if end.code is None else end.code
            if isinstance(status, str):
                print(status, file=err)
                status = 1
    return subprocess.CompletedProcess([module, *words], status, out.getvalue(), err.getvalue())
