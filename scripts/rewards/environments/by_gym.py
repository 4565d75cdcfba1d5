"""Environments without a verifier here: NeMo-Gym's servers reward the rows, the table has the contracts."""

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from scripts.recipe.environment import Environment
from scripts.rewards.environments.math import MathRow
from scripts.rewards.environments.structured_outputs import StructuredOutputsRow
from scripts.rewards.environments.tool_use import CallAction, MessageAction
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken, parse

_WRITTEN = r"\s*\d+(:\d+)?\s*(am|pm)\s*|\s*\d+:\d+\s*"
_CONSTRAINT = re.compile(rf"(before|after|at) ({_WRITTEN})|between ({_WRITTEN}) and ({_WRITTEN})")
_CLOCK = re.compile(_WRITTEN)


class Event(Struct):
    """An event of a calendar."""

    duration: Annotated[int, Meta(ge=1)]
    min_time: str
    max_time: str
    constraint: str | None

    def __post_init__(self) -> None:
        """Refuse times and constraints unknown to Gym's grader."""
        for field in ("min_time", "max_time"):
            if not _CLOCK.fullmatch(getattr(self, field)):
                raise broken(field, f"{getattr(self, field)!r} is no time such as 10:00 or 2:30pm")
        if self.constraint is not None and not _CONSTRAINT.fullmatch(self.constraint):
            raise broken("constraint", f"{self.constraint!r} is not 'before', 'after', 'at' or 'between ... and' times")


class CalendarRow(PromptRow, kw_only=True):
    """calendar: the schedule holds every event at a suitable time."""

    exp_cal_state: dict[str, Event]


class ExpectedCall(Struct, forbid_unknown_fields=True):
    """A call of a workplace's tool."""

    name: Text
    arguments: str

    def __post_init__(self) -> None:
        """Refuse arguments other than a JSON object."""
        parse(self.arguments, "arguments", dict)


class WorkplaceAssistantRow(PromptRow, kw_only=True):
    """workplace_assistant: the calls leave mail, calendar and tables as the expected calls do."""

    id: int
    ground_truth: list[ExpectedCall] | str
    category: str
    environment_name: str

    def check_fields(self) -> None:
        """Refuse a text without calls, and a row without tools."""
        if isinstance(self.ground_truth, str):
            parse(self.ground_truth, "ground_truth", list[ExpectedCall])
        if not self.responses_create_params.tools:
            raise broken("responses_create_params.tools", "is empty, so nothing can be done")


class Puzzle(Struct):
    """``metadata`` of a puzzle: the scorer's name."""

    source_dataset: Text


class ReasoningGymRow(PromptRow, kw_only=True):
    """reasoning_gym: the puzzle's scorer judges (Stojanovski et al., arXiv:2505.24760)."""

    question: str
    answer: str | None
    metadata: Puzzle


class LeanRow(PromptRow, kw_only=True):
    """math_formal_lean: the proof compiles."""

    header: str
    formal_statement: Text
    informal_prefix: str | None = None
    name: str | None = None
    turn_index: int = 0


class NsToolsRow(MathRow, kw_only=True):
    """ns_tools: a stateful Python tool, then the verifier of the row's choice."""

    verifier_type: str | None = None


class StringMatchRow(PromptRow, kw_only=True):
    """string_match: the extracted answer is the expected text."""

    expected_answer: Text
    extraction_mode: Literal["boxed", "final_answer", "last_line", "full_response"] = "final_answer"
    case_sensitive: bool = False


class BatchAction(Struct, tag="function_call_batch"):
    """Calls in any order."""

    calls: Annotated[list[CallAction], Meta(min_length=1)]


class ParallelToolUseRow(PromptRow, kw_only=True):
    """parallel_tool_calls, on Gym's main branch alone: several calls may be expected."""

    expected_action: MessageAction | CallAction | BatchAction


class Terminus1Command(Struct, forbid_unknown_fields=True):
    """A command to the first harness."""

    keystrokes: str
    is_blocking: bool
    timeout_sec: float


class Terminus1Answer(Struct, forbid_unknown_fields=True):
    """An answer to the first harness."""

    state_analysis: str
    explanation: str
    commands: list[Terminus1Command]
    is_task_complete: bool


class Terminus2Command(Struct, forbid_unknown_fields=True):
    """A command to the second harness."""

    keystrokes: str
    duration: float = 1.0


class Terminus2Answer(Struct, forbid_unknown_fields=True):
    """An answer to the second harness."""

    analysis: str
    plan: str
    commands: list[Terminus2Command]
    task_complete: bool = False


