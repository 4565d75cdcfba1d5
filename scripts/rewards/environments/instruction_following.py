"""instruction_following: the response obeys verifiable instructions, named and parametrised as in IFEval."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from scripts.recipe.environment import Environment
from scripts.rewards.instructions import INSTRUCTIONS, obeys
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken


class InstructionFollowingRow(PromptRow, kw_only=True):
    """instruction_following: instructions by name, each with arguments."""

    id: int
    instruction_id_list: Annotated[list[Text], Meta(min_length=1)]
    kwargs: list[dict[str, Any] | None]
    prompt: str
    grading_mode: Literal["binary", "fraction"] = "binary"

    def check_fields(self) -> None:
        """Refuse another number of arguments than of instructions."""
        given, asked = len(self.kwargs), len(self.instruction_id_list)
        if given != asked:
            raise broken("kwargs", f"has {given} entries for {asked} instructions")


def verify(row: dict[str, Any], response: str) -> float:
    """Return 1.0 if every instruction is obeyed (``grading_mode`` fraction: the share), else 0.0; empty is 0.0."""
    if not response.strip():
        return 0.0
    obeyed = [
        obeys(name, response, given) for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True)
    ]
    return sum(obeyed) / len(obeyed) if row.get("grading_mode") == "fraction" else float(all(obeyed))


def check(row: dict[str, Any]) -> str | None:
    """Say why the row's instructions cannot be verified, or None."""
    for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        if name not in INSTRUCTIONS:
            return f"instruction {name!r} has no verifier"
        try:
            obeys(name, "A word or two.", given)
        except (TypeError, ValueError, AttributeError) as error:
            return f"instruction {name}: {str(error).rpartition('() ')[2]}"
    return None


def tags(row: dict[str, Any]) -> list[str]:
    """Return the instructions' names and number."""
    names = row["instruction_id_list"]
    return [f"{len(names)} instruction{'s' if len(names) > 1 else ''}", *dict.fromkeys(names)]


SPEC = EnvironmentSpec(InstructionFollowingRow, verify, check=check, tags=tags)
ENVIRONMENTS = {Environment.INSTRUCTION_FOLLOWING: SPEC}
