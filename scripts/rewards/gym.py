"""NeMo-Gym's resources servers as the verifiers of the rows of their agents: started here, or reached elsewhere.

A server that does not answer is an outage and stops the training step (`GymUnavailable`): a reward made up in its place
would be learnt from. What it answers with an error is the fault of the row, or of a response that it cannot judge.
"""

import contextlib
import json
import os
import random
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cached_property, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from http.cookies import SimpleCookie
from math import isfinite
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import httpx2
import yaml

from scripts.errors import CutOffError, UserError, shortened
from scripts.processes import PARENT
from scripts.recipe.gym import Gym, GymServer
from scripts.recipe.yaml_file import installation, project_or_shipped
from scripts.rewards.response import parse_calls
from scripts.rewards.verdict import VerifierError

Row = dict[str, Any]
START_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
SHOWN, LINES = 400, 8
GATEWAY_ERRORS = {502, 503, 504}
RESPONSE = {
    "id": "response",
    "created_at": 0,
    "model": "policy",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "NLTK_DATA", "HF_HOME")
_jitter = random.Random()  # its own, since training repeats the numbers of the shared one


class GymUnavailable(CutOffError):
    """A server of Gym's is gone, or does not answer; it may answer the next attempt."""


class Configured(NamedTuple):
    """What Gym's YAML says of a server: its folder in resources_servers, and the agents whose rows it rewards."""

    folder: Path
    file: Path
    config: dict[str, Any]
    agents: list[str]


