"""terminus_judge: the next commands to a terminal; NeMo-Gym alone verifies them."""

from typing import Literal

from msgspec import Struct

from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, broken, parse


class Terminus1Command(Struct, forbid_unknown_fields=True):
    """A command to the first harness."""

    keystrokes: str
    is_blocking: bool
    timeout_sec: float


class Terminus1Answer(Struct, forbid_unknown_fields=True):
    """What the first harness is told."""

    state_analysis: str
    explanation: str
    commands: list[Terminus1Command]
    is_task_complete: bool


class Terminus2Command(Struct, forbid_unknown_fields=True):
    """A command to the second harness."""

    keystrokes: str
    duration: float = 1.0


class Terminus2Answer(Struct, forbid_unknown_fields=True):
    """What the second harness is told."""

    analysis: str
    plan: str
    commands: list[Terminus2Command]
    task_complete: bool = False


class TerminusMetadata(Struct):
    """``metadata`` of a step in a terminal."""

    harness: Literal["terminus_1", "terminus_2"]
    expected_answer: str | None = None


class TerminusRow(PromptRow, kw_only=True):
    """terminus_judge: the next commands to a terminal are like the expected ones."""

    metadata: TerminusMetadata
    expected_answer: str | None = None
    uuid: str | int | None = None
    threshold: float | None = None

    def check_fields(self) -> None:
        """The expected answer is what its harness reads."""
        where, answer = "expected_answer", self.expected_answer
        if not answer:
            where, answer = "metadata.expected_answer", self.metadata.expected_answer
        if not answer:
            raise broken("expected_answer", "is missing or empty")
        parse(answer, where, Terminus1Answer if self.metadata.harness == "terminus_1" else Terminus2Answer)


ENVIRONMENTS = dict.fromkeys(
    ("terminus_judge_simple_agent", "terminus_judge_string_only_simple_agent"), EnvironmentSpec(TerminusRow)
)
