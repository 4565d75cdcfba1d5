"""NeMo-Gym's own servers reward rows: started here, reached elsewhere, gone, silent, or refusing a row."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from scripts.backends.trl.grpo import GrpoSettings
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.gym_release import Gym, GymServer
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.rewards import registry
from scripts.rewards.gym import GymUnavailable, RunningServer, Silent
from scripts.rewards.gym_yaml import agents_of
from scripts.rewards.registry import check_row, register_gym, reward_groups, scores
from scripts.rewards.verdict import NotJudged, Unjudged
from tests.conftest import SHORT
from tests.gym.rows import rows
from tests.gym.verify import PYTHON, needs_gym

VERSION = "0.4.0"
MCQA = next(row for row in rows() if row["agent_ref"]["name"] == Environment.MCQA)
EVALUATED = {"agent_ref": {"name": "reasoning_gym_simple_agent"}, "responses_create_params": {"input": "?"}}
COUNTER = "example_session_state_mgmt_simple_agent"


def of(*servers: str, **more: object) -> Gym:
    return Gym(version=VERSION, servers=list(servers), **more)


def stage(**more: object) -> dict:
    return {
        "algorithm": "grpo",
        "blend": "b",
        "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {"max_total_sequence_length": 9, "optimizer": {"lr": 1}, "generation": {"max_new_tokens": 3}},
        **more,
    }


@pytest.mark.parametrize(
    ("gym", "servers", "why"),
    [
        (None, {"mcqa": {}}, "gym_servers needs gym"),
        ({"version": VERSION, "servers": ["mcqa"]}, {"mqca": {}}, "did you mean mcqa"),
        ({"version": VERSION, "servers": ["mcqa"], "agents": {"mqca": ["a"]}}, {}, "did you mean mcqa"),
        ({"version": VERSION, "servers": []}, {}, "at least 1"),
        ({"version": VERSION, "servers": ["../mcqa"]}, {}, "pattern"),
        ({"version": VERSION, "servers": ["mcqa"]}, {"mcqa": {"base_url": "http://me:pw@h"}}, "pattern"),
        (
            {"version": VERSION, "servers": ["mcqa"], "settings": {"mcqa": {"grading_mode": "lenient_boxed"}}},
            {"mcqa": {"base_url": "http://h"}},
            "answers elsewhere",
        ),
    ],
)
def test_a_recipe_that_names_servers_wrongly_is_refused(gym, servers, why):
    with pytest.raises(ValidationError, match=why):
        TypeAdapter(GrpoSettings).validate_python(stage(gym=gym, gym_servers=servers))


def test_another_server_is_another_stage_and_another_address_is_not(tmp_path):
    def config(server: str, **reach: object) -> dict:
        recipe = yaml.safe_load(SHORT.read_text())
        recipe["stages"]["rlvr1"] |= {"gym": of(server).model_dump(), "gym_servers": {server: reach}}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return resolve_stage(load_recipe(tmp_path / "recipe.yaml"), "rlvr1").values()

    first = config("mcqa")
    assert first == config("mcqa", base_url="http://two:8000", timeout=9) and first != config("calendar")
    assert "gym" not in resolve_stage(load_recipe(SHORT), "rlvr1").values()


def test_a_row_without_a_verifier_here_is_gyms_where_gym_is_named():
    row = {"agent_ref": {"name": "blackjack_simple_agent"}}
    assert "gym.servers" in check_row(row)
    assert check_row(row, by_gym={"blackjack_simple_agent": "blackjack"}) is None


def test_without_gym_the_message_says_how_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"holds no nemo-gym; make gym .* gym_python"):
        agents_of(of("mcqa"), tmp_path / "bin/python")
    assert agents_of(of("mcqa", agents={"mcqa": ["mine"]}), tmp_path / "bin/python") == {"mine": "mcqa"}


@needs_gym
@pytest.mark.parametrize(
    ("gym", "why"),
    [
        (of("mcqua"), "has no .*mcqua.yaml; it has none"),
        (of("structured_outputs"), "it has structured_outputs/structured_outputs_json, "),
        (Gym(version="0.3.9", servers=["mcqa"]), "gym.version is 0.3.9, but .* holds nemo-gym 0.4.0"),
        (of("math_with_judge/dapo17k", "math_with_judge"), "both reward the rows of math_with_judge_simple_agent"),
        (of("reasoning_gym/resources_only"), "names no agent; say whose rows it rewards in gym.agents"),
        (of("equivalence_llm_judge"), "asks a model that only Gym itself serves"),
        (of("math_with_judge/math_stack_overflow"), "gym_servers.math_with_judge/math_stack_overflow.base_url"),
    ],
)
def test_a_server_that_cannot_be_had_is_refused(gym, why, monkeypatch):
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    with pytest.raises(UserError, match=why):
        register_gym(gym, {}, PYTHON)


@pytest.fixture(scope="module")
def running():
    """Two real servers, for tests that do them no harm, and the registry that knows them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(registry, "SPECS", dict(registry.SPECS))
    servers = register_gym(of("mcqa", "example_session_state_mgmt"), {}, PYTHON)
    yield servers
    for server in servers:
        server.close()
    patch.undo()