def output_items(text: str) -> list[dict[str, Any]]:
    """A policy's text as a model server hands it to Gym: what stands before its calls is a message."""
    calls = parse_calls(text)
    said = text
    if calls:  # and before a list of calls is nothing
        said = text.partition("<tool_call>")[0] if "<tool_call>" in text else ""
    content = [{"type": "output_text", "text": said, "annotations": []}]
    message = {"type": "message", "id": "message", "role": "assistant", "status": "completed", "content": content}
    return [
        *([message] if said or not calls else []),
        *(
            {
                "type": "function_call",
                "call_id": f"call_{place}",
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
            for place, call in enumerate(calls)
        ),
    ]


def agents_of(gym: Gym | None, python: str | Path) -> dict[str, str]:
    """The server of each agent whose rows these servers reward; UserError where Gym does not say that.

    `python` is that of the environment that holds Gym; a relative path starts from the repository.
    """
    found: dict[str, str] = {}
    for name in gym.servers if gym else ():
        agents = gym.agents.get(name) or configured(gym, name, python).agents
        if not agents:
            raise UserError(
                f"gym.servers: Gym's YAML of {name} names no agent; say whose rows it rewards in gym.agents"
            )
        for agent in agents:
            if found.setdefault(agent, name) != name:
                raise UserError(
                    f"gym.servers: {found[agent]} and {name} both reward the rows of {agent}; name one of them, or say "
                    "in gym.agents whose rows each rewards"
                )
    return found


def configured(gym: Gym, name: str, python: str | Path) -> Configured:
    """What the Gym of this Python says of a server; UserError where it is another one, or knows no such server."""
    python = project_or_shipped(Path(python)).absolute()
    installed = {
        path.name.removeprefix("nemo_gym-").removesuffix(".dist-info")
        for path in python.parents[1].glob("lib/python3*/site-packages/nemo_gym-*.dist-info")
    }
    if gym.version not in installed:
        is_there = f"holds nemo-gym {', '.join(sorted(installed))}" if installed else "holds no nemo-gym"
        raise UserError(
            f"gym.version is {gym.version}, but {python.parents[1]} {is_there}; make gym installs what "
            "envs/nemo-gym.txt names, and the site's gym_python says where"
        )
    (root,) = python.parents[1].glob("lib/python3*/site-packages/resources_servers")
    folder, _, stem = name.partition("/")
    files = sorted((root / folder / "configs").glob("*.yaml"))
    file = root / folder / "configs" / f"{stem or folder}.yaml"
    if not stem and len(files) == 1:
        (file,) = files
    if file not in files:
        known = ", ".join(f"{folder}/{found.stem}" for found in files) or "none of this folder"
        raise UserError(f"gym.servers: Gym {gym.version} has no {file}; it has {known}")
    parts = {key: part for key, part in yaml.safe_load(file.read_bytes()).items() if isinstance(part, dict)}
    servers = {key: part["resources_servers"] for key, part in parts.items() if "resources_servers" in part}
    config = next((server[folder] for server in servers.values() if folder in server), None)
    if config is None:
        raise UserError(f"gym.servers: {file} configures no resources server of {folder}")
    agents = [
        key
        for key, part in parts.items()
        for agent in part.get("responses_api_agents", {}).values()
        if folder in servers.get((agent.get("resources_server") or {}).get("name"), ())
    ]
    return Configured(root / folder, file, config | gym.settings.get(name, {}), agents)


class RunningServer:
    """A server of Gym's, started at once and waited for when it is first asked."""

    def __init__(self, name: str, gym: Gym, reach: GymServer, python: str | Path) -> None:
        self._name, self._reach = name, reach
        self._has_sessions, self._outage, self._lock = True, None, Lock()
        self._process = self._log = None
        if reach.base_url is None:
            self._start(
                configured(gym, name, python), gym.settings.get(name, {}), project_or_shipped(Path(python)).absolute()
            )

    def _start(self, said: Configured, settings: dict[str, Any], python: Path) -> None:
        if "responses_api_models" in str(said.config) and said.config.get("should_use_judge", True):
            raise UserError(
                f"gym.servers: {self._name} asks a model that only Gym itself serves ({said.file}); run it there and "
                f"say gym_servers.{self._name}.base_url, or switch its judge "
                "off where it has should_use_judge (gym.settings)"
            )
        self._described = said
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the server lives
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603
            [python, "-P", "-m", "scripts.rewards.gym_server"],
            # No credentials, for some servers run what a model wrote; no GPU, and no Ray that is up by chance.
            env={
                **inherited,
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
        with self._process.stdin as asked, contextlib.suppress(BrokenPipeError):
            what = {"folder": said.folder.name, "file": str(said.file), "settings": settings}
            asked.write(json.dumps(what).encode())

    def _started(self) -> str:
        """Where it answers; UserError or GymUnavailable where it does not start."""
        if self._reach.base_url is not None:
            return self._reach.base_url.rstrip("/")
        announced = select.poll()  # which takes any number of open files, as select.select does not
        announced.register(self._process.stdout, select.POLLIN)
        if not announced.poll(START_SECONDS * 1000):
            raise GymUnavailable(f"Gym's server {self._name} has not started within {START_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            lacks = re.search(r"ModuleNotFoundError: (.*)", self._last_words(100))
            if lacks is None:
                raise UserError(f"Gym's server {self._name} does not start:\n{self._last_words()}")
            raise UserError(
                f"Gym's server {self._name} does not start: {lacks[1]}; install what "
                f"{self._described.folder / 'requirements.txt'} names beside nemo-gym into {self._process.args[0]}'s "
                "environment"
            )
        started = json.loads(line)
        self._has_sessions = started["has_sessions"]
        return f"http://127.0.0.1:{started['port']}"

    def _last_words(self, lines: int = LINES) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode("utf-8", "replace").splitlines()[-lines:])

    @property
    def _http(self) -> httpx2.Client:
        with self._lock:
            return self._client

    @cached_property
    def _client(self) -> httpx2.Client:
        limits = httpx2.Limits(max_connections=self._reach.max_concurrency)
        nobodys = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # sessions are not shared by responses
        timeout = httpx2.Timeout(self._reach.timeout, pool=None)
        return httpx2.Client(base_url=self._started(), timeout=timeout, limits=limits, cookies=nobodys)

    def wait(self) -> None:
        """Return once it answers; UserError or GymUnavailable where it does not."""
        self._tried("the start", lambda http: http.get("/"))

    def verify(self, row: Row, response: str) -> float:
        """The reward of one response; VerifierError where the server fails on it, GymUnavailable where it is gone."""
        answer = self._tried("a response", partial(self._verify, row, response))
        if answer.status_code != 200:
            raise VerifierError(
                f"Gym's server {self._name} answers HTTP {answer.status_code}: {_says(answer)}; mend or remove the row"
            )
        reward = answer.json().get("reward")
        if not isinstance(reward, Real) or not isfinite(reward):
            raise VerifierError(f"Gym's server {self._name} gives {reward!r} for a reward, which is no finite number")
        return float(reward)

    def _verify(self, row: Row, response: str, http: httpx2.Client) -> httpx2.Response:
        cookies = {}
        if self._has_sessions:
            seeded = http.post("/seed_session", json=row)
            if seeded.status_code != 200:
                return seeded
            kept = SimpleCookie("; ".join(seeded.headers.get_list("set-cookie")))
            cookies = {"Cookie": "; ".join(f"{name}={value.coded_value}" for name, value in kept.items())}
        body = row | {"response": RESPONSE | {"output": output_items(response)}}
        return http.post("/verify", json=body, headers=cookies)

    def _tried(self, what: str, ask: Callable[[httpx2.Client], httpx2.Response]) -> httpx2.Response:
        """An answer, after more tries where the connection to a server elsewhere is lost."""
        http, tries = self._http, self._reach.max_retries + 1 if self._process is None else 1
        for number in range(tries):
            if self._outage is not None:
                raise self._outage  # what else waits need not find out for itself
            try:
                answer = ask(http)
                if answer.status_code not in GATEWAY_ERRORS:
                    return answer
                why = f"HTTP {answer.status_code}"
            except httpx2.TimeoutException:
                why = f"no answer to {what} within {self._reach.timeout:g} s (gym_servers.{self._name}.timeout)"
                break
            except httpx2.TransportError as error:
                why = f"{type(error).__name__} {error}".strip()
            if number < tries - 1:
                time.sleep(min(FIRST_PAUSE * 2**number * _jitter.uniform(0.5, 1), LONGEST_PAUSE))
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                why, words = f"it ended with status {self._process.wait(1)}", self._last_words()
                why += f"; its last words:\n{words}" if words else ""
        self._outage = GymUnavailable(
            f"Gym's server {self._name} at {http.base_url} gives no answer: {why}\nno reward is made up for it: start "
            "again when it answers, and training resumes from the newest checkpoint"
        )
        raise self._outage

    def close(self) -> None:
        """End the server, if it was started here."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _says(answer: httpx2.Response) -> str:
    """What an error says, of a row that is refused (422) which fields break which rule."""
    text = answer.text
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        text = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in answer.json()["detail"])
    return shortened(" ".join(text.split()), SHOWN)
