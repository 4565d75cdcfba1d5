"""The kinds of rows: what a row asks, how it is answered, and what is wrong with it.

A new kind is a class here, its name in ``scripts.recipe.blend.Blend.kind``, and the columns it is composed from in
``scripts.data.shapes``. Tokenizers count and encode an `Example`, so they know no kind.
"""

from typing import Any, ClassVar

from scripts.installed import environments
from scripts.recipe.environment import Environment
from scripts.rows.examples import (
    Demonstration,
    Example,
    Labelled,
    Pair,
    Ranked,
    form_of,
    is_ranked,
    labelled_of,
    preference_of,
)
from scripts.rows.messages import messages_of, tools_of
from scripts.rows.request import PromptRow, problem_of

Row = dict[str, Any]


def contract_of(environment: str) -> type[PromptRow] | None:
    """Return the contract of an environment's rows; None for an unknown one, as many of Gym's are."""
    if spec := environments().get(environment):
        return spec.row
    is_tool_use = environment.endswith(f"_{Environment.TOOL_USE}")
    return environments()[Environment.TOOL_USE].row if is_tool_use else None


class RowKind:
    """A kind of row; `KINDS` has one instance of each, by name."""

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]]
    """A row of a blend has at least one of these fields; a published row without them is composed."""
    is_rewarded: ClassVar[bool] = True
    """Whether rows may name the environment that rewards them."""

    def example(self, row: Row) -> Example:
        """Decode a row that has no `problem`; ValueError, KeyError or TypeError for others."""
        raise NotImplementedError

    def problem(self, row: Row, environment: str = "") -> str | None:
        """The first problem of a row, with its path; None for a good row of the `environment`."""
        raise NotImplementedError

    def problem_of_example(self, row: Row) -> str | None:
        """The first problem of a row with the fields and types of its kind."""
        try:
            self.example(row)
        except ValueError as error:
            return f"${error}"
        return None

    def form(self, row: Row) -> str | None:
        """The form of a row, in words, where rows of the kind come in several; a blend has one form."""


class Prompts(RowKind):
    """Prompts whose responses an environment rewards."""

    name = "prompts"
    fields = frozenset({"responses_create_params", "_hf_placeholder"})

    def example(self, row: Row) -> Example:
        """The prompt and its tools."""
        return Example(messages_of(row), tools_of(row))

    def problem(self, row: Row, environment: str = "") -> str | None:
        """What breaks the contract of the row's environment."""
        return problem_of(row, contract_of(environment) or PromptRow)


class Demonstrations(RowKind):
    """Conversations whose last message is imitated."""

    name = "demonstrations"
    fields = frozenset({"messages"})

    def example(self, row: Row) -> Example:
        """The messages before the last, and the last."""
        return Example(row["messages"][:-1], row.get("tools") or None, (row["messages"][-1:],))

    def problem(self, row: Row, environment: str = "") -> str | None:
        """What is wrong with the conversation; an environment asks nothing of it."""
        return problem_of(row, Demonstration)


class Preferences(RowKind):
    """A better and a worse answer to a prompt."""

    name = "preferences"
    fields = frozenset({"context", "prompt"})
    is_rewarded = False

    def example(self, row: Row) -> Example:
        """The prompt, the chosen and the rejected answer."""
        return preference_of(row)

    def problem(self, row: Row, environment: str = "") -> str | None:
        """What is wrong with either form of a pair."""
        return problem_of(row, Ranked if is_ranked(row) else Pair) or self.problem_of_example(row)

    def form(self, row: Row) -> str | None:
        """Ranked completions, or a pair of texts or messages."""
        return form_of(row)


class Unpaired(RowKind):
    """An answer to a prompt, labelled as wanted or unwanted."""

    name = "unpaired"
    fields = frozenset({"label"})
    is_rewarded = False

    def example(self, row: Row) -> Example:
        """The prompt and the answer."""
        return labelled_of(row)

    def problem(self, row: Row, environment: str = "") -> str | None:
        """What is wrong with prompt, completion or label."""
        return problem_of(row, Labelled) or self.problem_of_example(row)


KINDS: dict[str, RowKind] = {kind.name: kind for kind in (Prompts(), Demonstrations(), Preferences(), Unpaired())}
