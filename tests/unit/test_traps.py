"""docs/traps.md: every trap once, every test that it names is there, and what is looked for beforehand is said to be."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

KINDS = {"prevented", "caught beforehand", "survived", "reported", "not ours", "not yet"}
CHECKS_OF_NEMO_RL = tuple(
    f"scripts/backends/nemo_rl/checks/{name}.py" for name in ("__init__", "sums", "places", "silent")
)
LOOKING = (*CHECKS_OF_NEMO_RL, "scripts/commands/checks.py", "scripts/backends/trl/checks.py")
NAMED = re.compile(r"`(tests/\w+/\w+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """The table's cells: number, trap, kind, how, test."""
    lines = (ROOT / "docs/traps.md").read_text().partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if re.match(r"\| \d", line)]


def traps_told(path: Path) -> set[int]:
    """The trap numbers that a module's findings bear."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    numbers = [key.value for call in calls for key in call.keywords if key.arg == "trap"]
    numbers += [call.args[0] for call in calls if getattr(call.func, "attr", None) in ("error", "warning")]
    return {number.value for number in numbers if isinstance(number, ast.Constant)}


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_traps_are_there_once_each_in_order():
    assert [int(cells[0]) for cells in rows()] == [*range(1, 51), 58, *range(64, 75), *range(76, 108)]
    for cells in rows():
        assert len(cells) == 5 and all(cells), cells[0]
        assert cells[2] in KINDS, cells[0]


def test_every_trap_has_a_test_or_a_reason_why_not():
    for number, _, _, _, shown in rows():
        assert NAMED.search(shown) or shown.startswith("none: "), number


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall((ROOT / "docs/traps.md").read_text()))))
def test_every_test_that_is_named_is_there(file, name):
    assert name.startswith("test_") and name in functions_of(ROOT / file)


@pytest.mark.parametrize("module", LOOKING)
def test_what_is_looked_for_is_said_to_be_caught_beforehand(module):
    kinds = {int(cells[0]): cells[2] for cells in rows()}
    told = traps_told(ROOT / module)
    assert told and {kinds[trap] for trap in told} == {"caught beforehand"}
