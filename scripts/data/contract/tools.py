"""Environments that read the policy's calls of tools."""

from typing import Annotated

from msgspec import Meta, Struct

from scripts.data.contract.base import Row, Text, broken, parse


class Message(Struct, tag="message"):
    """The policy should answer in words; any will do."""

    content: str


class FunctionCall(Struct, tag="function_call"):
    """The policy should make this call."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """The arguments are an object, written as JSON."""
        parse(self.arguments, "arguments", dict)


class Batch(Struct, tag="function_call_batch"):
    """The policy should make these calls, in any order."""

    calls: Annotated[list[FunctionCall], Meta(min_length=1)]


class ToolUse(Row, kw_only=True):
    """The single-step tool-use family: one action, compared with the expected one."""

    expected_action: Message | FunctionCall


class ParallelToolUse(Row, kw_only=True):
    """The environment of the family that Gym's main branch has alone: several calls may be expected."""

    expected_action: Message | FunctionCall | Batch


class Call(Struct, forbid_unknown_fields=True):
    """A call in a list of calls."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """The arguments are an object, written as JSON."""
        parse(self.arguments, "arguments", dict)


class WorkplaceAssistant(Row, kw_only=True):
    """workplace_assistant: the calls leave mail, calendar and tables as the expected ones do."""

    id: int
    ground_truth: list[Call] | str
    category: str
    environment_name: str

    def __post_init__(self) -> None:
        """Expected calls that stand there as text are JSON as well."""
        super().__post_init__()
        if isinstance(self.ground_truth, str):
            parse(self.ground_truth, "ground_truth", list[Call])
        if not self.responses_create_params.tools:
            raise broken("responses_create_params.tools", "is empty, so nothing can be done")
