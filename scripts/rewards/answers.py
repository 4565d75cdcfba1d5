"""What verifiers get of a response: the answer, without the thoughts before it."""

from collections.abc import Sequence

from scripts.rewards.episode import EpisodeResponse
from scripts.rows.thoughts import Told, split_response


class AfterThoughts(str):
    """An answer without the line ends before it, as verifiers get it.

    Attributes:
        thoughts: The texts of the thoughts that came before.
        exact: The answer with the line ends that a model writes behind its thoughts, as Gym's servers get it.
    """

    thoughts: tuple[str, ...]
    exact: str


class EpisodeAfterThoughts(EpisodeResponse, AfterThoughts):
    """The last answer of a rollout with tools, without the thoughts before it."""


class UnfinishedThoughts(float):
    """The reward of a response whose thoughts do not end: 0."""

    def __new__(cls) -> "UnfinishedThoughts":
        """Make a zero."""
        return super().__new__(cls, 0.0)


def answer_of(response: str, told: Told = None) -> str | None:
    """Return the answer in a response; None where its thoughts do not end.

    A response without thoughts is returned as it is, an `EpisodeResponse` as one.
    """
    is_episode = isinstance(response, EpisodeResponse)
    if is_episode and _only_thought(response):
        return None
    parted = split_response(response, told)
    if parted.is_unfinished:
        return None
    if parted.answer == response:
        return response
    answer = parted.answer.lstrip("\r\n")
    kept = EpisodeAfterThoughts(answer) if is_episode else AfterThoughts(answer)
    kept.thoughts, kept.exact = parted.thoughts, parted.answer
    if is_episode:
        kept.episode, kept.messages = response.episode, response.messages
    return kept


def _only_thought(response: EpisodeResponse) -> bool:
    """Whether the last message of a rollout, whose thoughts the trainer took apart, is of thoughts alone."""
    last = response.messages[-1]
    thought = last.get("reasoning_content") or last.get("thinking")
    return bool(thought) and not last.get("content") and not last.get("tool_calls")


def unfinished_share(rewards: Sequence[float]) -> float:
    """Return the share of rewards of responses whose thoughts do not end; 0 without rewards."""
    return sum(isinstance(reward, UnfinishedThoughts) for reward in rewards) / max(1, len(rewards))
