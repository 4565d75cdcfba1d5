"""code_gen: the last code block of the response passes all unit tests (LiveCodeBench's format, arXiv:2403.07974).

Every test runs the Python program anew in a confined process (`scripts.rewards.sandbox`) of 10 seconds and 4 GiB. The
process gets the input alone; outputs and returned values are compared outside.
"""

import atexit
import contextlib
import json
import math
import threading
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.sandbox import MEBIBYTE, sandbox
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.verdict import NotJudged
from scripts.rows.request import PromptRow, broken, parse

SECONDS = 10.0
_NAMED = ["string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"]
_NAMED += ["itertools", "functools", "operator", "io", "sys", "json"]
_STARRED = [*_NAMED, "builtins", "typing"]
_PRELUDE = "".join(f"from {module} import *\n" for module in _STARRED)
_PRELUDE += f"import {', '.join(_NAMED)}\nsys.setrecursionlimit(50000)\n"


class UnitTests(Struct):
    """Inputs of a program, and the outputs or returned values to expect."""

    inputs: Annotated[list[str], Meta(min_length=1)]
    outputs: list[str]
    fn_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse inputs without outputs, and arguments or results of a function that are no JSON."""
        if len(self.inputs) != len(self.outputs):
            raise broken("outputs", f"has {len(self.outputs)} entries for {len(self.inputs)} inputs")
        if self.fn_name is not None:
            for place, (given, result) in enumerate(zip(self.inputs, self.outputs, strict=True)):
                for line in given.split("\n"):
                    parse(line, f"inputs[{place}]")
                parse(result, f"outputs[{place}]")


class ProgramTests(Struct):
    """``verifier_metadata`` of a programming task."""

    unit_tests: UnitTests


class CodeGenRow(PromptRow, kw_only=True):
    """code_gen: the last code block passes all tests."""

    verifier_metadata: ProgramTests


def verify(row: dict[str, Any], response: str) -> float:
    """Return 1.0 if the program passes all of ``verifier_metadata.unit_tests``, else 0.0.

    Without ``fn_name`` a test is standard input and expected output, compared by lines, as text or else as numbers.
    With ``fn_name``, a test is the arguments, one JSON value a line, and the value to expect of the function or the
    method of a class ``Solution``. A missing code block or a ``<think>`` in the answer is 0.0, and so are several in
    the thoughts, and a program that fails, dies or takes too long. NotJudged where the process was lost.
    """
    lines = response.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    code = "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""
    if not code or "<think>" in response or "</think>" in response:
        return 0.0
    thoughts = "".join(getattr(response, "thoughts", ()))
    if thoughts.count("<think>") > 1 or thoughts.count("</think>") > 1:
        return 0.0
    tests = row["verifier_metadata"]["unit_tests"]
    cases = zip(tests["inputs"], tests["outputs"], strict=True)
    return float(all(_passes(code, tests.get("fn_name"), given, expected) for given, expected in cases))


def _passes(code: str, name: str | None, given: str, expected: str) -> bool:
    function, arguments = "run_program", [code]
    if name:
        function, arguments = "call_function", [code, name, [json.loads(line) for line in given.split("\n")]]
    confined = sandbox(f"scripts.rewards.environments.code_gen:{function}", *_STARRED)
    size = MEBIBYTE + 8 * len(expected.encode())  # white space and digits may be more than is expected
    outcome = confined.call(*arguments, stdin="" if name else given, seconds=SECONDS, size=size)
    if outcome.ended == "lost":
        raise NotJudged(f"lost: {outcome.error}")
    if outcome.ended != "returned":
        return False
    return same_value(outcome.value, json.loads(expected)) if name else same_output(outcome.output, expected)


def same_output(output: str, expected: str) -> bool:
    """Compare two outputs line by line, white space aside; lines of numbers go by value."""
    output, expected = output.strip(), expected.strip()
    if output.count("\n") != expected.count("\n"):  # a text of nothing but line ends is not split
        return False
    return all(map(_same_line, output.split("\n"), expected.split("\n")))


def _same_line(line: str, expected: str) -> bool:
    if line.strip() == expected.strip():
        return True
    try:
        return [*map(Decimal, line.split())] == [*map(Decimal, expected.split())]
    except InvalidOperation:
        return False


def same_value(value: Any, expected: Any) -> bool:
    """Compare two JSON values; numbers, or texts of numbers, may differ by 1e-5 of the expected value."""
    if value == expected or json.dumps(value) == json.dumps(expected):
        return True
    try:
        return math.isclose(float(value), float(expected), rel_tol=0, abs_tol=1e-8 + 1e-5 * abs(float(expected)))
    except (TypeError, ValueError, OverflowError):
        return False


def run_program(code: str) -> None:
    """Run the text of a program as Python runs a file."""
    atexit._clear()
    with contextlib.suppress(SystemExit):
        _execute(code)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def call_function(code: str, name: str, arguments: list[Any]) -> Any:
    """Call a function of a program, or of a class Solution, and return a JSON value."""
    names = _execute(code)
    function = getattr(names["Solution"](), name) if "class Solution" in code else names[name]
    value = function(*arguments)
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return float(value)


def _execute(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_PRELUDE, names)
    exec(compile(code, "program.py", "exec"), names)
    return names


ENVIRONMENTS = {Environment.CODE_GEN: EnvironmentSpec(CodeGenRow, verify, check=lambda row: unavailable(), waits=True)}
