"""What stands in for the reward of a response that no verifier could judge."""

from typing import Any

from scripts.errors import UserError, shortened
from scripts.rewards.sandbox import Outcome

SHOWN = 300


class NotJudged(Exception):
    """A response that cannot be judged; says why."""


class VerifierError(UserError):
    """A verifier failed: by its row, by its own code, or by a response that it was not made for."""


class Unjudged(float):
    """The reward of a response that could not be judged: 0, and why."""

    why: str

    def __new__(cls, why: str) -> "Unjudged":
        """Zero, with a reason of one short line."""
        reward = super().__new__(cls, 0.0)
        printable = why.encode("utf-8", "backslashreplace").decode()
        reward.why = shortened(" ".join(printable.split()), SHOWN)
        return reward


def described(error: Exception) -> str:
    """An exception by its kind and words; a UserError says all by itself."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def value_of(outcome: Outcome) -> Any:
    """What a confined call returned; NotJudged where it did not return."""
    if outcome.ended != "returned":
        raise NotJudged(f"{outcome.ended}: {outcome.error}")
    return outcome.value
