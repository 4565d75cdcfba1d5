"""Judges: models that are asked over HTTP, in OpenAI's form, what a response is worth.

A judge that does not answer is an outage and stops the training step (`JudgeUnavailable`): a reward made up in its
place would be learnt from. A judge that answers, but not in the form it was asked for, is read as the environment's
default says, and counted.
"""

import asyncio
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import httpx2

from scripts.errors import CutOffError, UserError
from scripts.recipe.judge_prompts import PROMPTS
from scripts.recipe.judges import PLACEHOLDER, Judge, Judges, JudgeServer, Role
from scripts.rewards.response import split_reasoning
from scripts.rows.messages import Message

Verdict = TypeVar("Verdict")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
WORTH_ANOTHER_TRY = {408, 409, 425, 429}
_trusted = cache(httpx2.create_ssl_context)  # which takes a third of a second
_jitter = random.Random()  # its own, since training repeats the numbers of the shared one


class JudgeUnavailable(CutOffError):
    """A judge gave no answer, however often it was asked; it may answer the next attempt."""


class _Fault(Exception):
    """Why one try brought no answer, and how many seconds the server asked to be left alone."""

    def __init__(self, why: str, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class JudgeClient:
    """Asks one judge, at most `max_concurrency` questions at a time, while its block is open."""

    def __init__(self, role: Role, judge: Judge, server: JudgeServer, http: httpx2.AsyncClient) -> None:
        self._role, self._judge, self._server, self._http = role, judge, server, http
        self._token = token_of(role, server)
        self._slots = asyncio.Semaphore(server.max_concurrency)

    async def ask(self, messages: list[Message]) -> str:
        """What the judge answers, without its reasoning.

        A lost connection, a time-out, an answer that is no chat completion, and the statuses 408, 409, 425, 429 and
        5xx are tried again, after a growing pause or the one that ``Retry-After`` asks for. JudgeUnavailable when no
        try brings an answer; UserError when the judge refuses the question (any other status).
        """
        tries = self._server.max_retries + 1
        async with self._slots:
            for number in range(tries):
                try:
                    return split_reasoning(await self._post(messages))[1]
                except _Fault as fault:
                    why, pause = str(fault), max(FIRST_PAUSE * 2**number * _jitter.uniform(0.5, 1), fault.retry_after)
                    if number < tries - 1:
                        await asyncio.sleep(min(pause, LONGEST_PAUSE))
        raise JudgeUnavailable(
            f"the {self._name} gave no answer in {tries} tries (the last: {why}); no reward is made up for it: start "
            "again when it answers, and training resumes from the newest checkpoint"
        )

    @property
    def _name(self) -> str:
        return f"{self._role} judge {self._judge.model} at {self._server.base_url}"

    async def _post(self, messages: list[Message]) -> str:
        body = {
            "model": self._judge.model,
            "messages": messages,
            "temperature": self._judge.temperature,
            "top_p": self._judge.top_p,
            "max_tokens": self._judge.max_output_tokens,
        }
        try:
            async with asyncio.timeout(self._server.timeout):
                response = await self._http.post(
                    f"{self._server.base_url.rstrip('/')}/chat/completions",
                    json={key: value for key, value in body.items() if value is not None},
                    headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                )
        except TimeoutError:
            raise _Fault(f"nothing within {self._server.timeout:g} s") from None
        except httpx2.RequestError as error:
            raise _Fault(f"{type(error).__name__} {error}".strip()) from error
        if response.status_code in WORTH_ANOTHER_TRY or response.status_code >= 500:
            raise _Fault(f"HTTP {response.status_code}", _seconds(response.headers.get("Retry-After")))
        if response.status_code != 200:
            answer = response.text.replace(self._token, "***") if self._token else response.text
            raise UserError(
                f"the {self._name} refuses a question (HTTP {response.status_code}: {' '.join(answer.split())[:300]}); "
                "mend judges or judge_servers in the recipe, or the judge"
            )
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise _Fault("an answer that is no chat completion") from None
        return content if isinstance(content, str) else ""


def token_of(role: Role, server: JudgeServer) -> str | None:
    """The token of a judge, read from its environment variable; UserError when that holds none."""
    if server.api_key_variable is None:
        return None
    token = os.environ.get(server.api_key_variable, "").strip()
    if not re.fullmatch(r"[!-~]+", token):
        raise UserError(
            f"the environment variable {server.api_key_variable} {'holds no token' if token else 'is not set'}; "
            f"judge_servers.{role} says that it holds the judge's token"
        )
    return token


def _seconds(retry_after: str | None) -> float:
    """`Retry-After` in seconds; 0 where it is missing or a date."""
    return float(retry_after) if retry_after and retry_after.strip().isdigit() else 0.0


class JudgeClients:
    """The judges of a stage, by what they judge (`roles`), with the settings that turn their words into rewards."""

    def __init__(self, settings: Judges, servers: dict[Role, JudgeServer]) -> None:
        self.settings, self.roles = settings, settings.roles
        self._servers = servers
        self._clients: dict[Role, JudgeClient] = {}
        self._read = self._unread = 0

    def question(self, name: str, /, **values: str) -> list[Message]:
        """A question by its name in `PROMPTS`, in the recipe's wording where it has one."""
        return [{"role": "user", "content": fill(self.settings.prompts.get(name, PROMPTS[name]), **values)}]

    async def verdict(
        self, role: Role, messages: list[Message], read: Callable[[str], Verdict | None]
    ) -> Verdict | None:
        """What `read` finds in a judge's answer; None, which is counted, where it finds nothing."""
        found = read(await self._clients[role].ask(messages))
        self._read, self._unread = self._read + (found is not None), self._unread + (found is None)
        return found

    def unread_share(self) -> float | None:
        """The share of the answers since this was last asked that could not be read; None when there were none."""
        answers = self._read + self._unread
        share = self._unread / answers if answers else None
        self._read = self._unread = 0
        return share

    def gather(self, questions: Iterable[Coroutine[Any, Any, Verdict]]) -> list[Verdict]:
        """Run what asks these judges, all at once; the first exception ends it."""

        async def run() -> list[Verdict]:
            async with self._open():
                return await asyncio.gather(*questions)

        return asyncio.run(run())

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=None, limits=limits, verify=_trusted()) as http:
            for role in sorted(self.roles):
                self._clients[role] = JudgeClient(role, getattr(self.settings, role), self._servers[role], http)
            yield


def fill(template: str, **values: str) -> str:
    """A template with ``{name}`` replaced by a value and ``{{`` by a brace, in one pass; nothing else is looked at."""

    def put(match: Any) -> str:
        return match[0][0] if match[1] is None else str(values.get(match[1], match[0]))

    return PLACEHOLDER.sub(put, template)
