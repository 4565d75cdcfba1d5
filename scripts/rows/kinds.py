"""The kinds of rows: what a row asks, how it is answered, and what is wrong with it.

A new kind is an entry of `KINDS` with a contract, its name in ``scripts.recipe.blend.Blend.kind``, and the columns of
such rows in ``scripts.data.shapes``. Tokenizers count and encode an `Example`, so they know no kind.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

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
from scripts.rows.messages import Row, messages_of, tools_of
from scripts.rows.request import PromptRow, problem_of


def contract_of(environment: str) -> type[PromptRow] | None:
    """Return the contract of an environment's rows; None for an unknown one, as many of Gym's are."""
    if spec := environments().get(environment):
        return spec.row
    is_tool_use = environment.endswith(f"_{Environment.TOOL_USE}")
    return environments()[Environment.TOOL_USE].row if is_tool_use else None


@dataclass(frozen=True)
class RowKind:
    """A kind of row."""

    name: str
    fields: frozenset[str]
    """A row of a blend has at least one of these fields; a published row without them is composed."""
    example: Callable[[Row], Example]
    """Decodes a row that has no `problem`; ValueError, KeyError or TypeError for others."""
    is_rewarded: bool = True
    """Whether rows may name the environment that rewards them."""
    form: Callable[[Row], str] | None = None
    """Returns the form of a row in words, where rows of the kind come in several; a blend has one form."""

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of a row of the `environment`."""
        contracts = {
            "prompts": contract_of(environment) or PromptRow,
            "demonstrations": Demonstration,
            "preferences": Ranked if is_ranked(row) else Pair,
            "unpaired": Labelled,
        }
        return contracts[self.name]

    def problem(self, row: Row, environment: str = "") -> str | None:
        """Return the first problem of a row, with its path; None for a good row of the `environment`."""
        if problem := problem_of(row, self.contract(row, environment)):
            return problem
        try:
            self.example(row)
        except ValueError as error:
            return f"${error}"
        return None


def _prompt(row: Row) -> Example:
    return Example(messages_of(row), tools_of(row))


def _demonstration(row: Row) -> Example:
    return Example(row["messages"][:-1], row.get("tools") or None, (row["messages"][-1:],))


KINDS = {
    kind.name: kind
    for kind in (
        RowKind("prompts", frozenset({"responses_create_params", "_hf_placeholder"}), _prompt),
        RowKind("demonstrations", frozenset({"messages"}), _demonstration),
        RowKind("preferences", frozenset({"context", "prompt"}), preference_of, is_rewarded=False, form=form_of),
        RowKind("unpaired", frozenset({"label"}), labelled_of, is_rewarded=False),
    )
}
