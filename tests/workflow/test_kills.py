"""A short run of the killer; the long one, with its figures, is benchmarks/kills.py."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT


def test_a_chain_that_is_struck_at_random_ends_with_the_quiet_runs_weights():
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [sys.executable, "benchmarks/kills.py", "--strikes", "2", "--seed", "7"],
        cwd=ROOT,
        env={"PATH": path, "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| published weights equal to the undisturbed run's | all | all |" in done.stdout
