"""A fault of Gym's server, of the way to it or of this client is no reward, and blames no row or response."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from scripts.errors import CutOffError, ServiceError, UserError
from scripts.recipe.gym_release import Gym, GymServer
from scripts.rewards import gym as gym_module
from scripts.rewards import registry
from scripts.rewards.gym import GymUnavailable, RunningServer
from scripts.rewards.registry import register_gym, reward_groups
from scripts.rewards.verdict import Unjudged
from tests.conftest import ROOT

AGENT = "mcqa_simple_agent"
GOOD = (200, b'{"reward": 1.0}')
PLACES = ["rows.jsonl:6", "rows.jsonl:7"]
Reply = tuple[int, bytes]
Replies = Callable[[str, str, int], Reply]
"""The answer to a question and a response that was asked so many times before."""


def row(question: str) -> dict:
    """A row by its question."""
    asked = {"input": [{"role": "user", "content": question}]}
    return {"agent_ref": {"type": "responses_api_agents", "name": AGENT}, "responses_create_params": asked}


@contextmanager
def serving(replies: Replies):
    """A server that answers as told, after some milliseconds; its address."""
    asked: dict[tuple[str, str], int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = 200, b"{}"
            if self.path == "/verify":
                question = body["responses_create_params"]["input"][0]["content"]
                text = body["response"]["output"][0]["content"][0]["text"]
                before = asked.get((question, text), 0)
                asked[question, text] = before + 1
                status, content = replies(question, text, before)
            time.sleep(0.005)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def register(url: str, **reach: object) -> RunningServer:
    """Let a server at an address reward the agent's rows."""
    gym = Gym(version="0.4.0", servers=["mcqa"], agents={"mcqa": [AGENT]})
    (server,) = register_gym(gym, {"mcqa": GymServer(base_url=url, **{"max_retries": 1, **reach})}, "no/python")
    return server


@pytest.fixture
def asking(monkeypatch):
    """Ask a server that answers as told for the verdicts on some responses to each of some questions."""
    monkeypatch.setattr(gym_module, "PAUSE_AFTER_FAILURE", 0.01)
    monkeypatch.setattr(gym_module, "LONGEST_PAUSE", 0.01)

    def ask(replies: Replies, *groups: tuple[str, list[str]]) -> list[list[float]]:
        with serving(replies) as url:
            register(url)
            return reward_groups([(row(question), texts) for question, texts in groups], PLACES)

    return ask


CHILD = """
import json, sys
from tests.unit.test_gym_faults import register, row
from scripts.rewards.registry import reward_groups

register(sys.argv[1])
print(json.dumps(reward_groups([(row("Which?"), [f"answer {number}" for number in range(16)])])))
"""


def test_the_first_verdicts_of_fresh_processes_are_right():
    with serving(lambda *_: GOOD) as url:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", CHILD, url], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.stdout, done.stderr
            assert json.loads(done.stdout) == [[1.0] * 16]


def test_a_forked_process_judges_while_its_parent_does():
    """Also where the fork takes place while other threads hold the server's turns and locks."""
    with serving(lambda *_: GOOD) as url:
        server = register(url, max_concurrency=1)
        with server._turns.take(alone=True), server._lock:
            child = os.fork()
            if child == 0:
                signs = reward_groups([(row("Which?"), [f"child {number}" for number in range(16)])]) == [[1.0] * 16]
                os._exit(0 if signs else 1)
            deadline, ended = time.monotonic() + 60, 0
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                time.sleep(0.02)
            if not ended:
                os.kill(child, 9)
                os.waitpid(child, 0)
        assert ended and status == 0
        assert reward_groups([(row("Which?"), ["parent"] * 16)]) == [[1.0] * 16]


@pytest.mark.parametrize("reply", [(500, b"oh"), (503, b""), (429, b"later"), (200, b"<html>"), (200, b"[1]")])
def test_a_fault_that_passes_costs_no_verdict(asking, reply):
    texts = [f"answer {number}" for number in range(8)]
    assert asking(lambda question, text, before: GOOD if before else reply, ("a", texts)) == [[1.0] * 8]


