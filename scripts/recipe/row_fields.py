"""Kinds of rows as a recipe knows them: the fields of the rows, and the settings for a blend."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.recipe.source import Rows
from scripts.recipe.strict import nearest

CONVERSATIONS = ("messages", "conversations")
ASKED = ("prompt", "question", "instruction")
ANSWERED = ("completion", "answer", "output")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "tool_defs", "functions")
PICTURES = ("images", "image")
BEFORE_ANSWER = (*ASKED, "input", "history", *SYSTEM, *TOOLS, *PICTURES)


@dataclass(frozen=True)
class KindOfRows:
    """A kind of rows: prompts, demonstrations, preferences, or unpaired answers."""

    name: str
    fields: frozenset[str]
    """The fields that rows are made of, to which `columns` map published columns."""
    takes_other_fields: bool = False
    """Whether rows have fields of their environment, too."""
    is_rewarded: bool = False
    """Whether rows may name the environment that rewards an answer to them."""
    is_answered: bool = False
    """Whether models respond to the rows, and environments reward the responses."""
    has_reasoning: bool = False
    """Whether reasoning comes before the answers, of which some may be taken away."""

    def names_environments(self, environments: Sequence[str]) -> bool:
        """Whether each row of a blend with the environments names an environment."""
        return self.is_answered or (self.is_rewarded and bool(environments))

    def misfit(self, part: Rows) -> str | None:
        """Return why a part of a blend cannot give rows of the kind; None where the part can."""
        if part.environment and not self.is_rewarded:
            return f"no environment rewards {self.name}; leave it out"
        if self.takes_other_fields:
            return None
        columns = part.columns if isinstance(part.columns, dict) else {}
        unknown = next((field for field in columns if field not in self.fields), None)
        if unknown is not None:
            return f"columns: {unknown} is no field of {self.name}{nearest(unknown, self.fields)}"
        if part.constants:
            return "constants are fields of prompts; leave them out"
        return None


KINDS_OF_ROWS = {
    kind.name: kind
    for kind in (
        KindOfRows(
            "prompts",
            frozenset(
                {*CONVERSATIONS, *BEFORE_ANSWER, *ANSWERED, "expected_answer", "agent_ref", "responses_create_params"}
            ),
            takes_other_fields=True,
            is_rewarded=True,
            is_answered=True,
        ),
        KindOfRows(
            "demonstrations",
            frozenset({*CONVERSATIONS, *BEFORE_ANSWER, *ANSWERED, "reasoning", "agent_ref"}),
            is_rewarded=True,
            has_reasoning=True,
        ),
        KindOfRows("preferences", frozenset({*BEFORE_ANSWER, "chosen", "rejected", "context", "completions"})),
        KindOfRows("unpaired", frozenset({*BEFORE_ANSWER, *ANSWERED, "reasoning", "label"})),
    )
}
