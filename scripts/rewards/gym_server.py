"""Start one of NeMo-Gym's resources servers, confined, on a socket for this user alone, until the parent ends.

Runs in an environment with nemo-gym, and imports of this project only modules without further needs.
``python -P -m scripts.rewards.gym_server`` reads a JSON object from standard input (the folder, the YAML file, settings
in place of the file's, a home for the socket, the confinement) and prints a JSON object: the socket, whether the
server keeps sessions, and the layers missing from the confinement; or why no server starts.

This process stays outside of the confinement, imports nothing of Gym, holds no secret, and waits for the server.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from scripts.processes import end_with_parent
from scripts.rewards.layers import Wanted, layers_for, run_confined

SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/sys", "/usr")
SETTINGS = """
alternatives ca-certificates fonts gai.conf group host.conf hosts ld.so.cache ld.so.conf ld.so.conf.d localtime
mime.types nsswitch.conf os-release passwd pki/ca-trust pki/tls/cert.pem pki/tls/certs protocols resolv.conf services
ssl/cert.pem ssl/certs ssl/openssl.cnf timezone
"""
"""Files and folders of /etc that programs read, without keys: those of the host lie there, too."""
SECRETS = {"token", "stored_tokens"}
"""Files of HF_HOME with keys of the hub."""


def end_group_with_this_process(home: str) -> None:
    """Fork a process that removes the home and kills this process's group afterwards.

    Ray's daemons would live on for a minute.
    """
    this = os.getpid()
    if os.fork() == 0:
        while os.getppid() == this:
            time.sleep(0.2)
        shutil.rmtree(home, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def readable(gym: Path) -> Iterator[Path]:
    """Yield the files and folders for a server to read: Python, Gym, the system, caches without keys."""
    yield from (Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path.startswith("/"))
    yield gym / "resources_servers"
    yield gym / "nemo_gym"
    yield Path(__file__).parent
    yield from map(Path, SYSTEM)
    yield from (Path("/etc", name) for name in SETTINGS.split())
    yield Path(os.environ["NLTK_DATA"])
    with suppress(OSError):  # where there is no cache, or another user's, nothing is read
        cache = Path(os.environ["HF_HOME"])
        yield from (path for path in cache.iterdir() if path.name not in SECRETS)


def uses_ray(folder: Path) -> bool:
    """Tell whether a server uses Ray, with processes that talk by sockets and shared memory."""
    return any("import ray" in path.read_text(errors="replace") for path in folder.rglob("*.py"))


def serve(asked: dict[str, Any], listening: socket.socket, lacks: list[str]) -> None:
    """Serve the server of a request; never returns."""
    from scripts.rewards import gym_application  # noqa: PLC0415 - which runs Gym's code, in the confined process alone

    started = {"socket": listening.getsockname(), "lacks": lacks}
    gym_application.serve(asked["folder"], asked["file"], asked["settings"], listening, started)


def listen(path: str) -> socket.socket:
    """Return a socket that listens at a path; made here, since a confined server may make no Unix socket."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(1024)
    return listening


def main() -> None:
    """Start the server named on standard input, as the leader of a session, and end with the server's exit code."""
    end_with_parent()
    asked = json.load(sys.stdin)
    end_group_with_this_process(asked["home"])
    sys.path.remove(os.environ.pop("PYTHONPATH"))  # no module of ours is taken for one of theirs
    listening = listen(f"{asked['home']}/socket")
    if not asked["confined"]:
        serve(asked, listening, lacks=["it has your rights (confined: false)"])
    gym = Path(importlib.util.find_spec("nemo_gym").origin).parents[1]
    talks = uses_ray(gym / "resources_servers" / asked["folder"])
    wanted = Wanted(tuple(readable(gym)), Path(asked["home"]), network=asked["network"], talks=talks)
    layers = layers_for(wanted)
    refusal = layers.refusal
    if layers.lacks and asked["confined"] == "strict":
        refusal = f"{'; '.join(layers.lacks)}, and confined is strict"
    if refusal is not None:
        print(json.dumps({"refusal": refusal}), flush=True)
        sys.exit(1)
    sys.exit(run_confined(wanted, layers, partial(serve, asked, listening, layers.lacks)))


if __name__ == "__main__":
    main()
