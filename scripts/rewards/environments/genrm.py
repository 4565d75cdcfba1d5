"""genrm_compare without a reward model: responses are compared by likeness to the row's hidden ``reference``.

NeMo-Gym's server asks a generative reward model instead. Length counts against a response only for text
missing in the reference.
"""

from difflib import SequenceMatcher
from typing import Any

from scripts.recipe.environment import Environment
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, broken

ALONE = 3.0


class GenRmRow(PromptRow, kw_only=True):
    """genrm_compare: a reward model compares the group's responses."""

    principle: str | None = None
    prompt_id: str | None = None
    task_index: int | None = None
    rollout_index: int | None = None

    def check_fields(self) -> None:
        """Refuse messages other than plain texts, unreadable for the reward model."""
        messages = self.responses_create_params.input
        if isinstance(messages, str):
            raise broken("responses_create_params.input", "must be a list of messages: the judge reads those")
        for place, item in enumerate(messages):
            if item.type == "message" and item.role != "assistant" and not isinstance(item.content, str):
                where = f"responses_create_params.input[{place}].content"
                raise broken(where, "must be a text: the judge does not see parts")


def likeness(reference: str, response: str) -> float:
    """Score a response from 1 to 5 by Ratcliff-Obershelp similarity."""
    return 1 + 4 * SequenceMatcher(None, reference, response.strip(), autojunk=False).ratio()


def compare(row: dict[str, Any], responses: list[str]) -> list[float]:
    """Score the responses of a group from 1 to 5; a lone response earns 3.0."""
    if len(responses) == 1:
        return [ALONE]
    return [likeness(row["reference"], response) for response in responses]


def verify(row: dict[str, Any], response: str) -> float:
    """Score a held-out response: 1.0 if as like the reference as the reference is, else 0.0."""
    return float(likeness(row["reference"], response) >= likeness(row["reference"], row["reference"]))


def check(row: dict[str, Any]) -> str | None:
    """Say why a row cannot be rewarded, or None; published rows have no reference."""
    if isinstance(row.get("reference"), str):
        return None
    return "reference is missing: without Gym's server (gym.servers), answers are compared by likeness to the reference"


ENVIRONMENTS = {
    Environment.GENRM: EnvironmentSpec(GenRmRow, verify, compare, check, answer=lambda row: row.get("reference"))
}
