"""Responses that no verifier could judge, and the reward in their place."""

from typing import Any

from scripts.errors import UserError, shortened
from scripts.rewards.sandbox import Outcome

SHOWN = 300
HARMLESS = "A word or two."


class NotJudged(Exception):
    """A response cannot be judged; the message says why."""


class VerifierError(UserError):
    """A verifier failed: by its row, its code, or an unforeseen response."""


class EnvironmentFault(VerifierError):
    """The code of a user's environment failed, or returned no reward."""


class NoReward(EnvironmentFault):
    """The code of a user's environment returned something else than a reward, such as None."""


class Unjudged(float):
    """The reward of a response that could not be judged: 0, with the reason in `why`.

    `fault` is there where a user's environment judges no harmless response to the row either, or returned no reward.
    """

    why: str
    fault: EnvironmentFault | None

    def __new__(cls, why: str, fault: EnvironmentFault | None = None) -> "Unjudged":
        """Make a zero with a reason of one short line."""
        reward = super().__new__(cls, 0.0)
        printable = why.encode("utf-8", "backslashreplace").decode()
        reward.fault = fault
        reward.why = shortened(" ".join(printable.split()), SHOWN)
        return reward


def described(error: Exception) -> str:
    """Describe an exception by kind and words; a UserError by its words alone."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def value_of(outcome: Outcome) -> Any:
    """Return the value of a confined call; NotJudged where the call did not return."""
    if outcome.ended != "returned":
        raise NotJudged(f"{outcome.ended}: {outcome.error}")
    return outcome.value
