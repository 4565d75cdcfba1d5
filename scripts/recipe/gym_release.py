"""Settings of the NeMo-Gym servers that reward a stage's rows."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from scripts.recipe.strict import Name, Strict, invalid, matching, refuse_misnamed

Address = matching(r"^https?://(\[[0-9a-f:.]+\]|[^\s@/:]+)(:\d{1,5})?(/[^\s@]*)?$")
VERDICTS = 2
"""How verdicts of Gym's servers are taken, as records hold it. Raised where earlier ones may be wrong: before 2, the
first responses of a process could count as not judged."""
ServerName = matching(r"^\w[\w.-]*(/\w[\w.-]*)?$")


JUDGES_GONE = {
    "judges": "name the judge's server of NeMo-Gym in gym (docs/environments.md)",
    "judge_servers": "say where NeMo-Gym's server answers in gym_servers.<server>.base_url",
}


class Gym(Strict):
    """NeMo-Gym's resources servers, which reward the rows of their agents in place of the verifiers here."""

    version: matching(r"^\d+(\.\w+)+$") = Field(description="Of nemo-gym.")
    servers: list[ServerName] = Field(
        min_length=1,
        description="By YAML file: mcqa is resources_servers/mcqa/configs/mcqa.yaml, or the folder's only file; "
        "math_with_judge/dapo17k is resources_servers/math_with_judge/configs/dapo17k.yaml.",
    )
    settings: dict[ServerName, dict[str, Any]] = Field({})
    """Settings in place of a server's YAML, by server."""
    agents: dict[ServerName, list[Name]] = Field({})
    """Agents (agent_ref.name) whose rows a server rewards; none: the agents in the YAML."""


class GymServer(Strict):
    """How a server is reached. Changes no weight."""

    base_url: Address | None = None
    """The server's address; none: the server is started and ended with the work."""
    revision: str | None = Field(None, min_length=1)
    """What the server at `base_url` runs, in words of yours; with another one its verdicts on made data are asked for
    again, wherever it answers. None: the address counts, and some verdicts of before are asked for again."""
    timeout: PositiveFloat = 120.0
    """Seconds that one answer may take."""
    max_retries: NonNegativeInt = 6
    """Further tries after a lost connection, after 1, 2, 4, ... at most 60 seconds."""
    max_concurrency: PositiveInt = 16
    """Responses that the server verifies at a time."""
    confined: bool | Literal["strict"] = True
    """Confine a server that is started here: it reads libraries and caches alone, and writes to its own home. With
    true, a machine that confines files starts it, with a warning of all else that it lacks; strict refuses then; false
    starts it with your rights."""
    network: bool | None = None
    """Whether a server that is started here reaches the network; none: unless it runs answers as code (code_gen,
    reasoning_gym)."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Leave out unset settings, which earlier commits had not: kept scores are named by this text."""
        for name, value in super().__repr_args__():
            if name not in {"revision", "network"} or value is not None:
                yield name, value


def check_gym(gym: Gym | None, servers: dict[str, GymServer]) -> None:
    """Refuse settings of servers that `gym.servers` does not name."""
    if gym is None:
        if servers:
            raise invalid("gym_servers needs gym, which names the servers")
        return
    for key, names in {"gym.settings": gym.settings, "gym.agents": gym.agents, "gym_servers": servers}.items():
        for name in names:
            refuse_misnamed(key, "server in gym.servers", name, gym.servers)
    for name, server in servers.items():
        if server.revision is not None and server.base_url is None:
            raise invalid(f"gym_servers.{name}.revision is for a server elsewhere; say base_url too, or leave it out")
        if server.base_url is not None and server.network is not None:
            raise invalid(f"gym_servers.{name}.network is for a server that is started here, and this one is elsewhere")
        if server.base_url is not None and name in gym.settings:
            raise invalid(f"gym.settings.{name} is for a server that is started here, and this one answers elsewhere")
