"""The first command a newcomer types answers clearly when the machine is not fit."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


def make(python: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """`make setup` in an empty copy with another Python."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    return subprocess.run(
        ["make", "setup", f"PYTHON={python}"], cwd=tmp_path, text=True, capture_output=True, check=False
    )


def old_pythons() -> list[str]:
    """Interpreters on this machine that are older than 3.11."""
    names = [shutil.which(f"python3.{minor}") for minor in range(6, 11)]
    managed = [str(path) for path in Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python3")]
    works = lambda path: subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0  # noqa: E731
    return [path for path in [*names, *managed] if path and works(path)]


@pytest.mark.slow
def test_a_python_too_old_is_refused_before_anything_is_made(tmp_path):
    if not (found := old_pythons()):
        pytest.skip("no Python older than 3.11 on this machine")
    done = make(found[0], tmp_path)
    assert done.returncode != 0
    assert "Stagecoach needs Python 3.11 or later: make PYTHON=python3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_missing_python_is_named(tmp_path):
    done = make("python9.99", tmp_path)
    assert done.returncode != 0
    assert "error: no python9.99 here; install Python 3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()
