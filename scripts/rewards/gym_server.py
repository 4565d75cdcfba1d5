"""Serve one of NeMo-Gym's resources servers on a socket for this user alone, until the starting process ends.

Runs in an environment with nemo-gym, and imports of this project only modules without further needs. Gym's command
would start a head server, Ray and an environment for every server besides.
``python -P -m scripts.rewards.gym_server`` reads a JSON object from standard input (the folder, the YAML file, settings
in place of the file's, and a home for the socket) and prints a JSON object: the socket, and whether the server keeps
sessions.
"""

import contextlib
import importlib
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import nemo_gym
import resources_servers
import uvicorn
from fastapi import FastAPI
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig, OmegaConf

from scripts.processes import end_with_parent
from scripts.rewards.confine import restrict_files

SYSTEM = ("bin", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr", "var/lib")
ROOT = Path(nemo_gym.__file__).parents[1]
resources_servers.__path__ = [str(ROOT / "resources_servers")]


def make_server(folder: str, config: dict[str, Any]) -> SimpleResourcesServer:
    """Make a server with a configuration, from within the server's folder of modules and prompts."""
    here = ROOT / "resources_servers" / folder
    before = set(sys.modules)
    sys.path.insert(0, str(here))
    try:
        module = importlib.import_module(f"resources_servers.{folder}.app")
    finally:
        sys.path.remove(str(here))
        for name in {path.stem for path in here.glob("*.py")} & (set(sys.modules) - before):
            del sys.modules[name]
    (served,) = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, SimpleResourcesServer) and kind.__module__ == module.__name__
    ]
    typed = served.model_fields["config"].annotation
    client = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({})
    )
    settings = {**config, "host": "127.0.0.1", "port": 1, "name": folder}
    with contextlib.chdir(here):
        return served(config=typed(**settings), server_client=client)


def application(server: SimpleResourcesServer, folder: str) -> FastAPI:
    """Return the web application of a server."""
    with contextlib.chdir(ROOT / "resources_servers" / folder):
        return server.setup_webserver()


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


def confine(home: Path) -> None:
    """Leave the server Python, the system, caches of models and data to read, and its home to write to.

    A kernel without Landlock confines nothing.
    """
    caches = [Path(os.environ[name]) for name in ("HF_HOME", "NLTK_DATA")]
    libraries = [Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path.startswith("/")]
    system = [Path("/", name) for name in SYSTEM]
    with contextlib.suppress(OSError):
        restrict_files([*libraries, *system, *caches], [home, Path("/dev")])


def main() -> None:
    """Serve the server named on standard input, as the leader of a session."""
    end_with_parent()
    asked = json.load(sys.stdin)
    end_group_with_this_process(asked["home"])
    sys.path.remove(os.environ.pop("PYTHONPATH"))  # no module of ours is taken for one of theirs
    if asked["is_confined"]:
        confine(Path(asked["home"]))
    folder, parts = asked["folder"], OmegaConf.load(asked["file"]).values()
    config = next(part.resources_servers[folder] for part in parts if folder in part.get("resources_servers", ()))
    config = OmegaConf.to_container(OmegaConf.merge(config, asked["settings"]), resolve=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # servers print
    server = make_server(folder, config)
    app = application(server, folder)
    server.setup_exception_middleware(app)
    listening, path = socket.socket(socket.AF_UNIX), f"{asked['home']}/socket"
    listening.bind(path)
    listening.listen(1024)
    has_sessions = type(server).seed_session is not SimpleResourcesServer.seed_session
    print(json.dumps({"socket": path, "has_sessions": has_sessions}), file=answers, flush=True)
    answers.close()
    os.chdir(ROOT / "resources_servers" / folder)
    options = {"access_log": False, "log_level": "warning", "timeout_keep_alive": 300}
    uvicorn.run(app, fd=listening.fileno(), **options)


if __name__ == "__main__":
    main()
