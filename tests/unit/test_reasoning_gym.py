"""reasoning_gym: no answer is run, whatever the scorers of the installed package do with it."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from scripts.rewards.environments import reasoning_gym
from scripts.rewards.environments.reasoning_gym import EVALUATED, is_plain

needs_package = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
EVALUATING = {"eval", "exec", "compile", "__import__", "import_module", "parse_expr", "sympify", "S", "lambdify"}
EVALUATING |= {"literal_eval", "parse_latex", "run", "Popen", "system", "load", "safe_load", "unpickle", "getattr"}
# These evaluate what the row says, and no answer.
OF_THE_ROW = {"bitwise_arithmetic", "number_sorting"}
FORGED = [
    "__import__('os').write(3, b'{\"ended\": \"returned\", \"value\": 1.0}') or __import__('os')._exit(0)",
    "[__import__('os')._exit(0)]",
    "().__class__.__base__.__subclasses__()",
    "(lambda: 24)()",
    "[c for c in 'ab']",
    "oracle_answer",
    "answer",
    "f'{1}'",
    "x.diff(x)",
    "S('1')",
    "exp(x=1)",
    "sqrt.__class__",
    "24 if 1 else 0",
    "a := 24",
    "9**9**9",
    "(9**99)**(9*9*99)",
    "9" * 30,
    "(" * 250 + "1" + ")" * 250,
    "-" * 1500 + "1",
    "1" + "+1" * 1500,
    "1j",
    "True",
    "...",
    "b'a'",
    "\x00",
    "\ud800",
    "1\n+1",
    "factorial(99999)",
    "1 << 99",
    "1 // 1",
    "1 @ 1",
    "[1][0]",
    "{1: 1}",
    "*x",
    "1; 1",
]


@pytest.mark.parametrize("task", EVALUATED)
@pytest.mark.parametrize("answer", FORGED)
def test_an_answer_that_is_no_plain_expression_is_worth_nothing_and_reaches_no_scorer(task, answer, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "sandbox", None)
    row = {"question": "", "answer": "x", "metadata": {"source_dataset": task}}
    assert reasoning_gym.verify(row, f"<answer>{answer}</answer>") == 0.0


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "27*(-2 + (5 - 55 + 62)/2)"),
        ("puzzle24", "4/1 + 10 + 10.0"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("string_insertion", "['A', \"B\"]"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("polynomial_multiplication", "-2907*y**4 + 152*y**2 - y"),
        ("simple_integration", "-x**9/4 - 2*x**8 + C"),
        ("intermediate_integration", "x*asin(3*x) + sqrt(1 - 9*x**2)/3 - Integral(x**2*cos(x), x) + C"),
        ("intermediate_integration", "2*(4*x + 2)**(3/2)/3 + exp(-x)*log(Abs(x)) + C"),
    ],
)
def test_an_answer_of_the_tasks_own_kind_is_plain(task, answer):
    assert is_plain(answer, EVALUATED[task], "x + y + C")


def test_variables_are_those_of_the_expected_answer():
    grammar = EVALUATED["simple_integration"]
    assert is_plain("t**2", grammar, "t**2/2 + C") and not is_plain("t**2", grammar, "x**2/2 + C")


def test_a_release_whose_scorers_nobody_read_is_refused(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: True)
    monkeypatch.setattr(reasoning_gym, "version", lambda name: "0.2.0")
    says = reasoning_gym.check({"metadata": {"source_dataset": "countdown"}})
    assert says.startswith("reasoning-gym 0.2.0 is installed") and "envs/reasoning-gym.txt" in says


def _called(function: Any) -> set[str]:
    """The names that a function calls, as it stands in the sources, with the attributes of what it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in functions}


@cache
def _functions_of(module: ModuleType) -> dict[str, list[Any]]:
    """The package's functions and methods that a module knows, by their names."""
    found: dict[str, list[Any]] = {}
    for name, value in vars(module).items():
        if not getattr(value, "__module__", "").startswith("reasoning_gym"):
            continue
        if inspect.isclass(value):
            for method in (one for one in vars(value).values() if inspect.isfunction(getattr(one, "__func__", one))):
                function = getattr(method, "__func__", method)
                found.setdefault(function.__name__, []).append(function)
                if function.__name__ == "__init__":
                    found.setdefault(name, []).append(function)
        elif inspect.isfunction(value):
            found.setdefault(name, []).append(value)
    return found


def _called_outside(scorer: Any) -> Iterator[set[str]]:
    """The names, not of the package's own functions, that a scorer and all that it may reach in the package call."""
    seen, open_ = set(), [scorer]
    while open_:
        function = open_.pop()
        if function in seen:
            continue
        seen.add(function)
        called, known = _called(function), _functions_of(import_module(function.__module__))
        yield called - known.keys()
        open_ += [one for name in called for one in known.get(name, ())]


@needs_package
def test_every_scorer_that_evaluates_is_in_the_table():
    from reasoning_gym.factory import DATASETS

    evaluating = {
        task: sorted(found)
        for task, (dataset, _) in DATASETS.items()
        if (found := {name for called in _called_outside(dataset.score_answer) for name in called & EVALUATING})
    }
    assert set(evaluating) == set(EVALUATED) | OF_THE_ROW, evaluating


@needs_package
def test_right_answers_of_the_tasks_that_evaluate_are_paid():
    import reasoning_gym as package

    for task in EVALUATED:
        for entry in package.create_dataset(task, size=3, seed=1):
            row = json.loads(json.dumps(entry))
            assert reasoning_gym.check(row) is None
            assert reasoning_gym.verify(row, f"<answer>{row['answer']}</answer>") == 1.0, (task, row["answer"])