class TerminusMetadata(Struct):
    """``metadata`` of a step in a terminal."""

    harness: Literal["terminus_1", "terminus_2"]
    expected_answer: str | None = None


class TerminusRow(PromptRow, kw_only=True):
    """terminus_judge: the next commands to a terminal are like the expected commands."""

    metadata: TerminusMetadata
    expected_answer: str | None = None
    uuid: str | int | None = None
    threshold: float | None = None

    def check_fields(self) -> None:
        """Refuse an expected answer in a form unknown to the harness."""
        where, answer = "expected_answer", self.expected_answer
        if not answer:
            where, answer = "metadata.expected_answer", self.metadata.expected_answer
        if not answer:
            raise broken("expected_answer", "is missing or empty")
        parse(answer, where, Terminus1Answer if self.metadata.harness == "terminus_1" else Terminus2Answer)


class SweTests(Struct):
    """The tests of an instance; a list may be written as JSON."""

    FAIL_TO_PASS: str | list[str] | None = None
    PASS_TO_PASS: str | list[str] | None = None

    def __post_init__(self) -> None:
        """Refuse a text without a list."""
        for field in ("PASS_TO_PASS", "FAIL_TO_PASS"):
            if isinstance(tests := getattr(self, field), str):
                parse(tests, field, list[str])


class SwerlInstance(SweTests, kw_only=True):
    """A task of swerl_gen with its test scripts."""

    instance_id: Text
    repo: str
    setup_script: str
    test_script: str
    regression_script: str
    PASS_TO_PASS: str | list[str]
    FAIL_TO_PASS: str | list[str]
    patch: str


class SwerlMetadata(Struct):
    """``metadata`` of a swerl_gen task: the image, and the files in the prompt."""

    image: Text
    relevant_file_contents: str | None = None
    remove_repo_name: bool | None = None


class SwerlGenRow(PromptRow, kw_only=True):
    """swerl_gen: a patch or a test from one answer, run in the task's image."""

    instance: SwerlInstance
    metadata: SwerlMetadata
    mode: Literal["eval", "repro-gen"] = "eval"
    dataset_name: str | None = None
    dataset_split: str | None = None
    partial_similarity: bool | None = None

    def check_fields(self) -> None:
        """Refuse a patch without the patched files."""
        if self.mode == "eval":
            for field in ("relevant_file_contents", "remove_repo_name"):
                if getattr(self.metadata, field) is None:
                    raise broken(f"metadata.{field}", "is missing, and mode is eval")
            parse(self.metadata.relevant_file_contents, "metadata.relevant_file_contents", dict[str, str])


class SweAgentsRow(PromptRow, kw_only=True):
    """swe_agents: an agent works in the instance's image; the request's metadata describes the task."""

    prompt_may_be_empty: ClassVar[bool] = True

    def check_fields(self) -> None:
        """Refuse metadata without the whole instance."""
        metadata = self.responses_create_params.metadata or {}
        for field in ("instance_id", "dataset_name", "split", "problem_statement", "instance_dict"):
            if not metadata.get(field):
                raise broken(f"responses_create_params.metadata.{field}", "is missing or empty")
        parse(metadata["instance_dict"], "responses_create_params.metadata.instance_dict", SweTests)


def _reasoning_gym_answer(row: dict[str, Any]) -> str | None:
    return f"<answer>{row['answer']}</answer>" if isinstance(row.get("answer"), str) else None


ENVIRONMENTS = {
    name: EnvironmentSpec(row)
    for row, names in {
        CalendarRow: ["calendar_simple_agent"],
        LeanRow: ["math_formal_lean_simple_agent", "math_formal_lean_refinement_agent"],
        NsToolsRow: ["ns_tools_simple_agent"],
        ParallelToolUseRow: [f"parallel_tool_calls_{Environment.TOOL_USE}"],
        StringMatchRow: ["string_match_simple_agent"],
        StructuredOutputsRow: ["structured_outputs_v3_simple_agent", "structured_outputs_v4_simple_agent"],
        SweAgentsRow: ["swe_agents_train", "swe_agents_val"],
        SwerlGenRow: ["swerl_gen_simple_agent"],
        TerminusRow: ["terminus_judge_simple_agent", "terminus_judge_string_only_simple_agent"],
        WorkplaceAssistantRow: ["workplace_assistant_simple_agent"],
    }.items()
    for name in names
} | {"reasoning_gym_simple_agent": EnvironmentSpec(ReasoningGymRow, answer=_reasoning_gym_answer)}
