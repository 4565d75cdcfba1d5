"""Every benchmark still runs: each with `--smoke`, in seconds, which is no measurement."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.long

BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text())


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_runs(benchmark):
    command = [sys.executable, benchmark, "--smoke"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("lacking: "):
        pytest.skip(done.stdout.strip())
    assert done.stdout.strip()
