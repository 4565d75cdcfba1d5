"""Judges of a NeMo-RL stage that are served outside of the Ray cluster."""

from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from scripts.recipe.effect import WithoutEffect
from scripts.recipe.site import Variable
from scripts.recipe.strict import Strict, invalid, matching

JudgeName = matching(r"^[a-z][a-z0-9_]*$")
Line = matching(r"^[^\r\n]+$")
OURS = ("--tensor-parallel-size", "-tp", "--distributed-executor-backend", "--port", "--served-model-name")
SECRET = ("--api-key",)


def _is_plain(address: str) -> str:
    """Refuse an address with a user, a password or a query, without showing the address."""
    if any(sign in address for sign in "@?#"):
        raise invalid("is to be http://host:port/v1 without user, password, query or fragment: no secret stands here")
    return address.rstrip("/")


def _is_free(argument: str) -> str:
    option = argument.split("=", 1)[0]
    if option in OURS:
        raise invalid(f"leave {option} out, which follows from the judge's other keys")
    if option in SECRET:
        raise invalid(f"leave {option} out: NeMo-Gym would not send the key, and no secret stands here")
    return argument


class Judge(Strict):
    """A judge: a pool of `replicas`, or a server at an `address`. No GPU has tried either."""

    server: matching(r"^\w+(\.\w+)*$") = Field(
        description="The key below env.nemo_gym with base_url and model: genrm_model.responses_api_models.genrm_model."
    )
    model: matching(r"^[\w/.:@+-]+$") = Field(
        description="A folder or a repository of the hub; with address, the name by which the model is served."
    )
    arguments: list[Annotated[Line, AfterValidator(_is_free)]] = Field([], description="Of vllm serve, a word each.")

    replicas: WithoutEffect[PositiveInt | None] = None
    """Servers of the pool, behind one address."""
    nodes_per_replica: WithoutEffect[PositiveInt] = 1
    """Nodes of a replica, over all of whose GPUs the model is split (tensor parallelism)."""
    environment: WithoutEffect[dict[Variable, matching(r"^[^\r\n]*$")]] = Field(
        {}, description="Variables of the pool. No secrets."
    )
    address: WithoutEffect[Annotated[matching(r"^https?://\S+$"), AfterValidator(_is_plain)] | None] = None
    """Of a server elsewhere, as http://host:8000/v1; nothing is started."""

    def _refuse_misfits(self) -> None:
        if (self.replicas is None) == (self.address is None):
            raise invalid("say replicas, to start a pool, or address, for a server elsewhere: one of both")
        if self.address and (idle := self.model_fields_set & {"nodes_per_replica", "environment", "arguments"}):
            raise invalid(f"{', '.join(sorted(idle))}: for a pool, and address names a server elsewhere; leave it out")
