"""A rollout of several turns, in which a policy calls an environment's tools by TRL's protocol.

An environment's class has ``reset(**row)``, which may return text for the prompt; further public methods are tools; an
optional ``get_reward()`` returns the rollout's reward.
"""

import inspect
import json
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from scripts.errors import UserError
from scripts.rewards.response import as_text
from scripts.rewards.time_limits import TooLate, time_limit
from scripts.rewards.verdict import NotJudged

Row = dict[str, Any]
Fault = Callable[[str, BaseException | str, Row], UserError]
PROTOCOL = ("reset", "get_reward")
TOOL_SECONDS = 10.0


class Episode:
    """An environment for TRL's trainer; `episode_class` adds the tools.

    ``reset`` makes an object of the environment's class, so nothing is left over from an earlier rollout, and a resumed
    training goes as an uninterrupted one. A tool that raises tells the policy why.
    """

    _kind: type
    _seconds: float
    _fault: Fault

    def reset(self, row: str, **_: Any) -> Any:
        """Begin a rollout of a row, given as JSON; return text for the prompt, or None."""
        self._row, self._broken, self._late = json.loads(row), None, None
        self._object = self._asked("reset", self._kind)
        seen = self._asked("reset", partial(self._object.reset, **self._row))
        if not isinstance(seen, str | list | None):
            raise self._fault("reset", f"returned {seen!r} instead of text for the prompt, or None", self._row)
        return seen

    def _reward(self) -> Any:
        """Return the rollout's reward; NotJudged where a tool did not return."""
        if self._late:
            raise NotJudged(self._late)
        return self._asked("get_reward", self._object.get_reward)

    def _asked(self, name: str, function: Callable[[], Any]) -> Any:
        """Call the environment's code; UserError where the code fails."""
        try:
            with time_limit(self._seconds):
                return function()
        except (Exception, SystemExit, TooLate) as error:
            raise self._fault(name, error, self._row) from error

    def _call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a tool; the rollout's end raises a mistake of the tool's code, whatever the policy asked for."""
        if self._late:
            raise TimeoutError(self._late)
        try:
            with time_limit(self._seconds):
                return function()
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
    """Make the class of episodes of an environment's class, whose tools may take `seconds`.

    `fault` makes the error of a failed method from its name, the error and the row.
    """

    def tool(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Episode, *arguments: Any, **named: Any) -> Any:
            method = getattr(self._object, name)
            return self._call(name, lambda: _said(method(*arguments, **named)))

        return call

    tools = {name: tool(name, method) for name, method in tools_in(kind).items()}
    return type(kind.__name__, (Episode,), {"_kind": kind, "_seconds": seconds, "_fault": staticmethod(fault), **tools})


def tools_in(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment's class by name, as TRL finds tools."""
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    return {name: method for name, method in methods.items() if not name.startswith("_") and name not in PROTOCOL}


def tools_of(episode: Episode) -> list[Callable[..., Any]]:
    """Return the tools of a rollout."""
    return [getattr(episode, name) for name in tools_in(type(episode))]


class EpisodeResponse(str):
    """The last text of a policy in a rollout with tools, with the episode and all messages since the prompt."""

    episode: Episode
    messages: list[dict[str, Any]]


def whole_text(response: str) -> str:
    """Write a response, with all turns, for reading."""
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
    """Return a finished rollout; UserError where the environment's code failed."""
    if episode._broken is not None:
        raise episode._broken
    said = EpisodeResponse(messages[-1]["content"] if messages[-1]["role"] == "assistant" else "")
    said.episode, said.messages = episode, messages
    return said


def _said(result: Any) -> Any:
    """Return a tool's result, a text or a list of a message's parts as UTF-8 can hold it."""
    return as_text(result) if isinstance(result, str | list) else result
