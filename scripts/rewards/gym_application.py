"""Make one of NeMo-Gym's resources servers, and serve it on a socket: in an environment with nemo-gym.

Gym's own command would start a head server, Ray and an environment for every server besides.
"""

import contextlib
import importlib
import inspect
import json
import os
import socket
import sys
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


def serve(folder: str, file: str, settings: dict[str, Any], listening: socket.socket, started: dict[str, Any]) -> None:
    """Serve a server of a YAML file on a socket that listens, and print a JSON object when it has started.

    Args:
        folder: The server's folder in resources_servers.
        file: The YAML file.
        settings: Settings in place of the file's.
        listening: A Unix socket.
        started: What to print, to which is added whether the server keeps sessions.
    """
    parts = OmegaConf.load(file).values()
    config = next(part.resources_servers[folder] for part in parts if folder in part.get("resources_servers", ()))
    config = OmegaConf.to_container(OmegaConf.merge(config, settings), resolve=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # servers print
    server = make_server(folder, config)
    app = application(server, folder)
    server.setup_exception_middleware(app)
    has_sessions = type(server).seed_session is not SimpleResourcesServer.seed_session
    print(json.dumps(started | {"has_sessions": has_sessions}), file=answers, flush=True)
    answers.close()
    os.chdir(ROOT / "resources_servers" / folder)
    options = {"access_log": False, "log_level": "warning", "timeout_keep_alive": 300}
    uvicorn.run(app, fd=listening.fileno(), **options)
