"""reasoning_gym: the task's own scorer judges the answer (Stojanovski et al., "Reasoning Gym", arXiv:2505.24760).

The scorers are those of the package reasoning-gym (envs/reasoning-gym.txt). They may take for ever, so each runs in a
confined process (`scripts.rewards.sandbox`). Nine evaluate the answer as Python: these are asked only about one that is
a plain expression of its task's grammar, so that no answer is ever run, and none can write its own score.
"""

import ast
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import isfinite, prod
from typing import Any, NamedTuple

from msgspec import Struct

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.row import PromptRow, Text
from scripts.rewards.sandbox import sandbox
from scripts.rewards.spec import Answers, EnvironmentSpec
from scripts.rewards.verdict import NotJudged, value_of

SECONDS = 10.0
RELEASE = "0.1.25"  # whose scorers were read for EVALUATED


class Grammar(NamedTuple):
    """What an answer that is evaluated may hold: kinds of Python's syntax, types of constants, names of functions."""

    nodes: tuple[type[ast.AST], ...]
    constants: tuple[type, ...]
    functions: frozenset[str] = frozenset()


_LIST = Grammar((ast.List, ast.Tuple, ast.Load, ast.Constant), (int, str))
_SUM_NODES = (ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub, ast.Constant)
_SUM = Grammar(_SUM_NODES, (int, float))
_FUNCTIONS = ["sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh"]
_FUNCTIONS += ["acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "Integral", "erf", "Si", "Ci", "Ei", "E", "pi"]
_FORMULA = Grammar(
    (*_SUM_NODES, ast.Pow, ast.Call, ast.Name, ast.Load),
    (int, float),
    frozenset(_FUNCTIONS),
)
EVALUATED = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LIST),
    **dict.fromkeys(("countdown", "puzzle24"), _SUM),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _FORMULA),
}
LONGEST, DIGITS, DEPTH, GROWTH = 2000, 30, 50, 1000


class Puzzle(Struct):
    """``metadata`` of a puzzle: which scorer knows it."""

    source_dataset: Text


class ReasoningGymRow(PromptRow, kw_only=True):
    """reasoning_gym: the puzzle's own scorer."""

    question: str
    answer: str | None
    metadata: Puzzle


def verify(row: dict[str, Any], response: str) -> float:
    """What the scorer of ``metadata.source_dataset`` gives the answer, 0 to 1.

    The answer is what stands in the last answer tags, else in the first box, else the whole text. It is worth 0.0 where
    its task evaluates it (`EVALUATED`) and it is neither the expected text nor a plain expression.
    """
    entry = {"question": row["question"], "answer": row.get("answer"), "metadata": row["metadata"]}
    answer = answer_of(response)
    grammar = EVALUATED.get(row["metadata"]["source_dataset"])
    if grammar and answer not in _expected(entry) and not is_plain(answer, grammar, row.get("answer") or ""):
        return 0.0
    scorer = sandbox("scripts.rewards.environments.reasoning_gym:score", "reasoning_gym")
    outcome = scorer.call(answer, entry, seconds=SECONDS)
    if outcome.ended == "raised":  # as several scorers do with any answer of another form
        return 0.0
    reward = value_of(outcome)
    if not isfinite(reward):
        raise NotJudged(f"a score of {reward}")
    return min(max(reward, 0.0), 1.0)


def _expected(entry: dict[str, Any]) -> list[str]:
    """The texts that a scorer knows as right without evaluating them."""
    return [str(text).strip() for text in (entry["answer"], *entry["metadata"].get("valid_answers", ()))]


def is_plain(answer: str, grammar: Grammar, expected: str) -> bool:
    """Whether an answer is an expression of a grammar, not too large; its variables are those of the expected one."""
    if len(answer) > LONGEST or re.search(rf"\d{{{DIGITS}}}", answer):
        return False
    try:
        tree = ast.parse(answer, mode="eval").body
        plain = all(_is_of(node, grammar, frozenset(re.findall(r"[A-Za-z]\w*", expected))) for node in ast.walk(tree))
        return plain and _depth(tree) <= DEPTH and _growth(tree) <= GROWTH
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        return False


def _is_of(node: ast.AST, grammar: Grammar, variables: frozenset[str]) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in grammar.constants
    if isinstance(node, ast.Name):
        return node.id in grammar.functions | variables
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in grammar.functions and not node.keywords
    return isinstance(node, grammar.nodes)


def _depth(node: ast.AST) -> int:
    return 1 + max(map(_depth, ast.iter_child_nodes(node)), default=0)


def _growth(node: ast.AST) -> float:
    """How long the numbers may become that a formula is worked out to: the product of exponents upon exponents."""
    inner = max(map(_growth, ast.iter_child_nodes(node)), default=1.0)
    if not isinstance(getattr(node, "op", None), ast.Pow):
        return inner
    exponent = list(ast.walk(node.right))
    if any(isinstance(part, ast.Pow) for part in exponent):
        return float("inf")
    numbers = [abs(part.value) for part in exponent if isinstance(part, ast.Constant)]
    return inner * max(1.0, sum(numbers), prod(numbers))


def check(row: dict[str, Any]) -> str | None:
    """Why no answer could be scored, or None."""
    if find_spec("reasoning_gym") is None:
        return "the package reasoning-gym is not installed: pip install --no-deps --requirement envs/reasoning-gym.txt"
    if version("reasoning-gym") != RELEASE:
        return (
            f"reasoning-gym {version('reasoning-gym')} is installed, and only of {RELEASE} is it known which scorers "
            "evaluate an answer: pip install --no-deps --requirement envs/reasoning-gym.txt"
        )
    name = row["metadata"].get("source_dataset")
    if name not in _datasets():
        return f"metadata.source_dataset {name!r} is no task of reasoning-gym"
    return unavailable()


def answer_of(response: str) -> str:
    """The part of a response that is its answer."""
    answer, rest = None, response
    while "<answer>" in rest:
        inside, closed, rest = rest.partition("<answer>")[2].partition("</answer>")
        answer = inside if closed else answer
    return (answer if answer is not None else _first_boxed(response) or response).strip()


def _first_boxed(text: str) -> str | None:
    """What stands in the first box that is not empty, to its first closing brace."""
    start = text.find(r"\boxed{")
    while start >= 0 and (end := text.find("}", start)) >= 0:
        if inside := text[start + len(r"\boxed{") : end]:
            return inside
        start = text.find(r"\boxed{", end)
    return None


def score(answer: str, entry: dict[str, Any]) -> float:
    """The task's score of an answer."""
    import reasoning_gym  # noqa: PLC0415 - optional, and seconds to import

    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))


@cache
def _datasets() -> frozenset[str]:
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415

    return frozenset(DATASETS)


def answers(row: dict[str, Any]) -> Answers:
    """Scorers pay any answer at all a little, so without a right one nothing says what too much is."""
    if not isinstance(row.get("answer"), str):
        return Answers(any_text_is_right=True)
    right = f"<answer>{row['answer']}</answer>"
    return Answers(
        right, allowed={"words before the right answer": f"I think it is {right}"}, other_rows_are_wrong=False
    )


ENVIRONMENTS = {
    Environment.REASONING_GYM: EnvironmentSpec(ReasoningGymRow, verify, check=check, confined=True, answers=answers)
}
