"""A user's environment: a Python file with functions that reward the rows of the environment's name.

``verify(row, response)`` scores a response from 0 to 1. Optional: ``compare(row, responses)`` rewards all rollouts of
a prompt together, in place of ``verify`` in training; ``check(row)`` says why a row cannot be rewarded;
``good_answer(row)`` gives an answer worth the full reward; ``tags(row)`` lists texts to break scores down by;
``metrics(row, response)`` returns numbers by name, which are logged and earn nothing. A class of TRL's protocol
(`scripts.rewards.episode`) has tools for several turns, and an optional ``get_reward()`` in place of ``verify``. The
file is the user's code and runs in the rewarding process. Each call gets a copy of the row, and has a limit of time,
`RESPONSE_SECONDS` or the file's ``response_timeout``.
"""

import ast
import inspect
import json
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import islice
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.errors import UserError, warn
from scripts.python_files import known_hash, parsed
from scripts.rewards.episode import PROTOCOL, TOOL_SECONDS, Episode, EpisodeResponse, episode_class, tools_in
from scripts.rewards.numbers_by_name import NumberReader, Numbers, number_of, printable, shown
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.time_limits import TooLate, time_limit
from scripts.rewards.verdict import EnvironmentFault, NoReward
from scripts.rows.messages import Row, shown_question

FUNCTIONS = ("verify", "compare", "check", "good_answer", "tags", "metrics")
RESPONSE_SECONDS = 120.0
"""A call for one response may take so long, where the file says nothing else."""
LATE_IN_A_ROW = 3
"""After so many calls of a function in a row that took too long, the function is at fault and not the responses."""
LACKS = "defines no function verify(row, response), nor a class with reset() and get_reward()"


def check_text(name: str, path: Path) -> None:
    """Raise UserError for a file that is no Python or lacks the functions, as far as the text tells; run no line."""
    try:
        tree = parsed(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"environment {name}: {_place_and_cause(path, error)}") from None
    defined = {
        getattr(node, "asname", None) or getattr(node, "name", getattr(node, "id", None)): node
        for node in _outside_bodies(tree.body)
    }
    verify, kinds = defined.get("verify"), [node for node in defined.values() if isinstance(node, ast.ClassDef)]
    if isinstance(verify, ast.FunctionDef) and verify.args.vararg is None:
        given = [each.arg for each in verify.args.posonlyargs + verify.args.args]
        if len(given) < 2:
            at = f"environment {name}: {path}:{verify.lineno}"
            raise UserError(f"{at}: verify takes ({', '.join(given)}), not (row, response)")
    methods = [{getattr(each, "name", None) for each in kind.body} for kind in kinds]
    inherits = any(kind.bases or kind.decorator_list for kind in kinds)
    if not {"verify", "*"} & defined.keys() and not inherits and not any({*PROTOCOL} <= each for each in methods):
        raise UserError(f"environment {name}: {path}: {LACKS}")


def _outside_bodies(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _outside_bodies(ast.iter_child_nodes(node))


def _place_and_cause(path: Path, error: BaseException) -> str:
    what = "".join(traceback.format_exception_only(error)[-1:]).strip()
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}: {what}"
    line = _line_in(path, error)
    return f"{path}:{line}: {what}" if line else f"{path}: {what}"


