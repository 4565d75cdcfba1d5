"""Environments that read one answer and judge it by a program: math, choices, code, instructions, schemas, puzzles."""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scripts.data.contract.base import Row, Text, broken, groups_of, parse

_TIME = r"\s*\d+(:\d+)?\s*(am|pm)\s*|\s*\d+:\d+\s*"
_CONSTRAINT = re.compile(rf"(before|after|at) ({_TIME})|between ({_TIME}) and ({_TIME})")
_CLOCK = re.compile(_TIME)


class Math(Row, kw_only=True):
    """math_with_judge, and ns_tools where it hands on to it: the answer stays a string, "34" and never 34."""

    question: str
    expected_answer: Text


class NsTools(Math, kw_only=True):
    """ns_tools: a stateful Python tool, then the verifier that the row names."""

    verifier_type: str | None = None


class Template(Struct):
    """``template_metadata``: how this row's prompt asks for its answer."""

    output_regex: str | list[str] = []

    def patterns(self) -> list[str]:
        """Its regular expressions."""
        return [self.output_regex] if isinstance(self.output_regex, str) else self.output_regex

    def __post_init__(self) -> None:
        """Gym takes a regular expression that does not compile for an answer that is not there."""
        for pattern in self.patterns():
            if isinstance(groups := groups_of(pattern), str):
                raise broken("output_regex", f"does not compile ({groups})")


class Mcqa(Row, kw_only=True):
    """mcqa: the chosen letter is the expected one."""

    expected_answer: Text
    options: list[dict[str, str | None]] | None = None
    grading_mode: Literal["strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon"] = (
        "strict_single_letter_boxed"
    )
    template_metadata: Template | None = None
    metadata: dict[str, Any] | None = None
    uuid: str | None = None

    def __post_init__(self) -> None:
        """The expected letter is one of the options'; only a row with a regular expression of its own needs none."""
        super().__post_init__()
        patterns = self.template_metadata.patterns() if self.template_metadata else []
        if any(groups_of(pattern) > 1 for pattern in patterns):
            raise broken("template_metadata.output_regex", "captures more than one group; Gym reads one")
        options = [pair for option in self.options or () for pair in option.items()]
        letters = {letter.upper() for letter, text in options if text is not None and len(letter) == 1}
        if not letters and not patterns:
            raise broken("options", "has no letter with a text, so no answer can be right")
        if letters and self.expected_answer.strip().upper() not in letters:
            known = ", ".join(sorted(letters))
            raise broken("expected_answer", f"{self.expected_answer!r} is none of the options {known}")


class UnitTests(Struct):
    """What a program is run on, and what it must print or return."""

    inputs: Annotated[list[str], Meta(min_length=1)]
    outputs: list[str]
    fn_name: str | None = None

    def __post_init__(self) -> None:
        """Each input has its output; arguments and results of a function are JSON."""
        if len(self.inputs) != len(self.outputs):
            raise broken("outputs", f"has {len(self.outputs)} entries for {len(self.inputs)} inputs")
        if self.fn_name is not None:
            for place, (given, result) in enumerate(zip(self.inputs, self.outputs, strict=True)):
                for line in given.split("\n"):
                    parse(line, f"inputs[{place}]")
                parse(result, f"outputs[{place}]")


class Program(Struct):
    """``verifier_metadata`` of a programming task."""

    unit_tests: UnitTests


class CodeGen(Row, kw_only=True):
    """code_gen: the last code block passes all tests."""

    verifier_metadata: Program


class InstructionFollowing(Row, kw_only=True):
    """instruction_following: every instruction, or a share of them, is obeyed.

    Gym's main branch also finds them in ``verifier_metadata``; the Gym of no release does.
    """

    id: int
    instruction_id_list: Annotated[list[Text], Meta(min_length=1)]
    kwargs: list[dict[str, Any] | None]
    prompt: str
    grading_mode: Literal["binary", "fraction"] = "binary"

    def __post_init__(self) -> None:
        """There are as many arguments as instructions."""
        super().__post_init__()
        given, asked = len(self.kwargs), len(self.instruction_id_list)
        if given != asked:
            raise broken("kwargs", f"has {given} entries for {asked} instructions")


SchemaType = Literal["null", "boolean", "object", "array", "number", "integer", "string"]


class Schema(Struct):
    """A JSON schema, as far as a wrong one would fail every answer."""

    type: SchemaType | list[SchemaType] | None = None
    properties: "dict[str, Schema | bool]" = {}
    items: "Schema | bool | list[Schema | bool] | None" = None
    enum: list[Any] | None = None
    anyOf: "list[Schema | bool]" = []
    oneOf: "list[Schema | bool]" = []
    allOf: "list[Schema | bool]" = []


class StructuredOutputs(Row, kw_only=True):
    """structured_outputs: the answer, or the arguments of a call, obey a schema."""

    schema_str: str
    schema_type: Literal["json", "yaml", "xml", "toml", "csv"]
    response_mode: str | None = "text"
    tool_name: str | None = None
    tool_payload_key: str | None = None
    problem_type: str | None = None
    num_turns: int | None = None
    num_tools: int | None = None
    num_distractors: int | None = None
    has_distractors: bool | None = None
    schema_repr: str | None = None
    source_format: str | None = None
    source_record_id: str | None = None
    source_schema_type: str | None = None
    tool_schema_mode: str | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    instruction_layout: str | None = None
    instruction_detail_level: str | None = None
    system_instruction_style: str | None = None
    tool_name_style: str | None = None
    distractor_style: str | None = None
    tool_union_mode: str | None = None

    def __post_init__(self) -> None:
        """The schema is one, and the tool that is to be called is offered."""
        super().__post_init__()
        parse(self.schema_str, "schema_str", Schema)
        offered = {tool.name for tool in self.responses_create_params.tools}
        if self.response_mode == "tool_call" and self.tool_name and self.tool_name not in offered:
            raise broken("tool_name", f"{self.tool_name!r} is none of responses_create_params.tools")


class Puzzle(Struct):
    """``metadata`` of a puzzle: which scorer knows it."""

    source_dataset: Text


class ReasoningGym(Row, kw_only=True):
    """reasoning_gym: the puzzle's own scorer."""

    question: str
    answer: str | None
    metadata: Puzzle


class Event(Struct):
    """An event that the calendar must hold in the end."""

    duration: Annotated[int, Meta(ge=1)]
    min_time: str
    max_time: str
    constraint: str | None

    def __post_init__(self) -> None:
        """Times and the constraint are written as the grader reads them."""
        for field in ("min_time", "max_time"):
            if not _CLOCK.fullmatch(getattr(self, field)):
                raise broken(field, f"{getattr(self, field)!r} is no time such as 10:00 or 2:30pm")
        if self.constraint is not None and not _CONSTRAINT.fullmatch(self.constraint):
            raise broken("constraint", f"{self.constraint!r} is not 'before', 'after', 'at' or 'between ... and' times")


class Calendar(Row, kw_only=True):
    """calendar: every event is there, at a time that suits it; an empty state asks for no change."""

    exp_cal_state: dict[str, Event]


class StringMatch(Row, kw_only=True):
    """string_match: the extracted answer is the expected text."""

    expected_answer: Text
    extraction_mode: Literal["boxed", "final_answer", "last_line", "full_response"] = "final_answer"
    case_sensitive: bool = False


class Lean(Row, kw_only=True):
    """math_formal_lean: a proof that compiles."""

    header: str
    formal_statement: Text
    informal_prefix: str | None = None
    name: str | None = None
    turn_index: int = 0
