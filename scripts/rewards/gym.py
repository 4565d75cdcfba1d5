"""NeMo-Gym's resources servers as verifiers: started here, or reached elsewhere.

A response without an answer is tried again alone, by a server started anew where it runs here; without an answer again,
the response is unjudged if the server answers to another response. Otherwise the server is silent: an outage stops the
training step (`GymUnavailable`), since the policy would learn from a made-up reward. An error in the answer is the
fault of the row or the response.
"""

import asyncio
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from http.cookies import SimpleCookie
from itertools import count
from math import isfinite
from numbers import Real
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple

import httpx2

from scripts.errors import CutOffError, UserError, shortened, warn
from scripts.processes import PARENT
from scripts.recipe.gym_release import Gym, GymServer
from scripts.recipe.yaml_file import installation, project_or_shipped
from scripts.rewards.gym_yaml import configured
from scripts.rewards.response import parse_calls
from scripts.rewards.verdict import HARMLESS, NotJudged, VerifierError

Row = dict[str, Any]
START_SECONDS = 300.0
LONGEST_PAUSE = 60.0
SHOWN, LINES = 400, 8
MOST_BYTES = 32 << 20
PLAIN = {"Accept-Encoding": "identity"}
GATEWAY_ERRORS = {502, 503, 504}
HERE = "http://localhost"
RESPONSE = {
    "id": "response",
    "created_at": 0,
    "model": "policy",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "NLTK_DATA", "HF_HOME")


class GymUnavailable(CutOffError):
    """A server of Gym is gone or silent; a later attempt may succeed."""


def output_items(text: str) -> list[dict[str, Any]]:
    """Write a policy's text as a model server with a parser of reasoning hands it to Gym.

    Thoughts before an answer are an item of their own, and the text before calls is a message.
    """
    thoughts = [thought for thought in getattr(text, "thoughts", ()) if thought]
    said = str(getattr(text, "exact", text))
    calls = parse_calls(said)
    if calls:  # a list of calls has no text before it
        said = said.partition("<tool_call>")[0] if "<tool_call>" in said else ""
    items = []
    if thoughts:
        summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
        items.append({"type": "reasoning", "id": "reasoning", "status": "completed", "summary": summary})
    if said or not (calls or thoughts):
        content = [{"type": "output_text", "text": said, "annotations": []}]
        message = {"type": "message", "id": "message", "role": "assistant", "status": "completed", "content": content}
        items.append(message)
    for place, call in enumerate(calls):
        made = {"type": "function_call", "call_id": f"call_{place}", "name": call.name}
        items.append(made | {"arguments": json.dumps(call.arguments)})
    return items


class Silent(Exception):
    """A server gave no answer, `is_late`: in time; the message says why."""

    def __init__(self, why: str, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late


class Answer(NamedTuple):
    """A server's answer, not decompressed."""

    status: int
    cookies: list[str]
    body: bytes


class Client:
    """A client for several threads. An event loop makes the requests, since it can end each at a deadline.

    `socket` is the path of a server's Unix socket, instead of the address's host.
    """

    def __init__(self, base_url: str, seconds: float, socket: str | None = None) -> None:
        self.base_url, self._seconds = base_url, seconds
        self._client = httpx2.AsyncClient(
            base_url=base_url,
            timeout=None,
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=httpx2.Limits(max_connections=None)),
            headers=PLAIN,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # responses share no session
        )

    def post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        """Return the answer to a body of JSON; Silent where none comes whole in time."""
        return asyncio.run_coroutine_threadsafe(self._post(path, body, headers), _loop()).result()

    def close(self) -> None:
        """Close the connections."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), _loop()).result()

    async def _post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream("POST", path, json=body, headers=headers) as response,
            ):
                received = bytearray()
                async for part in response.aiter_raw():
                    received += part
                    if len(received) > MOST_BYTES:
                        raise Silent(f"an answer of more than {MOST_BYTES >> 20} MiB")
                return Answer(response.status_code, response.headers.get_list("set-cookie"), bytes(received))
        except TimeoutError:
            raise Silent(f"no answer to a response within {self._seconds:g} s", is_late=True) from None
        except httpx2.TransportError as error:
            raise Silent(f"{type(error).__name__} {error}".strip()) from None


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True, name="requests").start()
    return loop


class Turns:
    """Turns of threads at a server: `most` at once, or one alone."""

    def __init__(self, most: int) -> None:
        self._most, self._taken, self._is_alone, self._changed = most, 0, False, Condition()

    @contextlib.contextmanager
    def take(self, alone: bool = False) -> Iterator[None]:
        """Take a turn beside others; or `alone`: let nobody begin, and wait until the turns of others have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and (alone or self._taken < self._most))
            self._is_alone = alone
            self._changed.wait_for(lambda: not (alone and self._taken))
            self._taken += not alone
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = self._is_alone and not alone
                self._taken -= not alone
                self._changed.notify_all()


