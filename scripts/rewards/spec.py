"""What is known of an environment: what its rows hold, how responses to them are rewarded, what answers they tell."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scripts.rewards.episode import Episode
from scripts.rows.request import PromptRow

if TYPE_CHECKING:  # the sandbox imports environments, and asks no judge
    from scripts.recipe.judges import Role
    from scripts.rewards.judge import JudgeClients

Row = dict[str, Any]


@dataclass(frozen=True)
class JudgeVerifier:
    """How an environment's responses are rewarded where the judge of its role is named.

    `verify` and `compare` are as `EnvironmentSpec`'s. `check_held_out` says why a single response to a row could not
    be scored.
    """

    role: "Role"
    verify: Callable[[Row, str, "JudgeClients"], Awaitable[float]]
    compare: Callable[[Row, list[str], "JudgeClients"], Awaitable[list[float]]] | None = None
    check_held_out: Callable[[Row], str | None] = lambda row: None


@dataclass(frozen=True)
class Answers:
    """What a row tells of its answers, to try its reward on.

    `allowed` are other forms of the right one, by their names, `tricks` responses that are made to be paid wrongly.
    `other_rows_are_wrong`: so are the right answers to other rows. `any_text_is_right`: a copy of the prompt may be,
    and `nothing_is_right`: even an empty answer.
    """

    good: str | None = None
    wrong: dict[str, str] = field(default_factory=dict)
    allowed: dict[str, str] = field(default_factory=dict)
    tricks: dict[str, str] = field(default_factory=dict)
    other_rows_are_wrong: bool = True
    any_text_is_right: bool = False
    nothing_is_right: bool = False


@dataclass(frozen=True)
class CheapAnswer:
    """An answer that says nothing of its prompt, and which some rows of an environment pay, as NeMo-Gym does.

    `text` is what a row is answered with, None where it cannot be paid; `paid`, what it earns and where; `remedy`, what
    a row needs so that it is not.
    """

    what: str
    text: Callable[[Row], str | None]
    paid: str
    remedy: str


def spaced(text: str) -> dict[str, str]:
    """An allowed form of the right answer."""
    return {"white space around the right answer": f"\n  {text} \n"}


@dataclass(frozen=True)
class EnvironmentSpec:
    """The contract of an environment's rows, what rewards responses to them, and what answers they tell.

    `verify` scores one response, 0 to 1; without it only a judge or NeMo-Gym rewards the rows. `compare`, where an
    environment has it, rewards all rollouts of one prompt together and stands in for `verify` in training. `check` says
    why they could not score responses to a row that obeys the contract. `confined` says that `verify` waits for a
    process of its own, so that several at once use all cores, `remote` that it asks a server. `cheap` lists
    the answers that it pays too easily. `environment_factory` makes the episode of a rollout of several turns with
    tools, whose response is then an `EpisodeResponse`; without `reads_response` only what was done there earns the
    reward.
    """

    row: type[PromptRow] = PromptRow
    verify: Callable[[Row, str], float] | None = None
    compare: Callable[[Row, list[str]], list[float]] | None = None
    check: Callable[[Row], str | None] = lambda row: None
    confined: bool = False
    remote: bool = False
    environment_factory: type[Episode] | None = None
    reads_response: bool = True
    judged: JudgeVerifier | None = None
    answers: Callable[[Row], Answers] = lambda row: Answers()
    cheap: tuple[CheapAnswer, ...] = ()
