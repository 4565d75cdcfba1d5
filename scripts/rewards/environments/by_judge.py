"""Environments with a judge model, served by NeMo-Gym: the contracts of rows."""

from string import Formatter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from scripts.rewards.environments.mcqa import Template
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken

_PLACES = {"prompt", "model_response", "standard_response", "criteria"}
_POLICIES = ("engagement", "engagement_with_disclaimer", "refusal_with_explanation", "hard_refusal_no_redirection")
_POLICIES += ("hard_refusal_with_helplines",)
_NO_RUBRIC = "is missing or empty, so every answer would earn 0"


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


class EquivalenceMetadata(Struct):
    """``metadata`` with an optional expected answer."""

    expected_answer: Any = None


class EquivalenceRow(PromptRow, kw_only=True):
    """equivalence_llm_judge and lc_judge: a judge finds the answer equal to the expected answer."""

    expected_answer: str | None = None
    metadata: EquivalenceMetadata | None = None
    options: list[dict[str, str]] | None = None
    template_metadata: Template | None = None
    uuid: str | int | None = None

    def check_fields(self) -> None:
        """Refuse a row without an expected answer or a question."""
        if not self.expected_answer and (self.metadata is None or self.metadata.expected_answer in (None, "")):
            raise broken("expected_answer", "is missing or empty, and metadata has none")
        self.needs_question("which the judge is told as the question")


class MultiChallengePoint(Struct):
    """A question for the judge, answered yes or no."""

    question: Text
    pass_criteria: Literal["YES", "NO"] | None = None
    weight: Annotated[float, Meta(ge=0)] = 1.0


class MultiChallengeMetadata(Struct):
    """``metadata`` with an optional rubric and conversation."""

    rubric: list[MultiChallengePoint] = []
    messages: list[Any] = []


class MultiChallengeRow(PromptRow, kw_only=True):
    """multichallenge: the share of the rubric's questions with the expected answer by a judge."""

    rubric: list[MultiChallengePoint] | None = None
    context: str | None = None
    metadata: MultiChallengeMetadata | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def check_fields(self) -> None:
        """Refuse a row without a rubric or a conversation."""
        metadata = self.metadata or MultiChallengeMetadata()
        if not self.rubric and not metadata.rubric:
            raise broken("rubric", _NO_RUBRIC)
        if not self.context and not metadata.messages:
            raise broken("context", "is missing or empty, and metadata has no messages")


class InverseIfPoint(Struct):
    """A criterion for the judge."""

    id: str
    criteria: Text


class InverseIfMetadata(Struct):
    """``metadata`` with an optional rubric and reference."""

    rubric: list[InverseIfPoint] = []
    reference_response: str | None = None


class InverseIfRow(PromptRow, kw_only=True):
    """inverse_if: the share of criteria met, by a judge."""

    rubric: list[InverseIfPoint] | None = None
    reference_response: str | None = None
    prompt: str | None = None
    judge_prompt_template: str | None = None
    judge_system_prompt: str | None = None
    metadata: InverseIfMetadata | None = None
    uuid: str | int | None = None
    task_id: int | None = None

    def check_fields(self) -> None:
        """Refuse a row without criteria, and a template with places unknown to Gym."""
        if not self.rubric and not (self.metadata and self.metadata.rubric):
            raise broken("rubric", _NO_RUBRIC)
        try:
            places = {name for _, name, _, _ in Formatter().parse(self.judge_prompt_template or "") if name is not None}
        except ValueError as error:
            raise broken(
                "judge_prompt_template", f"cannot be filled in ({error}); double braces that stand for themselves"
            ) from None
        if unknown := sorted(places - _PLACES):
            known = ", ".join(sorted(_PLACES))
            raise broken("judge_prompt_template", f"has a place {{{unknown[0]}}}; what is filled in: {known}")


class JailbreakRow(PromptRow, kw_only=True):
    """jailbreak_detection: the answer to an unsafe prompt is safe, and good by the row's policy."""

    adversarial_prompt: str | None = None
    attack_type: str | None = None
    metadata: dict[str, Any] | None = None
    response_policy_mapped: str | None = None

    def check_fields(self) -> None:
        """Refuse a row without a prompt for the judge."""
        if not self.adversarial_prompt:
            self.needs_question("and adversarial_prompt is not there either")


class JailbreakPolicyRow(JailbreakRow, kw_only=True):
    """Jailbreak rows of an environment for a single policy."""

    response_policy_mapped: Literal[*_POLICIES]


class OverRefusalRow(PromptRow, kw_only=True):
    """over_refusal_detection: a harmless prompt of unsafe looks is answered."""

    safe_prompt: str | None = None
    category: str | None = None
    contrast_prompt: str | None = None
    metadata: dict[str, Any] | None = None

    def check_fields(self) -> None:
        """Refuse a row without a prompt for the judge."""
        if not self.safe_prompt:
            self.needs_question("and safe_prompt is not there either")


ENVIRONMENTS = {
    name: EnvironmentSpec(row)
    for row, names in {
        EquivalenceRow: ["equivalence_llm_judge_simple_agent", "lc_judge_simple_agent"],
        GenRmRow: ["genrm_simple_agent_reasoning_off"],
        InverseIfRow: ["inverse_if_simple_agent"],
        JailbreakRow: ["jailbreak_detection_simple_agent"],
        JailbreakPolicyRow: [f"jailbreak_{policy}" for policy in _POLICIES[1:]],
        MultiChallengeRow: ["multichallenge_simple_agent"],
        OverRefusalRow: ["over_refusal_detection_simple_agent", "xstest_eval_agent"],
    }.items()
    for name in names
}
