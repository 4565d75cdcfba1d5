"""NeMo-Gym's own words on a server, in the YAML of the release: folder, settings, agents; tasks that run answers."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.errors import UserError
from scripts.recipe.gym_release import Gym
from scripts.recipe.yaml_file import project_or_shipped

Row = dict[str, Any]
EVALUATING = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
}
"""Tasks of reasoning_gym 0.1.25 whose scorers run answers by Python's eval, or by sympy's parser, which does."""

RUNS_ANSWERS = {"code_gen", "reasoning_gym"}
"""Servers by folder that run answers as code and need no network for it."""


def evaluating_task(row: Row) -> str | None:
    """Return the task of a row of reasoning_gym whose scorer evaluates answers, else None."""
    task = row["metadata"].get("source_dataset") if isinstance(row.get("metadata"), dict) else None
    return task if task in EVALUATING else None


class Configured(NamedTuple):
    """A server in Gym's YAML: folder in resources_servers, file, settings, agents."""

    folder: Path
    file: Path
    config: dict[str, Any]
    agents: list[str]


def agents_of(gym: Gym | None, python: str | Path) -> dict[str, str]:
    """Map agents to the servers for their rows; UserError where Gym names no agent, or two servers of an agent.

    `python` runs the environment with Gym; a relative path starts from the repository.
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
    """Read a server's YAML in the Gym of this Python; UserError for another version or an unknown server."""
    root = project_or_shipped(Path(python)).absolute().parents[1]
    found = root.glob("lib/python3*/site-packages/nemo_gym-*.dist-info")
    installed = {path.name.removeprefix("nemo_gym-").removesuffix(".dist-info") for path in found}
    if gym.version not in installed:
        is_there = f"holds nemo-gym {', '.join(sorted(installed))}" if installed else "holds no nemo-gym"
        raise UserError(
            f"gym.version is {gym.version}, but {root} {is_there}; make gym installs what envs/nemo-gym.txt names, and "
            "the site's gym_python says where"
        )
    (servers,) = root.glob("lib/python3*/site-packages/resources_servers")
    folder, _, stem = name.partition("/")
    files = sorted((servers / folder / "configs").glob("*.yaml"))
    file = servers / folder / "configs" / f"{stem or folder}.yaml"
    if not stem and len(files) == 1:
        (file,) = files
    if file not in files:
        known = ", ".join(f"{folder}/{found.stem}" for found in files) or "none of this folder"
        raise UserError(f"gym.servers: Gym {gym.version} has no {file}; it has {known}")
    parts = {key: part for key, part in yaml.safe_load(file.read_bytes()).items() if isinstance(part, dict)}
    served = {key: part["resources_servers"] for key, part in parts.items() if "resources_servers" in part}
    config = next((part[folder] for part in served.values() if folder in part), None)
    if config is None:
        raise UserError(f"gym.servers: {file} configures no resources server of {folder}")
    agents = [
        key
        for key, part in parts.items()
        for agent in part.get("responses_api_agents", {}).values()
        if folder in served.get((agent.get("resources_server") or {}).get("name"), ())
    ]
    return Configured(servers / folder, file, config | gym.settings.get(name, {}), agents)
