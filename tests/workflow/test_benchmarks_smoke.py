"""Every benchmark still runs: each with `--smoke`, in seconds, which is no measurement."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPTS = ("handover", "parity", "real_chain", "recipes")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_runs(script):
    command = [sys.executable, f"benchmarks/{script}.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
