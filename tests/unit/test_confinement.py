"""A server that may run a model's code gets no more than its layers are said to give, and says which it lacks."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.errors import ServiceError
from scripts.recipe.gym_release import Gym, GymServer
from scripts.rewards import gym_server, landlock
from scripts.rewards.gym import RunningServer
from tests.conftest import ROOT

NOBODY = 65534
# What a program may get where a server is said to lack a layer, by the words of the warning.
MAY = {
    "read as root in": r"processes: (have a capability|the trainer's open files)",
    "see the command lines of other processes": r"$^",
    "end and stop other processes of your user": r"processes: signal ",
    "connect to Unix sockets that its user may write to": r"talking: (a Unix|datagrams|sockets in|docker's|the user's bus)",
    "connect to Unix sockets with abstract names": r"talking: an abstract",
    "write to /dev/shm": r"files: (read|write|make) shared memory",
    "reach the network": r"talking: (a server on|a datagram to this|an address outside|ask for a name|interfaces)",
    "change limits and priorities of other processes": r"processes: (lower a limit|slow|move a process|schedule)"
    r"|talking: (memory of System|new memory|a queue of S|semaphores)",
    "change modes, times and sizes of your files": r"files: (change a file's|truncate|empty)",
    "use keyrings, io_uring, other families of sockets": r"files: read by a file's handle|kernel: |namespaces: |talking: (new memory|a new key|the user's"
    r" keys|the kernel's|the audit's|the virtual|an input|Bluetooth|a queue of P|press)",
}


def tried(*options: str, python: str = sys.executable) -> dict[str, Any]:
    """What all programs got, with the layers that there were; the trainer's variables have a secret."""
    search = {"PYTHONPATH": f"{ROOT}:{sysconfig.get_path('platlib')}"} if python != sys.executable else {}
    environment = {"PATH": os.environ["PATH"], "HF_TOKEN": "hf_SECRET", **search}
    done = subprocess.run(
        [python, "-m", "tests.unit.escapes", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if python != sys.executable and re.search("Permission denied|No module named", done.stderr):
        pytest.skip("another user can run no Python that has what the tests need")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def beyond(found: dict[str, Any]) -> dict[str, str]:
    """What programs got beyond that of which the start warns."""
    lacks = " ".join(found["layers"]["lacks"])
    patterns = [pattern for words, pattern in MAY.items() if words in lacks]
    return {name: text for name, text in found["got"].items() if not any(re.match(one, name) for one in patterns)}


def test_no_program_gets_out_of_a_server_beyond_what_its_start_says():
    found = tried()
    assert found["layers"]["refusal"] is None and found["status"] == 0
    assert beyond(found) == {}
    assert found["damage"] == [] or found["layers"]["lacks"]
    assert found["programs"] > 130


@pytest.mark.slow
def test_a_server_with_the_network_reaches_that_alone():
    found = tried("--network")
    reached = re.compile(MAY["reach the network"])
    assert {name for name in beyond(found) if not reached.match(name)} == set()
    assert "talking: a server on this machine" in found["got"]


@pytest.mark.parametrize("denied", ["landlock", "landlock at the end"])
def test_without_landlock_and_namespaces_no_server_starts(denied):
    found = tried("--deny", denied, "--deny", "namespaces")
    assert found["layers"]["refusal"].startswith("its files cannot be confined: Landlock: ")
    assert "namespaces: Operation not permitted" in found["layers"]["refusal"]
    assert found["got"] is None, "nothing ran"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is no other user")
def test_a_server_of_root_that_cannot_become_another_user_does_not_start():
    found = tried("--deny", "user")
    assert "it cannot run as another user than root" in found["layers"]["refusal"]
    assert found["got"] is None


@pytest.mark.parametrize(
    "denied",
    ["namespaces", pytest.param("mounts", marks=pytest.mark.slow), pytest.param("seccomp", marks=pytest.mark.slow)],
)
def test_a_layer_that_is_lacking_is_said(denied):
    found = tried("--deny", denied)
    assert found["layers"]["refusal"] is None and len(found["layers"]["lacks"]) == 1
    assert "not permitted" in found["layers"]["lacks"][0] or "Invalid argument" in found["layers"]["lacks"][0]
    assert beyond(found) == {}


OPTIONS = [
    [],
    ["--network"],
    ["--talks"],
    *[["--deny", layer] for layer in ("landlock", "landlock at the end", "namespaces", "mounts", "seccomp", "docker")],
    *[["--deny", "docker", option] for option in ("--talks", "--network")],
    *[["--deny", "namespaces", "--deny", "seccomp", option] for option in ("--talks", "--network")],
    *[["--abi", str(version)] for version in range(1, 7)],
    *[["--deny", "namespaces", "--abi", str(version)] for version in range(1, 7)],
    *[["--deny", "namespaces", "--talks", "--abi", str(version)] for version in (1, 6)],
]


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("user", ["as it is", "another"])
def test_on_any_kernel_no_program_gets_more_than_the_start_says(options, user):
    if user == "another" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    more = ["--user", str(NOBODY)] if user == "another" else []
    found = tried(*options, *more, python="/usr/bin/python3" if more else sys.executable)
    if found["layers"]["refusal"] is not None:  # root's right to read is left to no server without a filter
        assert "cannot run as another user than root" in found["layers"]["refusal"]
        assert "seccomp" in options and not more and found["got"] is None
        return
    got = beyond(found)
    if "--network" in options:
        got = {name: text for name, text in got.items() if not re.match(MAY["reach the network"], name)}
    assert got == {}
    if not found["layers"]["lacks"] and "--network" not in options:
        assert found["damage"] == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_the_user_cannot_reach_confines_no_less(tmp_path):
    """It was enough for a server to start with all rights, without a word."""
    tmp_path.chmod(0o700)
    (tmp_path / "inside").mkdir()
    unreachable = ["--more", str(tmp_path / "inside"), "--user", str(NOBODY)]
    found = tried(*unreachable, "--deny", "namespaces", python="/usr/bin/python3")
    assert beyond(found) == {} and found["layers"]["refusal"] is None


@pytest.mark.parametrize(
    ("version", "highest"), [(1, 12), (2, 13), (3, 14), (4, 14), (5, 15), (8, 15), (9, 16), (12, 16)]
)
def test_all_rights_of_a_version_of_landlock_are_handled(version, highest):
    assert landlock.all_rights(version) == 2 ** (highest + 1) - 1


BOMB = """
import os, sys, time
from pathlib import Path
from scripts.rewards import layers
layers.THREADS = 40
home = Path(sys.argv[1])
wanted = layers.Wanted((Path(sys.prefix), Path(sys.base_prefix), Path("/usr"), Path("/lib"), Path("/lib64")), home, False, False)
def bomb():
    made = 0
    try:
        while made < 1000:
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            made += 1
    except OSError:
        (home / "made").write_text(str(made))
    time.sleep(60)
layers.run_confined(wanted, layers.layers_for(wanted), bomb)
"""


@pytest.mark.slow
def test_processes_of_a_server_are_limited_and_end_with_the_process_that_started_it():
    with tempfile.TemporaryDirectory() as home:
        server = subprocess.Popen([sys.executable, "-c", BOMB, home], cwd=ROOT, start_new_session=True)
        made = Path(home, "made")
        for _ in range(300):
            if made.exists() and made.read_text():
                break
            time.sleep(0.1)
        assert int(made.read_text()) < 1000
        server.kill()
        server.wait()
        for _ in range(300):
            if not running(home):
                return
            time.sleep(0.1)
        raise AssertionError("processes outlive what started them")


def running(marker: str) -> list[str]:
    """The processes with a marker in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(path)] if marker.encode() in path.read_bytes() else []
        except OSError:
            continue
    return found


# --- what the trainer does with what a server says ---


class Process:
    """A server's process that has said a line."""

    def __init__(self, said: dict[str, Any]) -> None:
        """Put the line where a server's standard output is read."""
        reading, writing = os.pipe()
        os.write(writing, (json.dumps(said) + "\n").encode())
        os.close(writing)
        self.stdout = os.fdopen(reading, "rb")


def server_that_said(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server of Gym's that has started, or was refused."""
    monkeypatch.setattr(RunningServer, "_start", lambda self: None)
    server = RunningServer("mcqa", Gym(version="0.4.0", servers=["mcqa"]), GymServer(), "no/python")
    server._process = Process(said)
    return server


def test_a_refused_start_is_one_message(monkeypatch):
    server = server_that_said({"refusal": "it would run as root"}, monkeypatch)
    with pytest.raises(ServiceError, match="Gym's server mcqa is not started: it would run as root"):
        server.wait()


def test_a_server_that_lacks_a_layer_is_warned_of_once(monkeypatch, capsys):
    said = {"socket": "/none", "lacks": ["it may write to /dev/shm (no namespaces)"], "has_sessions": False}
    server = server_that_said(said, monkeypatch)
    server.wait()
    server._process, server._client = Process(said), None
    server.wait()
    assert capsys.readouterr().err.count("mcqa is not wholly confined: it may write to /dev/shm (no namespaces)") == 1


def test_servers_that_run_answers_have_the_network_only_where_a_recipe_says_so(monkeypatch):
    server = server_that_said({}, monkeypatch)
    assert (
        server._has_network("mcqa") and not server._has_network("code_gen") and not server._has_network("reasoning_gym")
    )
    server._reach = GymServer(network=True)
    assert server._has_network("code_gen")
    server._reach = GymServer(network=False)
    assert not server._has_network("mcqa")


def test_a_new_setting_that_is_not_used_leaves_the_records_of_earlier_scores():
    """Scores are measured again where these words change."""
    assert (
        repr(GymServer()) == "GymServer(base_url=None, timeout=120.0, max_retries=6, max_concurrency=16, confined=True)"
    )
    assert "network=False" in repr(GymServer(network=False))


def test_the_hubs_tokens_are_not_among_the_caches(tmp_path, monkeypatch):
    for name in ("token", "stored_tokens", "hub", "datasets"):
        (tmp_path / name).touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NLTK_DATA", "/none")
    monkeypatch.setattr(sys, "path", [])
    readable = set(gym_server.readable(Path("/gym")))
    assert {path.name for path in readable if path.parent == tmp_path} == {"hub", "datasets"}
    assert not readable & {
        Path("/"),
        Path("/etc"),
        Path("/run"),
        Path("/var"),
        Path("/home"),
        Path("/root"),
    }
