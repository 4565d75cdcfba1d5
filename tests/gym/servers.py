"""Pairs of a row and a response, judged by the /verify of NeMo-Gym's own servers, all in this process.

Runs in an environment that holds nemo-gym (`make gym`). Reads JSON lines
`{"row": ..., "output": [...]}` and writes one of `{"status": ..., "reward": ..., "says": ...}` for each. An argument
names a checkout of Gym to use instead of the installed release. No model is served, so a judge that is asked is a
status of 500.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ADDRESS"] = "local"  # code_gen's server runs programs by Ray, not on a cluster that is up by chance

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])

sys.path.append(str(Path(__file__).parents[2]))

import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from nemo_gym.base_resources_server import BaseVerifyRequest
from omegaconf import OmegaConf

from scripts.rewards.gym_application import ROOT, application, make_server

RESPONSE = {
    "id": "r",
    "created_at": 0,
    "model": "m",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def agents() -> dict[str, tuple[str, dict[str, Any]]]:
    """The folder and the configuration of the server that stands behind each agent, by the agent's name."""
    found = {}
    for path in sorted(ROOT.glob("resources_servers/*/configs/*.yaml")):
        parts = {
            name: part for name, part in (yaml.safe_load(path.read_text()) or {}).items() if isinstance(part, dict)
        }
        servers = {name: server for name, part in parts.items() for server in part.get("resources_servers", {}).items()}
        for name, part in parts.items():
            for agent in part.get("responses_api_agents", {}).values():
                reference = (agent.get("resources_server") or {}).get("name")
                if reference in servers:
                    found.setdefault(name, servers[reference])
    return found


def made(folder: str, config: dict[str, Any]) -> FastAPI:
    """A server's web application."""
    config = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    if "num_rollouts_per_prompt" in config:
        config["num_rollouts_per_prompt"] = 1  # it would wait for the rest of the group
    return application(make_server(folder, config), folder)


def request_only() -> FastAPI:
    """What every server asks of a row before it looks at its own fields."""
    app = FastAPI()

    @app.post("/verify")
    def verify(body: BaseVerifyRequest) -> dict[str, Any]:
        return {"reward": None}

    return app


def main() -> None:
    """Answer each line."""
    known, clients, lacks = agents(), {}, {}
    answers, sys.stdout = sys.stdout, sys.stderr  # some servers print
    with contextlib.ExitStack() as stack:
        for line in sys.stdin:
            pair = json.loads(line)
            name = pair["row"]["agent_ref"]["name"]
            if name not in clients:
                try:
                    app = made(*known[name]) if name in known else None
                except ModuleNotFoundError as error:
                    app, lacks[name] = None, f"its server cannot be imported: {error}"
                client = TestClient(app or request_only(), raise_server_exceptions=False)
                clients[name] = stack.enter_context(client)
                if name not in known:
                    lacks[name] = "this Gym has no such agent"
            body = pair["row"] | {"response": RESPONSE | {"output": pair["output"]}}
            answer = clients[name].post("/verify", json=body)
            verdict = {"status": answer.status_code, "reward": None, "says": lacks.get(name, "")}
            if answer.status_code == 200:
                verdict["reward"] = answer.json()["reward"]
            else:
                verdict["says"] = answer.text[:1000]
            print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main()