NO_REWARDS = [
    b"",
    b"<html>Bad gateway</html>",
    b"[]",
    b"null",
    b'{"detail": "x"}',
    b'{"reward": null}',
    b'{"reward": "1"}',
    b'{"reward": NaN}',
    b'{"reward": 1e999}',
    b'{"reward": 1' + b"0" * 400 + b"}",
    b'{"reward": 1' + b"0" * 5000 + b"}",
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("reply", [(500, b"oh"), (507, b""), *((200, body) for body in NO_REWARDS)])
def test_a_response_that_alone_gets_no_verdict_is_unjudged(asking, reply):
    (rewards,) = asking(lambda question, text, before: reply if text == "bad" else GOOD, ("a", ["bad", "good"]))
    assert isinstance(rewards[0], Unjudged) and rewards == [0.0, 1.0]
    assert "Gym's server mcqa at http://127.0.0.1:" in rewards[0].why and "asked twice" in rewards[0].why


@pytest.mark.parametrize("reply", [(500, b"KeyError: 'solution'"), (200, b"{}")])
def test_a_row_to_which_a_server_fails_is_named_once_the_server_judges_others(asking, reply):
    replies = lambda question, text, before: reply if question == "bad" else GOOD  # noqa: E731
    with serving(replies) as url:
        register(url)
        assert reward_groups([(row("good"), ["a"])]) == [[1.0]]
        with pytest.raises(UserError, match=r"^rows.jsonl:7: Gym's server mcqa .* whatever .* judges others") as error:
            reward_groups([(row("good"), ["a"]), (row("bad"), ["a"])], PLACES)
    assert not isinstance(error.value, CutOffError)


@pytest.mark.parametrize("reply", [(500, b"oh"), (200, b"<html>"), (200, b'{"reward": NaN}')])
def test_a_server_that_judges_nothing_is_named_and_no_row_is(asking, reply):
    with pytest.raises(ServiceError, match=r"^Gym's server mcqa at http.* has judged nothing yet") as error:
        asking(lambda *_: reply, ("a", ["a"] * 8), ("b", ["b"] * 8))
    assert "rows.jsonl" not in str(error.value) and "mend" not in str(error.value)


def test_a_server_that_judges_nothing_more_is_an_outage(asking):
    with serving(lambda question, text, before: (500, b"oh") if question == "b" or before else GOOD) as url:
        register(url)
        assert reward_groups([(row("a"), ["a"])]) == [[1.0]]
        with pytest.raises(GymUnavailable, match=r"^Gym's server mcqa at http.* judges nothing more: HTTP 500"):
            reward_groups([(row("b"), ["b"] * 8)], PLACES)


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405, 407, 204])
def test_an_answer_that_no_server_of_gym_gives_names_the_address(asking, status):
    with pytest.raises(ServiceError, match=rf"^Gym's server mcqa at http.* HTTP {status}(?s:.*)gym_servers.mcqa"):
        asking(lambda *_: (status, b""), ("a", ["a"] * 8))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_a_server_refuses_is_the_row_or_the_response(asking, status):
    (rewards,) = asking(lambda question, text, before: (status, b"no") if text == "bad" else GOOD, ("a", ["bad", "a"]))
    assert isinstance(rewards[0], Unjudged) and rewards[1] == 1.0
    with pytest.raises(UserError, match=rf"^rows.jsonl:6: Gym's server mcqa .* HTTP {status}: no; mend or remove"):
        asking(lambda *_: (status, b"no"), ("a", ["a"]))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("bound to a different event loop"), OSError(24, "Too many open files"), httpx2.ReadError("gone")],
)
def test_an_error_of_the_client_is_an_outage(asking, monkeypatch, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(httpx2, "AsyncHTTPTransport", fail)
    with pytest.raises(GymUnavailable, match=r"^Gym's server mcqa at http.* gives no answer: \w+Error") as raised:
        asking(lambda *_: GOOD, ("a", ["a"] * 8))
    assert "rows.jsonl" not in str(raised.value)


def test_an_address_that_is_none_is_named(asking):
    register("http://127.0.0.1:99999")
    with pytest.raises(GymUnavailable, match=r"^Gym's server mcqa at http://127.0.0.1:99999 .*port must be"):
        reward_groups([(row("a"), ["a"])])


def test_a_row_that_json_cannot_hold_is_named(asking):
    with serving(lambda *_: GOOD) as url:
        register(url)
        assert reward_groups([(row("half a sign \ud83d"), ["half a sign \ud83d"])]) == [[1.0]]
        with pytest.raises(UserError, match=r"^rows.jsonl:6: .*JSON compliant"):
            reward_groups([(row("a") | {"limit": float("nan")}, ["a"])], PLACES)


def test_a_machine_that_cannot_verify_is_no_fault_of_a_row(monkeypatch):
    def verify(*_: object) -> float:
        raise OSError(24, "Too many open files")

    monkeypatch.setitem(registry.SPECS, AGENT, registry.EnvironmentSpec(verify=verify))
    with pytest.raises(ServiceError, match=r"^the verifier of mcqa_simple_agent fails on this machine.*Too many open"):
        reward_groups([(row("a"), ["a"])], PLACES)