class RunningServer:
    """A server of Gym, started at once and waited for at the first request."""

    def __init__(self, name: str, gym: Gym, reach: GymServer, python: str | Path) -> None:
        self._name, self._gym, self._reach, self._python = name, gym, reach, project_or_shipped(Path(python))
        self._has_sessions, self._outage, self._lock = True, None, Lock()
        self._process = self._log = self._client = self._home = None
        self._starts, self._silent = 0, -1  # the server's starts, and the start that last gave no answer
        self._turns = Turns(reach.max_concurrency)
        if reach.base_url is None:
            self._start()

    def _start(self) -> None:
        said, settings = configured(self._gym, self._name, self._python), self._gym.settings.get(self._name, {})
        if "responses_api_models" in str(said.config) and said.config.get("should_use_judge", True):
            raise UserError(
                f"gym.servers: {self._name} asks a model that only Gym itself serves ({said.file}); run it there and "
                f"say gym_servers.{self._name}.base_url, or switch its judge off where it has should_use_judge "
                "(gym.settings)"
            )
        self._requirements = said.folder / "requirements.txt"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the server lives
        # For this user alone: others on the node could ask for rewards too. A socket's path is short.
        self._home = tempfile.mkdtemp(prefix="gym-", dir="/tmp")
        self._starts += 1
        self._process = subprocess.Popen(  # noqa: S603
            [self._python.absolute(), "-P", "-m", "scripts.rewards.gym_server"],
            # No credentials, for some servers run a model's programs; no GPU, and no Ray that is up by chance.
            env={
                "HF_HOME": str(Path.home() / ".cache/huggingface"),
                "NLTK_DATA": str(Path.home() / "nltk_data"),
                **{name: os.environ[name] for name in INHERITED if name in os.environ},
                **dict.fromkeys(("HOME", "TMPDIR", "RAY_TMPDIR"), self._home),
                PARENT: str(os.getpid()),
                "PYTHONPATH": str(installation()),
                "CUDA_VISIBLE_DEVICES": "",
                "RAY_ADDRESS": "local",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        asked = {"folder": said.folder.name, "file": str(said.file), "settings": settings, "home": self._home}
        asked["is_confined"] = self._reach.confined
        with self._process.stdin as given, contextlib.suppress(BrokenPipeError):
            given.write(json.dumps(asked).encode())

    def _started(self) -> str:
        """Wait for the server's socket; UserError or GymUnavailable where the start fails."""
        announced = select.poll()  # which takes any number of open files, as select.select does not
        announced.register(self._process.stdout, select.POLLIN)
        if not announced.poll(START_SECONDS * 1000):
            raise GymUnavailable(f"Gym's server {self._name} has not started within {START_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise UserError(
                f"Gym's server {self._name} does not start:\n{self._last_words()}\nwhere a module is missing, install "
                f"what {self._requirements} names beside nemo-gym into {self._process.args[0]}'s environment"
            )
        started = json.loads(line)
        self._has_sessions = started["has_sessions"]
        return started["socket"]

    def _last_words(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode("utf-8", "replace").splitlines()[-LINES:])

    @property
    def _http(self) -> Client:
        with self._lock:
            if self._client is None:
                url, seconds = self._reach.base_url, self._reach.timeout
                self._client = Client(url.rstrip("/"), seconds) if url else Client(HERE, seconds, self._started())
            return self._client

    def wait(self) -> None:
        """Wait until the server has started; UserError or GymUnavailable where it does not."""
        self._http  # noqa: B018

    def verify(self, row: Row, response: str) -> float:
        """Return the reward of one response; VerifierError where the server fails."""
        answer = self._answer(row, response)
        if answer.status != 200:
            raise VerifierError(
                f"Gym's server {self._name} answers HTTP {answer.status}: {_says(answer)}; mend or remove the row"
            )
        reward = json.loads(answer.body).get("reward")
        if not isinstance(reward, Real) or not isfinite(reward):
            raise VerifierError(f"Gym's server {self._name} gives {reward!r} for a reward, which is no finite number")
        return float(reward)

    def _answer(self, row: Row, response: str) -> Answer:
        """Return the answer to a response, asked once more where none comes; NotJudged where again none does."""
        try:
            with self._turns.take():
                return self._tried(row, response)
        except Silent as silent:
            why = self._why(silent)
        with self._turns.take(alone=True):
            for is_harmless, text in enumerate((response, HARMLESS)):
                if self._process is not None and self._silent == self._starts:
                    warn(f"Gym's server {self._name} gives no answer and is started anew: {why}")
                    self.close()
                    self._start()
                try:
                    answer = self._tried(row, text)
                except Silent as silent:
                    why = self._why(silent)
                else:
                    if is_harmless:
                        raise NotJudged(f"Gym's server {self._name}, asked twice: {why}")
                    return answer
            self._outage = GymUnavailable(
                f"Gym's server {self._name} at {self._http.base_url} gives no answer: {why}\nno reward is made up for "
                "it: start again when it answers, and training resumes from the newest checkpoint"
            )
            raise self._outage

    def _verify(self, http: Client, row: Row, response: str) -> Answer:
        cookies = {}
        if self._has_sessions:
            seeded = http.post("/seed_session", row, {})
            if seeded.status != 200:
                return seeded
            kept = SimpleCookie("; ".join(seeded.cookies))
            cookies = {"Cookie": "; ".join(f"{name}={value.coded_value}" for name, value in kept.items())}
        return http.post("/verify", row | {"response": RESPONSE | {"output": output_items(response)}}, cookies)

    def _tried(self, row: Row, response: str) -> Answer:
        """Return an answer; a lost connection to a server elsewhere is tried again."""
        tries = self._reach.max_retries + 1 if self._process is None else 1
        for number in count():
            if self._outage is not None:
                raise self._outage  # found by another request
            try:
                answer = self._verify(self._http, row, response)
                if answer.status not in GATEWAY_ERRORS:
                    return answer
                raise Silent(f"HTTP {answer.status}")
            except Silent as silent:
                if number == tries - 1 or silent.is_late:
                    self._silent = self._starts
                    raise
            time.sleep(min(2**number, LONGEST_PAUSE))

    def _why(self, silent: Silent) -> str:
        if silent.is_late:
            return f"{silent} (gym_servers.{self._name}.timeout)"
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"it ended with status {self._process.wait(1)}; its last words:\n{self._last_words()}"
        return str(silent)

    def close(self) -> None:
        """End a server started here."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._client is not None:
                self._client.close()
            self._client = None
            shutil.rmtree(self._home, ignore_errors=True)


def _says(answer: Answer) -> str:
    """Shorten an error; of a refused row (422) to the fields and rules."""
    text = answer.body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        text = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in json.loads(text)["detail"])
    return shortened(" ".join(text.split()), SHOWN)
