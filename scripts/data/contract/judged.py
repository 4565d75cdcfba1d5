"""Environments in which a model judges the answer."""

from string import Formatter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scripts.data.contract.base import Row, Text, broken, parse
from scripts.data.contract.single_turn import Template

INVERSE_IF_PLACES = {"prompt", "model_response", "standard_response", "criteria"}
Policy = Literal[
    "engagement",
    "engagement_with_disclaimer",
    "refusal_with_explanation",
    "hard_refusal_no_redirection",
    "hard_refusal_with_helplines",
]


class Answered(Struct):
    """``metadata`` that may hold the expected answer."""

    expected_answer: Any = None


class Equivalence(Row, kw_only=True):
    """equivalence_llm_judge and lc_judge: the judge finds the answer equal to the expected one."""

    expected_answer: str | None = None
    metadata: Answered | None = None
    options: list[dict[str, str]] | None = None
    template_metadata: Template | None = None
    uuid: str | int | None = None

    def __post_init__(self) -> None:
        """There is an answer to compare with, and a question to tell the judge."""
        super().__post_init__()
        if not self.expected_answer and (self.metadata is None or self.metadata.expected_answer in (None, "")):
            raise broken("expected_answer", "is missing or empty, and metadata has none")
        self.needs_question("which the judge is told as the question")


class GenRm(Row, kw_only=True):
    """genrm_compare: a reward model compares the group's responses."""

    principle: str | None = None
    prompt_id: str | None = None
    task_index: int | None = None
    rollout_index: int | None = None

    def __post_init__(self) -> None:
        """The reward model is told the conversation, of which it sees messages with plain texts alone."""
        super().__post_init__()
        messages = self.responses_create_params.input
        if isinstance(messages, str):
            raise broken("responses_create_params.input", "must be a list of messages: the judge reads those")
        for place, item in enumerate(messages):
            if item.type == "message" and item.role != "assistant" and not isinstance(item.content, str):
                where = f"responses_create_params.input[{place}].content"
                raise broken(where, "must be a text: the judge does not see parts")


class Jailbreak(Row, kw_only=True):
    """jailbreak_detection: the answer to an unsafe prompt is safe, and good where the row asks for that."""

    adversarial_prompt: str | None = None
    attack_type: str | None = None
    metadata: dict[str, Any] | None = None
    response_policy_mapped: str | None = None

    def __post_init__(self) -> None:
        """The judge is told the prompt, or the user's last text for it."""
        super().__post_init__()
        if not self.adversarial_prompt:
            self.needs_question("and adversarial_prompt is not there either")


class JailbreakPolicy(Jailbreak, kw_only=True):
    """The four environments of one policy each, whose verifiers the row's policy chooses."""

    response_policy_mapped: Policy


class OverRefusal(Row, kw_only=True):
    """over_refusal_detection: a safe prompt that looks unsafe is answered."""

    safe_prompt: str | None = None
    category: str | None = None
    contrast_prompt: str | None = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """The judge is told the prompt, or the user's last text for it."""
        super().__post_init__()
        if not self.safe_prompt:
            self.needs_question("and safe_prompt is not there either")


class Question(Struct):
    """A question that the judge answers with yes or no."""

    question: Text
    pass_criteria: Literal["YES", "NO"] | None = None
    weight: Annotated[float, Meta(ge=0)] = 1.0


class Challenge(Struct):
    """``metadata`` that may hold the rubric and the conversation."""

    rubric: list[Question] = []
    messages: list[Any] = []


class MultiChallenge(Row, kw_only=True):
    """multichallenge: the share of the rubric's questions that are answered as they should be."""

    rubric: list[Question] | None = None
    context: str | None = None
    metadata: Challenge | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def __post_init__(self) -> None:
        """Without a rubric every answer earns 0, and without a context the judge sees no conversation."""
        super().__post_init__()
        other = self.metadata or Challenge()
        if not self.rubric and not other.rubric:
            raise broken("rubric", "is missing or empty, so every answer would earn 0")
        if not self.context and not other.messages:
            raise broken("context", "is missing or empty, and metadata has no messages")


class Criterion(Struct):
    """A criterion that the judge finds met or not."""

    id: str
    criteria: Text


class Rubric(Struct):
    """``metadata`` that may hold the rubric and the reference."""

    rubric: list[Criterion] = []
    reference_response: str | None = None


class InverseIf(Row, kw_only=True):
    """inverse_if: the share of criteria that are met."""

    rubric: list[Criterion] | None = None
    reference_response: str | None = None
    prompt: str | None = None
    judge_prompt_template: str | None = None
    judge_system_prompt: str | None = None
    metadata: Rubric | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def __post_init__(self) -> None:
        """There are criteria, and the judge's prompt has no place that nobody fills in."""
        super().__post_init__()
        if not self.rubric and not (self.metadata and self.metadata.rubric):
            raise broken("rubric", "is missing or empty, so every answer would earn 0")
        try:
            places = {name for _, name, _, _ in Formatter().parse(self.judge_prompt_template or "") if name is not None}
        except ValueError as error:
            raise broken(
                "judge_prompt_template", f"cannot be filled in ({error}); double braces that stand for themselves"
            ) from None
        if unknown := sorted(places - INVERSE_IF_PLACES):
            known = ", ".join(sorted(INVERSE_IF_PLACES))
            raise broken("judge_prompt_template", f"has a place {{{unknown[0]}}}; what is filled in: {known}")


class Command1(Struct, forbid_unknown_fields=True):
    """A command to the first harness."""

    keystrokes: str
    is_blocking: bool
    timeout_sec: float


class Commands1(Struct, forbid_unknown_fields=True):
    """What the first harness is told."""

    state_analysis: str
    explanation: str
    commands: list[Command1]
    is_task_complete: bool


class Command2(Struct, forbid_unknown_fields=True):
    """A command to the second harness."""

    keystrokes: str
    duration: float = 1.0


class Commands2(Struct, forbid_unknown_fields=True):
    """What the second harness is told."""

    analysis: str
    plan: str
    commands: list[Command2]
    task_complete: bool = False


class Terminal(Struct):
    """``metadata`` of a step in a terminal."""

    harness: Literal["terminus_1", "terminus_2"]
    expected_answer: str | None = None


class Terminus(Row, kw_only=True):
    """terminus_judge: the next commands to a terminal are like the expected ones."""

    metadata: Terminal
    expected_answer: str | None = None
    uuid: str | int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        """The expected answer is what its harness reads."""
        super().__post_init__()
        where, text = "expected_answer", self.expected_answer
        if not text:
            where, text = "metadata.expected_answer", self.metadata.expected_answer
        if not text:
            raise broken("expected_answer", "is missing or empty")
        parse(text, where, Commands1 if self.metadata.harness == "terminus_1" else Commands2)
