"""What benchmarks/kills.py strikes with: a program dies at the planned change of a file, once."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.striking.sitecustomize import __file__ as striker
from benchmarks.striking.sitecustomize import program
from tests.programs import until

PROGRAM = """
from pathlib import Path
for number in (1, 2, 3):
    new = Path("results/new")
    new.write_text(str(number))
    new.rename(f"results/{number}")
"""


@pytest.fixture
def tree(tmp_path):
    """A tree with one program, which makes three files; each is two changes: opened, renamed."""
    for folder in ("results", "scripts", "strikes/plans"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/make.py").write_text(PROGRAM)
    shutil.copy(striker, tmp_path)
    return tmp_path


def run(tree) -> int:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}  # whose renames count, too
    command = [sys.executable, "-m", "scripts.make", "--stage", "results/sft"]
    return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


def made(tree) -> list[str]:
    return sorted(path.name for path in (tree / "results").iterdir())


def test_a_program_dies_just_before_the_planned_change_and_only_once(tree):
    plan = [{"event": 4, "after": None, "signal": "SIGKILL", "target": "program"}]
    (tree / "strikes/plans/make sft.json").write_text(json.dumps(plan))
    assert (run(tree), made(tree)) == (-9, ["1", "new"])
    (struck,) = map(json.loads, (tree / "strikes/struck.jsonl").read_text().splitlines())
    assert (struck["program"], struck["event"]) == ("make sft", "rename results/2")
    assert (run(tree), made(tree)) == (0, ["1", "2", "3"])


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
@pytest.mark.parametrize(("blow", "status"), [("SIGKILL", -9), ("SIGTERM", -15), ("ENOSPC", 1)])
def test_a_program_is_struck_at_the_planned_call_of_the_kernel(tree, blow, status):
    plan = [{"call": "/^rename", "event": 2, "signal": blow, "target": "program"}]
    (tree / "strikes/plans/make sft.json").write_text(json.dumps(plan))
    assert run(tree) == status
    struck = json.loads(until(lambda: "".join(path.read_text() for path in tree.glob("strikes/struck.jsonl")), 20))
    assert (struck["program"], struck["event"]) == ("make sft", "rename() results/2")
    assert (run(tree), made(tree)) == (0, ["1", "2", "3"])


def test_an_undisturbed_program_notes_its_changes(tree):
    (tree / "strikes/events").mkdir()
    assert run(tree) == 0
    (noted,) = (tree / "strikes/events").iterdir()
    assert noted.stem == "make sft"
    events = noted.read_text().splitlines()
    assert events == [line for number in (1, 2, 3) for line in ("open results/new", f"rename results/{number}")]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("python -m scripts.train.run --recipe r --stage rlvr1 --threads 2", "train.run rlvr1"),
        ("python /venv/bin/snakemake --config run=x -- all", "snakemake"),
        ("python /venv/bin/snakemake --report r.html", "snakemake report"),
        ("python -m snakemake --snakefile S --mode remote", "snakemake job"),
        ("python /venv/bin/snakemake -n", None),
        ("python -m pytest", None),
    ],
)
def test_programs_are_known_by_their_command_lines(words, name):
    assert program(words.split()) == name
