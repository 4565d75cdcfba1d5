"""NeMo-Gym's resources servers as verifiers: started here, or reached elsewhere.

Only a refusal of the request (`REFUSALS`) is the fault of the row or the response. Where a server gives no answer to a
response, or an error of its own, it is asked again: alone after a silence, and started again where it runs here.
Without a verdict again, the response is unjudged if the server judges another one to the same row, and the row is to be
looked at if the server judges only other rows. Otherwise the server is out: `GymUnavailable` or `ServiceError` stop the
training step, since the policy would learn from a made-up reward.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.cookies import SimpleCookie
from itertools import count
from math import isfinite
from numbers import Real
from pathlib import Path
from threading import Condition, Lock
from typing import Any
from weakref import WeakSet

from scripts.errors import CutOffError, ServiceError, UserError, shortened, warn
from scripts.files import make_scratch
from scripts.processes import PARENT
from scripts.recipe.gym_release import Gym, GymServer
from scripts.recipe.yaml_file import installation, project_or_shipped
from scripts.rewards.gym_client import Answer, Client, Silent
from scripts.rewards.gym_yaml import RUNS_ANSWERS, configured
from scripts.rewards.response import parse_calls
from scripts.rewards.verdict import HARMLESS, NotJudged, VerifierError
from scripts.rows.messages import shown_question

Row = dict[str, Any]
START_SECONDS = 300.0
LONGEST_PAUSE = 60.0
SHOWN, LINES = 400, 8
JUDGED, OF_SERVERS = 200, range(500, 600)
REFUSALS = {400, 413, 422}
"""The statuses by which a server refuses a row or a response: not as it asks, or too large."""
PASSING = {408, 425, 429, 502, 503, 504}
"""The statuses by which a server, or a gateway before it, asks to come again."""
PAUSE_AFTER_FAILURE = 1.0
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


class Failed(Exception):
    """A server answered with an error of its own, or without a reward; the message says what."""


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


_servers: "WeakSet[RunningServer]" = WeakSet()


def _begin_after_fork() -> None:
    """Let a forked process begin without what it shares with its parent."""
    for server in _servers:
        server._begin_in_this_process()


os.register_at_fork(after_in_child=_begin_after_fork)


@dataclass(frozen=True)
class Attempt:
    """A request's outcome: the reward, or why there is none; and whether the server gave no answer at all."""

    reward: float | None = None
    why: str = ""
    was_silent: bool = False