@needs_gym
def test_a_server_pays_what_the_verifier_here_pays(running):
    chosen = [row for row in rows() if row["agent_ref"]["name"] == Environment.MCQA]
    texts = [
        r"\boxed{A}",
        r"\boxed{B}",
        r"The answer is \boxed{C}.",
        "D",
        "Answer: B",
        "<think>A</think>",
        "",
        "[a(b=1)]",
    ]
    there = reward_groups([(row, texts) for row in chosen])
    from scripts.rewards.environments import mcqa

    here = [[mcqa.ENVIRONMENTS[Environment.MCQA].verify(row, text) for text in texts] for row in chosen]
    assert there == here and len({reward for group in here for reward in group}) == 2
    assert scores([(row, texts[0]) for row in chosen]) == [group[0] for group in here]


@needs_gym
def test_each_response_has_a_session_of_its_own(running):
    counts = [number % 3 for number in range(12)]
    asked = [
        (
            {
                "agent_ref": {"type": "responses_api_agents", "name": COUNTER},
                "responses_create_params": {"input": "count"},
                "initial_count": count,
                "expected_count": 1,
            },
            ["done"] * 4,
        )
        for count in counts
    ]
    assert reward_groups(asked) == [[float(count == 1)] * 4 for count in counts]


@needs_gym
def test_a_row_that_a_server_refuses_is_named(running):
    broken = {key: value for key, value in MCQA.items() if key != "responses_create_params"}
    broken |= {"responses_create_params": {"input": "what?", "tools": [{"type": "function"}]}}
    with pytest.raises(
        UserError, match=r"split.jsonl:7: Gym's server mcqa answers HTTP 422: body.*tools.*mend or remove"
    ):
        reward_groups([(MCQA, ["a"]), (broken, ["a"])], places=["split.jsonl:6", "split.jsonl:7"])


@pytest.fixture
def own_server(monkeypatch):
    """A real server of a test's own, that gets five seconds for an answer."""
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (server,) = register_gym(of("mcqa"), {"mcqa": GymServer(timeout=5, max_concurrency=2)}, PYTHON)
    server.wait()
    yield server
    server.close()


