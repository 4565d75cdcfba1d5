"""The kinds of rows: prompt and answers of a row, the contract, the labels, the form, and problems.

A new kind is a class here with an entry of `KINDS`, an entry in ``scripts.recipe.row_fields``, its name in
``scripts.recipe.blend.Blend.kind``, and the columns in ``scripts.data.shapes``. Tokenizers count and encode an
`Example`, and know no kind.
"""

from collections.abc import Collection
from typing import Any, ClassVar, Literal

from msgspec import Struct

from scripts.installed import environments
from scripts.recipe.environment import Environment
from scripts.recipe.strict import nearest
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
from scripts.rows.jsonl import environment_named
from scripts.rows.messages import Row, messages_of, tools_of
from scripts.rows.request import PromptRow, problem_of

Learns = Literal["last", "every", "answers", "nothing"]


def contract_of(environment: str) -> type[PromptRow] | None:
    """Return the contract of an environment's rows; None for an unknown one, as many of Gym's are."""
    if spec := environments().get(environment):
        return spec.row
    is_tool_use = environment.endswith(f"_{Environment.TOOL_USE}")
    return environments()[Environment.TOOL_USE].row if is_tool_use else None


class RowKind:
    """A kind of row; the methods here are right for answers without an environment."""

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]]
    """A row of a blend has at least one of these fields; a published row without them is composed."""
    asked: ClassVar[str] = "prompt"
    """The field of the prompt."""
    answers: ClassVar[tuple[str, ...]] = ()
    """The fields of the answers, the best first, where answers have fields of their own."""
    sampled_splits: ClassVar[tuple[str, ...]] = ()
    """The splits of which rows are taken to try their rewards."""
    is_composed_by_columns: ClassVar[bool] = True
    """Whether a row with one of `fields` may still need composing, by its other columns."""
    added_columns: ClassVar[tuple[str, ...]] = ("history",)
    """Columns next to the fields that composing reads."""

    def example(self, row: Row) -> Example:
        """Decode a row that has no `problem`; ValueError, KeyError or TypeError for others."""
        raise NotImplementedError

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of a row of the `environment`."""
        raise NotImplementedError

    def has_contract(self, environment: str) -> bool:
        """Whether the rows of an environment have a contract."""
        return True

    def form(self, row: Row) -> str | None:
        """Return the form of a row in words, where rows of the kind come in several; a blend has one form."""
        return None

    def environment(self, row: Row) -> str | None:
        """Return the environment that rewards answers to a row; None where none can."""
        return None

    def label(self, row: Row) -> bool | None:
        """Return whether the answer of a good row is wanted; None where no label says so."""
        return None

    def learns(self, every_turn: bool) -> Learns:
        """Return the messages to learn; of conversations `every_turn` of the assistant, or the last."""
        return "answers"

    def as_prompt(self, row: Row) -> Row:
        """Return a row in the form for environments: prompt, tools, and environment."""
        example = self.example(row)
        asked = {"input": example.prompt, **({"tools": example.tools} if example.tools else {})}
        return {"responses_create_params": asked, **{key: row[key] for key in ("agent_ref",) if key in row}}

    def reward_problem(self, row: Row, environment: Any) -> str | None:
        """Return why an environment's specification cannot reward answers to a row; None where none has to."""
        return None

    def problem(self, row: Row, environment: str = "") -> str | None:
        """Return the first problem of a row, with its path; None for a good row of the `environment`."""
        if problem := problem_of(row, self.contract(row, environment)):
            return problem
        try:
            self.example(row)
        except ValueError as error:
            return f"${error}"
        return None

    def problem_in(self, row: Row, allowed: Collection[str]) -> str | None:
        """Return the first problem of a row of a blend that allows some environments; none: any."""
        return self.problem(row)


class Rewarded(RowKind):
    """A kind of row in which a row may name an environment."""

    def environment(self, row: Row) -> str | None:
        """Return the environment that a row names."""
        return environment_named(row)

    def problem_in(self, row: Row, allowed: Collection[str]) -> str | None:
        """Return the first problem of a row of a blend that allows some environments; none: any."""
        environment = self.environment(row)
        if environment is not None and allowed and environment not in allowed:
            return f"$.agent_ref.name: is none of the blend's environments{nearest(environment, allowed)}"
        missing = "$.agent_ref: is missing" if allowed and "agent_ref" not in row else None
        return self.problem(row, environment or "") or missing


class Prompts(Rewarded):
    """Rows for models to respond to."""

    name = "prompts"
    fields = frozenset({"responses_create_params", "_hf_placeholder"})
    sampled_splits = ("train-split.jsonl",)
    is_composed_by_columns = False

    def example(self, row: Row) -> Example:
        """Decode a row."""
        return Example(messages_of(row), tools_of(row))

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of the environment, or of all prompts."""
        return contract_of(environment) or PromptRow

    def has_contract(self, environment: str) -> bool:
        """Whether the environment is known; many of Gym's are not."""
        return contract_of(environment) is not None

    def learns(self, every_turn: bool) -> Learns:
        """Return the messages to learn: none, since models make the answers."""
        return "nothing"

    def as_prompt(self, row: Row) -> Row:
        """Return the row."""
        return row

    def reward_problem(self, row: Row, environment: Any) -> str | None:
        """Return why an environment's verifier cannot reward answers to a row."""
        return environment.check(row) if environment.verify is not None else None


class Demonstrations(Rewarded):
    """Conversations to imitate."""

    name = "demonstrations"
    fields = frozenset({"messages"})
    asked = "messages"
    added_columns = ()

    def example(self, row: Row) -> Example:
        """Decode a row."""
        return Example(row["messages"][:-1], row.get("tools") or None, (row["messages"][-1:],))

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of conversations."""
        return Demonstration

    def learns(self, every_turn: bool) -> Learns:
        """Return the turns to learn."""
        return "every" if every_turn else "last"


class Preferences(RowKind):
    """Better and worse answers."""

    name = "preferences"
    fields = frozenset({"context", "prompt"})
    answers = ("chosen", "rejected")

    def example(self, row: Row) -> Example:
        """Decode a row in either form."""
        return preference_of(row)

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of the row's form."""
        return Ranked if is_ranked(row) else Pair

    def form(self, row: Row) -> str:
        """Return the form of a row in words."""
        return form_of(row)


class Unpaired(RowKind):
    """Answers with a label, wanted or not."""

    name = "unpaired"
    fields = frozenset({"label"})
    answers = ("completion",)

    def example(self, row: Row) -> Example:
        """Decode a row."""
        return labelled_of(row)

    def contract(self, row: Row, environment: str) -> type[Struct]:
        """Return the contract of labelled answers."""
        return Labelled

    def label(self, row: Row) -> bool:
        """Return whether the answer is wanted."""
        return row["label"]


KINDS: dict[str, RowKind] = {kind.name: kind for kind in (Prompts(), Demonstrations(), Preferences(), Unpaired())}
