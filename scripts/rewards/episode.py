"""A rollout of several turns: the environment in which a policy calls tools, in TRL's protocol, and what became of it.

An environment's class has ``reset(**row)``, which may return text to be added to the prompt; its other public methods
are the tools; ``get_reward()``, if it is there, says what the rollout has earned.
"""

import inspect
import json
import threading
from collections.abc import Callable
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any

from scripts.errors import UserError
from scripts.rewards.verdict import NotJudged

Row = dict[str, Any]
Fault = Callable[[str, BaseException | str, Row], UserError]
PROTOCOL = ("reset", "get_reward")
TOOL_SECONDS = 10.0


class Episode:
    """An environment as TRL's trainer takes it; `episode_class` adds the tools.

    Each rollout has an object of the environment's class to itself, made when it is reset, so nothing is left over from
    another rollout, and a training that was resumed goes as one that was not. A tool that raises tells the policy why.
    """

    _kind: type
    _seconds: float
    _fault: Fault

    def reset(self, row: str, **_: Any) -> Any:
        """Begin a rollout of a row, given as JSON; what is returned is added to the prompt."""
        self._row, self._broken, self._late = json.loads(row), None, None
        self._object = self._asked("reset", self._kind)
        seen = self._asked("reset", partial(self._object.reset, **self._row))
        if not isinstance(seen, str | list | None):
            raise self._fault("reset", f"returned {seen!r} instead of text for the prompt, or None", self._row)
        return seen

    def _reward(self) -> Any:
        """What the rollout has earned; NotJudged where a tool did not return."""
        if self._late:
            raise NotJudged(self._late)
        return self._asked("get_reward", self._object.get_reward)

    def _asked(self, name: str, function: Callable[[], Any]) -> Any:
        """What the environment's own code returns; UserError where it fails."""
        try:
            return _WORKER.call(function, self._seconds)
        except (Exception, SystemExit) as error:
            raise self._fault(name, error, self._row) from error

    def _call(self, name: str, function: Callable[[], Any]) -> Any:
        """What a tool returns; what its own code did wrong, whatever the policy asked for, is raised at the end."""
        if self._late:
            raise TimeoutError(self._late)
        try:
            return _WORKER.call(function, self._seconds)
        except TooLate:
            self._late = f"{name} took more than {self._seconds:g} s"
            raise TimeoutError(self._late) from None
        except (NameError, ImportError, SystemExit) as error:
            self._broken = self._fault(name, error, self._row)
            raise RuntimeError(str(error)) from error
        except AttributeError as error:
            if error.obj is self._object:
                self._broken = self._fault(name, error, self._row)
            raise


def episode_class(kind: type, seconds: float, fault: Fault) -> type[Episode]:
    """The class of episodes in an environment's class; no tool may take more than so many seconds.

    `fault` makes the error of a method that failed: by its name, what it did wrong, and the row.
    """

    def tool(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Episode, *arguments: Any, **named: Any) -> Any:
            return self._call(name, partial(getattr(self._object, name), *arguments, **named))

        return call

    tools = {name: tool(name, method) for name, method in tools_in(kind).items()}
    return type(kind.__name__, (Episode,), {"_kind": kind, "_seconds": seconds, "_fault": staticmethod(fault), **tools})


def tools_in(kind: type) -> dict[str, Callable[..., Any]]:
    """The tools of an environment's class, by name, as TRL finds them."""
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    return {name: method for name, method in methods.items() if not name.startswith("_") and name not in PROTOCOL}


def tools_of(episode: Episode) -> list[Callable[..., Any]]:
    """The tools of a rollout."""
    return [getattr(episode, name) for name in tools_in(type(episode))]


class EpisodeResponse(str):
    """What a policy said last in a rollout with tools; its episode, and all messages since the prompt."""

    episode: Episode
    messages: list[dict[str, Any]]

    @property
    def reward(self) -> Any:
        """What the environment itself says that the rollout has earned; NotJudged where it cannot."""
        return self.episode._reward()


def whole_text(response: str) -> str:
    """A response for reading; of several turns all."""
    if not isinstance(response, EpisodeResponse):
        return response
    lines = []
    for message in response.messages:
        if message["role"] == "tool":
            lines.append(f"-> {message['content']}")
            continue
        lines += [message["content"]] if message["content"] else []
        for call in message.get("tool_calls") or ():
            name, given = call["function"]["name"], call["function"]["arguments"]
            if isinstance(given, dict):
                given = ", ".join(f"{key}={json.dumps(value)}" for key, value in given.items())
            lines.append(f"{name}({given})")
    return "\n".join(lines)


def episode_response(messages: list[dict[str, Any]], episode: Episode) -> EpisodeResponse:
    """A rollout that has ended; UserError where the environment's own code failed in it."""
    if episode._broken is not None:
        raise episode._broken
    said = EpisodeResponse(messages[-1]["content"] if messages[-1]["role"] == "assistant" else "")
    said.episode, said.messages = episode, messages
    return said


class TooLate(Exception):
    """A call did not return in time."""


class _Worker:
    """One thread that calls whatever environments have functions of; where one hangs, another takes its place."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue | None = None

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What the function returns or raises; TooLate when it does neither in time."""
        if self._tasks is None:
            self._tasks = SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), daemon=True, name="environment").start()
        outcome: list[tuple[Any, BaseException | None]] = []
        done = threading.Event()
        self._tasks.put((function, outcome, done))
        if not done.wait(seconds):
            self._tasks = None
            raise TooLate(f"took more than {seconds:g} s")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value


def _work(tasks: SimpleQueue) -> None:
    while True:
        function, outcome, done = tasks.get()
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))
        done.set()


_WORKER = _Worker()