@needs_gym
def test_a_server_is_for_this_user_alone_and_knows_no_credential(own_server):
    environment = Path(f"/proc/{own_server._process.pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"hf_secret" not in environment
    home = Path(own_server._home)
    assert home.stat().st_mode & 0o777 == 0o700 and (home / "socket").is_socket()
    assert f"HOME={home}".encode() in environment.split(b"\0")
    assert not serving(own_server).net_connections("inet")
    if os.geteuid() == 0:
        assert serving(own_server).uids().effective != 0
    own_server.close()
    assert not home.exists()


def serving(server: RunningServer) -> psutil.Process:
    """The confined process that answers: of those that a server starts, the one with the libraries in memory."""
    return max(
        psutil.Process(server._process.pid).children(recursive=True), key=lambda process: process.memory_info().rss
    )


@needs_gym
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_response_on_which_the_server_dies_or_hangs_is_unjudged_and_all_others_are_judged(own_server, fault):
    ask = own_server._verify

    def verify(http, row, response):
        if response == "bad":
            serving(own_server).send_signal(fault)
        return ask(http, row, response)

    own_server._verify = verify
    bad = {3, 40} if fault == signal.SIGKILL else {3}  # each that hangs takes twice the server's time
    texts = ["bad" if place in bad else r"\boxed{A}" if place % 2 else r"\boxed{B}" for place in range(60)]
    (rewards,) = reward_groups([(MCQA, texts)])
    assert {place for place, value in enumerate(rewards) if isinstance(value, Unjudged)} == bad
    assert {rewards[place] for place in range(60) if place not in bad} == {1.0, 0.0}
    assert "asked twice" in rewards[3].why
    assert reward_groups([(MCQA, texts[:3])]) == [rewards[:3]]


@needs_gym
def test_a_response_is_judged_although_others_kill_the_server_before_and_after_its_new_start(own_server):
    ask, take, killed = own_server._verify, own_server._turns.take, []

    def verify(http, row, response):
        if not killed:
            killed.append(own_server._process.kill())
        return ask(http, row, response)

    def others_first(alone: bool = False):
        if alone and len(killed) == 1:
            killed.append(None)
            own_server.close()
            own_server._start()
            own_server.wait()
            own_server._process.kill()
            with contextlib.suppress(Silent):
                own_server._tried(MCQA, "another's")
        return take(alone)

    own_server._verify, own_server._turns.take = verify, others_first
    assert reward_groups([(MCQA, [r"\boxed{B}"])]) == [[1.0]] and len(killed) == 2


@needs_gym
def test_an_outage_is_no_reward(own_server):
    """A server that answers to nothing, started anew or not."""
    own_server._verify = lambda *_: own_server._process.kill() or own_server._http.post("/verify", {}, {})
    started = time.monotonic()
    with pytest.raises(GymUnavailable, match="it ended with status -9"):
        reward_groups([(MCQA, ["a"] * 200)], places=["split.jsonl:1"])
    took, started = time.monotonic() - started, time.monotonic()
    with pytest.raises(GymUnavailable, match="it ended with status -9"):
        reward_groups([(MCQA, ["a"] * 200)])
    assert time.monotonic() - started < max(1, took / 2), "what waits behind the first does not wait as long again"


# --- responses that a server runs as code ---

STEALING = """exec('''
import json, os, signal, socket
from pathlib import Path
got = []
def tried(name, act):
    try:
        got.append(name) if act() else None
    except Exception:
        pass
def connected(family, address):
    with socket.socket(family) as asking:
        asking.settimeout(2)
        asking.connect(address)
        return True
tried("a file", lambda: Path("{secret}").read_text())
tried("variables", lambda: b"hf_secret" in Path("/proc/{trainer}/environ").read_bytes())
tried("signals", lambda: os.kill({trainer}, 0) is None)
tried("the network", lambda: connected(socket.AF_INET, ("127.0.0.1", {port})))
tried("sockets", lambda: connected(socket.AF_UNIX, "{folder}/socket"))
tried("root", lambda: os.geteuid() == 0)
tried("shared memory", lambda: Path("{shared}").read_text())
Path(os.environ["HOME"], "got").write_text(json.dumps(got))
''', dict())"""
STOLEN = ["a file", "variables", "signals", "the network", "sockets", "root", "shared memory"]


@needs_gym
@pytest.mark.parametrize(
    ("settings", "gets"),
    [({}, []), ({"network": True}, ["the network"]), ({"confined": False}, STOLEN)],
    ids=["confined", "with the network", "not confined"],
)
def test_a_response_that_is_run_as_code_gets_nothing_of_the_trainer(settings, gets, tmp_path, monkeypatch):
    """Without confinement the same response gets it all."""
    monkeypatch.setattr(registry, "SPECS", dict(registry.SPECS))
    (tmp_path / "split.jsonl").write_text("the answer")
    shared = Path("/dev/shm", f"test-{os.getpid()}")  # noqa: S108
    shared.write_text("weights")
    with (
        socket.create_server(("127.0.0.1", 0)) as network,
        socket.socket(socket.AF_UNIX) as listening,
        subprocess.Popen(["sleep", "600"], env={"HF_TOKEN": "hf_secret"}) as trainer,
    ):
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        told = {"secret": tmp_path / "split.jsonl", "folder": tmp_path, "trainer": trainer.pid, "shared": shared}
        response = STEALING.format(**told, port=network.getsockname()[1])
        row = {"metadata": {"source_dataset": "binary_matrix"}, "answer": "0", "question": "?", **EVALUATED}
        (server,) = register_gym(of("reasoning_gym"), {"reasoning_gym": GymServer(**settings)}, PYTHON)
        try:
            assert server.verify(row, f"<answer>{response}</answer>") == 0
            got = json.loads(Path(server._home, "got").read_text())
        finally:
            server.close()
            trainer.kill()
            shared.unlink()
    allowed = gets if os.geteuid() == 0 else [name for name in gets if name != "root"]
    assert got == allowed


# --- servers elsewhere, which may send anything ---

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
GOOD = HEAD + b'Content-Length: 15\r\n\r\n{"reward": 1.0}'


def dripping(data: bytes):
    async def send(writer):
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    return send


async def endless(writer):
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        await writer.drain()


BOMB = gzip.compress(b'{"reward": 1.0, "x": "') + gzip.compress(b"0" * (1 << 24)) * 64 + gzip.compress(b'"}')


async def zipped(writer):
    writer.write(HEAD + f"Content-Encoding: gzip\r\nContent-Length: {len(BOMB)}\r\n\r\n".encode() + BOMB)


async def silent(writer):
    await asyncio.sleep(3600)


async def gone(writer):
    writer.transport.abort()


ANSWERS = {
    "a byte now and then": dripping(HEAD + b"Content-Length: 9999\r\n\r\n" + b" " * 9999),
    "a head without an end": dripping(HEAD + b"X-Pad: " + b"x" * 9999),
    "endless": endless,
    "gzip": zipped,
    "silent": silent,
    "gone": gone,
}


@pytest.fixture
def elsewhere():
    """A server elsewhere, which misbehaves at responses that name a way of it, and pays 1 to all others."""
    loop = asyncio.new_event_loop()

    async def answer(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
            said = json.loads(await reader.readexactly(size)).get("response", {}).get("output", [{}])[0]
            text = said.get("content", [{}])[0].get("text", "")
            if text in ANSWERS:
                await ANSWERS[text](writer)
            else:
                writer.write(GOOD)
            await writer.drain()
            writer.close()

    serving = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    Thread(target=loop.run_forever, daemon=True).start()
    url = f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    yield RunningServer("mcqa", of("mcqa"), GymServer(base_url=url, timeout=1, max_retries=1), "no/python")
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.parametrize("way", ANSWERS)
def test_an_answer_has_a_total_time_and_a_size(elsewhere, way, monkeypatch):
    before, started = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises((NotJudged, ValueError)):
        elsewhere.verify(MCQA, way)
    assert time.monotonic() - started < 20, "two requests of a second each, and the harmless one"
    assert psutil.Process().memory_info().rss - before < 300 << 20
    assert elsewhere.verify(MCQA, "good") == 1


def test_a_server_elsewhere_that_is_gone_is_an_outage(elsewhere):
    reach = elsewhere._reach.model_copy(update={"base_url": "http://127.0.0.1:9"})
    with pytest.raises(GymUnavailable, match=r"mcqa at http://127.0.0.1:9 gives no answer: ConnectError"):
        RunningServer("mcqa", of("mcqa"), reach, "no/python").verify(MCQA, "none")