def _line_in(path: Path, error: BaseException) -> int | None:
    """Return the innermost line of a file that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def _taken(values: Any, most: int) -> Any:
    """Return at most so many of some values as a list; a text, or what has no values, as it is."""
    is_several = hasattr(values, "__iter__") and not isinstance(values, str)
    return list(islice(values, most)) if is_several else values


def _is_same(given: Row, row: Row) -> bool:
    """Whether a row is as it was given; NaN in it is the same as NaN."""
    try:
        return given == row or json.dumps(given) == json.dumps(row)
    except Exception:  # it holds now what has no JSON, or cannot be compared
        return False


class OwnEnvironment:
    """The functions of an environment's file; mistakes are UserErrors with the file and the row."""

    def __init__(self, name: str, path: Path, expected: str | None = None) -> None:
        """Load the file; UserError when loading fails, or for an unexpected SHA-256."""
        self._name, self._path = name, path
        module = self._load(expected)
        kind = self._class_of(module)
        self.reads_response = not hasattr(kind, "get_reward")
        self._functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
        self._own_seconds = self._seconds_of(module)
        self._seconds = self._own_seconds or RESPONSE_SECONDS
        self._numbers = NumberReader()
        self._late: dict[str, int] = {}
        self._changing: set[str] = set()
        if self.reads_response and "verify" not in self._functions:
            raise self._refusal(LACKS)
        if not self.reads_response and (twice := self._functions.keys() & {"verify", "compare"}):
            raise self._refusal(f"rewards by get_reward() and by {min(twice)}(); drop one")
        self.environment_factory = self._factory_of(kind) if kind else None

    def verify(self, row: Row, response: str) -> float:
        """Score one response from 0 to 1; without an episode, ``get_reward()`` scores a rollout without a deed.

        EnvironmentFault where the code fails; NoReward where it returns None or anything but a number from 0 to 1.
        """
        if self.reads_response:
            name, value = "verify", self._call("verify", row, response)
        else:
            if isinstance(response, EpisodeResponse):
                episode = response.episode
            else:
                episode = self.environment_factory()
                episode.reset(json.dumps(row))
            name = "get_reward"
            try:
                value = episode._reward()
            except UserError as error:
                raise EnvironmentFault(str(error)) from error
        value = self._number(name, value, row)
        if not 0 <= value <= 1:
            raise self._fault(name, f"returned {shown(value)}, which is not from 0 to 1", row, NoReward)
        return value

    def compare(self, row: Row, responses: list[str]) -> list[float]:
        """Return the rewards of one prompt's rollouts, in order."""
        count = len(responses)
        # one value more than there should be tells that they are too many, and that they do not end
        values = self._call("compare", row, list(responses), count=count, read=partial(_taken, most=count + 1))
        if not isinstance(values, list):
            raise self._fault("compare", f"returned {shown(values)} instead of a list of rewards", row, NoReward)
        values = [self._number("compare", value, row) for value in values]
        if len(values) != len(responses):
            several = f"{len(values)}" if len(values) < count else f"more than {count}"
            says = f"returned {several} rewards for {count} responses"
            raise self._fault("compare", says, row, NoReward)
        return values

    def tags(self, row: Row) -> list[str]:
        """Return the tags of a row, by which held-out scores are broken down."""
        tags = self._call("tags", row) if "tags" in self._functions else []
        if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) for tag in tags):
            raise self._fault("tags", f"returned {shown(tags)} instead of a list of texts", row)
        return list(dict.fromkeys(map(printable, tags)))

    def metrics(self, row: Row, response: str) -> Numbers:
        """Return the numbers of a response by name, which earn nothing, and what is left out since it is no number.

        After some calls in a row that took too long, the function is asked no more.
        """
        if "metrics" not in self._functions or self._late.get("metrics", 0) >= LATE_IN_A_ROW:
            return Numbers()
        values = self._call("metrics", row, response, read=self._read_numbers)
        if not isinstance(values, Numbers):
            raise self._fault("metrics", f"returned {shown(values)} instead of numbers by name", row)
        asks = f"(the row that asks {shown_question(row)!r})"
        where = f"environment {self._name}: metrics of {self._path}"
        values.left_out = [f"{where} {why} {asks}" for why in values.left_out]
        return values

    def _read_numbers(self, values: Any) -> Any:
        return self._numbers.read(values) if isinstance(values, dict) else values

    def spec(self) -> EnvironmentSpec:
        """Describe the environment."""
        return EnvironmentSpec(
            verify=self.verify,
            compare=self.compare if "compare" in self._functions else None,
            check=partial(self._text, "check"),
            answer=partial(self._text, "good_answer"),
            tags=self.tags,
            metrics=self.metrics,
            environment_factory=self.environment_factory,
            reads_response=self.reads_response,
            file=self._path,
            has_own_check="check" in self._functions,
            seconds=self._own_seconds,
        )

    def _load(self, expected: str | None) -> ModuleType:
        try:
            source = self._path.read_bytes()
        except OSError as error:
            raise UserError(f"environment {self._name}: {self._path}: {error.strerror}") from None
        is_other = expected not in (None, sha256(source).hexdigest()) and known_hash(source) != expected
        if is_other:
            raise UserError(
                f"environment {self._name}: {self._path} has changed since the stage was planned; start again to train "
                "with the new text"
            )
        name = f"own_environment_{sha256(self._name.encode()).hexdigest()[:16]}"
        loader = SourceFileLoader(name, str(self._path))
        module = sys.modules[name] = module_from_spec(spec_from_loader(name, loader))
        try:
            exec(loader.source_to_code(source, str(self._path)), module.__dict__)  # noqa: S102
        except (Exception, SystemExit) as error:
            raise UserError(f"environment {self._name}: {_place_and_cause(self._path, error)}") from error
        return module

    def _class_of(self, module: ModuleType) -> type | None:
        """Return the class of the rollouts; None where a response is one message."""
        classes = [
            kind
            for name, kind in vars(module).items()
            if inspect.isclass(kind) and kind.__module__ == module.__name__
            if not name.startswith("_") and hasattr(kind, "reset")
        ]
        if len(classes) > 1:
            names = ", ".join(kind.__name__ for kind in classes)
            raise self._refusal(f"defines several classes with reset() ({names}); leave it one")
        return classes[0] if classes else None

    def _factory_of(self, kind: type) -> type[Episode]:
        from transformers.utils import get_json_schema  # noqa: PLC0415 - only where there are tools

        tools = tools_in(kind)
        if not tools:
            raise self._refusal(f"class {kind.__name__} has no tool: no public method but {' and '.join(PROTOCOL)}")
        seconds = getattr(kind, "tool_timeout", TOOL_SECONDS)
        if not isinstance(seconds, Real) or not seconds > 0:
            raise self._refusal(f"{kind.__name__}.tool_timeout is {seconds!r} instead of a number of seconds")
        factory = episode_class(kind, float(seconds), self._fault)
        for name, method in tools.items():
            if inspect.iscoroutinefunction(method):
                raise self._refusal(f"{kind.__name__}.{name} is async; make it a plain method")
            try:
                get_json_schema(getattr(factory(), name))
            except Exception as error:
                raise self._refusal(f"{kind.__name__}.{name} cannot be shown to a model: {error}") from error
        return factory

    def _seconds_of(self, module: ModuleType) -> float | None:
        """Return the seconds that a call may take by the file; None where it says nothing."""
        seconds = getattr(module, "response_timeout", None)
        if seconds is None:
            return None
        if not isinstance(seconds, Real) or not seconds > 0:
            raise self._refusal(f"response_timeout is {shown(seconds)} instead of a number of seconds")
        return float(seconds)

    def _call(
        self, name: str, row: Row, *arguments: Any, count: int = 1, read: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """Call a function for `count` responses with a copy of the row, within the time; `read` takes what it returns.

        EnvironmentFault where the code fails, NoReward where it takes too long. UserError where it does so again and
        again.
        """
        seconds = self._seconds * max(1, count)
        try:
            with time_limit(seconds):
                given = pickle.loads(pickle.dumps(row))  # noqa: S301 - a copy, several times as fast as deepcopy
                value = read(self._functions[name](given, *arguments))
        except TooLate as error:
            raise self._too_late(name, error, row) from error
        except (Exception, SystemExit) as error:
            raise self._fault(name, error, row, EnvironmentFault) from error
        self._late[name] = 0
        if name not in self._changing and not _is_same(given, row):
            self._changing.add(name)
            line = getattr(getattr(self._functions[name], "__code__", None), "co_firstlineno", "?")
            warn(
                f"environment {self._name}: {name} of {self._path}:{line} changes the row that it is given; each call "
                "gets a copy, so no other call sees the change"
            )
        return value

    def _too_late(self, name: str, error: TooLate, row: Row) -> UserError:
        """Return the error of a call that took too long, which is a reason to end after some in a row."""
        late = self._late[name] = self._late.get(name, 0) + 1
        line = _line_in(self._path, error)
        says = f"{error}, and was in line {line}" if line else str(error)
        if late < LATE_IN_A_ROW:
            return self._fault(name, says, row, NoReward)
        return self._fault(
            name,
            f"{says}, as {late} calls in a row did; say response_timeout = SECONDS in the file to wait longer",
            row,
        )

    def _text(self, name: str, row: Row) -> str | None:
        value = self._call(name, row) if name in self._functions else None
        if value is not None and not isinstance(value, str):
            raise self._fault(name, f"returned {shown(value)}, which is neither a text nor None", row)
        return value

    def _number(self, name: str, value: Any, row: Row) -> float:
        number = number_of(value) if isinstance(value, Real) else None
        if number is None:
            raise self._fault(name, f"returned {shown(value)}, which is no finite number", row, NoReward)
        return number

    def _refusal(self, says: str) -> UserError:
        return UserError(f"environment {self._name}: {self._path}: {says}")

    def _fault(self, name: str, error: BaseException | str, row: Row, kind: type[UserError] = UserError) -> UserError:
        says = error if isinstance(error, str) else f"raised at {_place_and_cause(self._path, error)}"
        asks = shown_question(row)
        return kind(f"environment {self._name}: {name} of {self._path} {says} (the row that asks {asks!r})")