class RunningServer:
    """A server of Gym, started at once and waited for at the first request.

    A forked process starts a server of its own, at its first request.
    """

    def __init__(self, name: str, gym: Gym, reach: GymServer, python: str | Path) -> None:
        self._name, self._gym, self._reach, self._python = name, gym, reach, project_or_shipped(Path(python))
        self._begin_in_this_process()
        _servers.add(self)
        if reach.base_url is None:
            self._start()

    def _begin_in_this_process(self) -> None:
        """Hold no lock, server or outage: what a fork copies of them is its parent's."""
        self._has_sessions, self._outage, self._lock = True, None, Lock()
        self._process = self._log = self._client = self._home = None
        self._starts, self._silent = 0, -1  # the server's starts, and the start that last gave no answer
        self._turns = Turns(self._reach.max_concurrency)
        self._judged: tuple[Row, str] | None = None  # a row and a response that the server has judged
        self._said_to_lack: list[str] = []

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
        self._home = str(make_scratch(Path("/tmp")))  # noqa: S108
        self._starts += 1
        self._process = subprocess.Popen(  # noqa: S603
            [self._python.absolute(), "-P", "-m", "scripts.rewards.gym_server"],
            # No credentials, for some servers run a model's programs; no GPU, and no Ray that is up by chance.
            env={
                "HF_HOME": str(Path.home() / ".cache/huggingface"),
                "NLTK_DATA": str(Path.home() / "nltk_data"),
                **{name: os.environ[name] for name in INHERITED if name in os.environ},
                **dict.fromkeys(("USER", "LOGNAME"), "gym"),  # some libraries ask, and its own user may have no name
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
        asked |= {"confined": self._reach.confined, "network": self._has_network(said.folder.name)}
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
            raise ServiceError(
                f"Gym's server {self._name} does not start:\n{self._last_words()}\nwhere a module is missing, install "
                f"what {self._requirements} names beside nemo-gym into {self._process.args[0]}'s environment"
            )
        started = json.loads(line)
        if "refusal" in started:
            raise ServiceError(f"Gym's server {self._name} is not started: {started['refusal']}")
        self._warn_of(started["lacks"])
        self._has_sessions = started["has_sessions"]
        return started["socket"]

    def _has_network(self, folder: str) -> bool:
        """Tell whether the server is to reach the network: as it is set, else unless it runs answers as code."""
        if self._reach.network is not None:
            return self._reach.network
        return folder not in RUNS_ANSWERS

    def _warn_of(self, lacks: list[str]) -> None:
        """Warn once of each layer missing from the confinement."""
        new = [lacking for lacking in lacks if lacking not in self._said_to_lack]
        self._said_to_lack += new
        if new:
            warn(f"Gym's server {self._name} is not wholly confined: {'; '.join(new)} (SECURITY.md)")

    def _last_words(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode("utf-8", "replace").splitlines()[-LINES:])

    @property
    def _http(self) -> Client:
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Client:
        """Return the client of a server elsewhere, or of the server here once it has started."""
        url, seconds = self._reach.base_url, self._reach.timeout
        if url is not None:
            return Client(url.rstrip("/"), seconds)
        if self._process is None:
            self._start()
        return Client(HERE, seconds, self._started())

    def wait(self) -> None:
        """Wait until the server has started; UserError or GymUnavailable where it does not."""
        self._http  # noqa: B018

    def verify(self, row: Row, response: str) -> float:
        """Return the reward of one response.

        VerifierError where the server refuses the row or the response, or fails on this row alone; NotJudged where it
        fails on this response alone. GymUnavailable or ServiceError where the server is at fault, or the way to it.
        """
        try:
            with self._turns.take():
                return self._tried(row, response)
        except Silent as silent:
            first = Attempt(why=self._why(silent), was_silent=True)
        except Failed as failed:
            first = Attempt(why=str(failed))
        # A failure may be of this response alone, so others are asked meanwhile; a silent server may be started again.
        if not first.was_silent:
            time.sleep(PAUSE_AFTER_FAILURE)
            try:
                with self._turns.take():
                    return self._again(row, response, first, alone=False)
            except Silent as silent:
                first = Attempt(why=self._why(silent), was_silent=True)
        with self._turns.take(alone=True):
            return self._again(row, response, first, alone=True)

    def _again(self, row: Row, response: str, before: Attempt, alone: bool) -> float:
        """Return the reward of a response that got none, or find what is at fault: response, row or server.

        Silent where the server is silent and others are asked meanwhile.
        """
        # Did it pass?
        second = self._attempt(row, response, before, alone)
        if second.reward is not None:
            return second.reward
        # Is it the response?
        harmless = self._attempt(row, HARMLESS, second, alone)
        if harmless.reward is not None:
            raise NotJudged(f"{self._who}, asked twice: {second.why}")
        # Is it the row? Then the server judges what it has judged before.
        known = self._judged
        if known is not None and self._still_judges(*known, harmless, alone):
            last = self._attempt(row, response, harmless, alone)
            if last.reward is not None:
                return last.reward
            raise VerifierError(
                f"{self._who} fails on this row whatever the response, and judges others: {last.why}; look at its log, "
                "and mend or remove the row"
            )
        self._outage = self._outage_of(row, harmless, has_judged=known is not None)
        raise self._outage

    def _still_judges(self, row: Row, response: str, before: Attempt, alone: bool) -> bool:
        """Tell whether the server judges a response that it has judged before, if need be after some pauses."""
        try:
            return self._attempt(row, response, before, alone, is_patient=True).reward is not None
        except VerifierError:
            return False

    def _attempt(self, row: Row, response: str, before: Attempt, alone: bool, is_patient: bool = False) -> Attempt:
        """Return the outcome of a request; `alone`, a server here that was silent is started again first."""
        if alone and self._process is not None and self._silent == self._starts:
            warn(f"Gym's server {self._name} gives no answer and is started anew: {before.why}")
            self.close()
            self._start()
        try:
            return Attempt(self._tried(row, response, is_patient))
        except Silent as silent:
            if not alone:
                raise
            return Attempt(why=self._why(silent), was_silent=True)
        except Failed as failed:
            return Attempt(why=str(failed))

    def _outage_of(self, row: Row, last: Attempt, has_judged: bool) -> UserError:
        """Return the error of a server that judges nothing; where it answers, and never did, a person is to look."""
        if last.was_silent or has_judged:
            says = "gives no answer" if last.was_silent else "judges nothing more"
            return GymUnavailable(
                f"{self._who} {says}: {last.why}\nno reward is made up for it: start again when it answers, and "
                "training resumes from the newest checkpoint"
            )
        return ServiceError(
            f"{self._who} has judged nothing yet, and fails whatever the response: {last.why}\nlook at its log and its "
            f"settings; it was asked for the row whose prompt is {shown_question(row)!r}"
        )

    @property
    def _who(self) -> str:
        """The server, with the address where it is elsewhere."""
        at = "" if self._reach.base_url is None else f" at {self._reach.base_url}"
        return f"Gym's server {self._name}{at}"

    def _verify(self, http: Client, row: Row, response: str) -> Answer:
        cookies = {}
        if self._has_sessions:
            seeded = http.post("/seed_session", row, {})
            if seeded.status != 200:
                return seeded
            kept = SimpleCookie("; ".join(seeded.cookies))
            cookies = {"Cookie": "; ".join(f"{name}={value.coded_value}" for name, value in kept.items())}
        return http.post("/verify", row | {"response": RESPONSE | {"output": output_items(response)}}, cookies)

    def _tried(self, row: Row, response: str, is_patient: bool = False) -> float:
        """Return a reward; Silent or Failed where the server gives none.

        A lost connection to a server elsewhere is tried again, and with `is_patient` a failure of the server too.
        """
        is_elsewhere = self._reach.base_url is not None
        tries = self._reach.max_retries + 1 if is_elsewhere else 1
        for number in count():
            if self._outage is not None:
                raise self._outage  # found by another request
            try:
                reward = self._reward_of(self._verify(self._http, row, response))
            except Silent as silent:
                if number == tries - 1 or silent.is_late:
                    self._silent = self._starts
                    raise
            except Failed:
                if number == tries - 1 or not is_patient:
                    raise
            else:
                self._judged = (row, response)
                return reward
            time.sleep(min(2**number, LONGEST_PAUSE))

    def _reward_of(self, answer: Answer) -> float:
        """Return the reward in an answer; Silent, Failed, VerifierError or ServiceError where there is none."""
        if answer.status in PASSING:
            raise Silent(f"HTTP {answer.status}")
        if answer.status != JUDGED:
            raise self._error_of(answer)
        try:
            reward = json.loads(answer.body)["reward"]
            is_number = isinstance(reward, Real) and isfinite(reward)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            raise Failed(f"its answer holds no reward: {_says(answer)}") from None
        if not is_number:
            raise Failed(f"it gives {shortened(repr(reward), SHOWN)} for a reward, which is no finite number")
        return float(reward)

    def _error_of(self, answer: Answer) -> Exception:
        """Return the error that an answer's status stands for."""
        says = f"HTTP {answer.status}: {_says(answer)}"
        if answer.status in REFUSALS:
            return VerifierError(f"{self._who} answers {says}; mend or remove the row")
        if answer.status in OF_SERVERS:
            return Failed(says)
        return ServiceError(
            f"{self._who} answers {says}\nno server of Gym answers so: look at gym_servers.{self._name}.base_url, and "
            "at what stands before the server"
        )

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
            self._client = None
            shutil.rmtree(self._home, ignore_errors=True)


def _says(answer: Answer) -> str:
    """Shorten an error; of a refused row (422) to the fields and rules."""
    text = answer.body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in json.loads(text)["detail"])
    return shortened(" ".join(text.split()), SHOWN)
