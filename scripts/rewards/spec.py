"""The description of an environment: its rows' contract, the functions that reward responses, the expected answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.rewards.episode import Episode
from scripts.rows.request import PromptRow

Row = dict[str, Any]


@dataclass(frozen=True)
class EnvironmentSpec:
    """The contract of an environment's rows and the functions that reward responses.

    Attributes:
        row: The contract.
        verify: Scores one response from 0 to 1; None leaves the rows to NeMo-Gym's servers.
        compare: Rewards all rollouts of one prompt together, in place of `verify` in training.
        check: Says why a row cannot be rewarded, although the contract is obeyed.
        waits: Whether `verify` waits for a confined process or a server; several calls then run at once.
        environment_factory: Makes the episode of a rollout of several turns with tools, whose response is an
            `EpisodeResponse`.
        reads_response: Whether the reward depends on the response's text; False counts only the episode's deeds.
        answer: The response that a row expects, as text; None where the row names none.
        tags: The tags of a row, by which held-out scores are broken down.
        metrics: The numbers of a response by name, which are logged and earn nothing.
        file: The user's file that is the environment; None for one of ours.
        has_own_check: Whether that file has a `check` of rows, which may read more than the row.
        seconds: How long a call for one response may take by that file; None where it says nothing.
        other_answers_fail: Whether the expected answers of other rows are wrong.
    """

    row: type[PromptRow] = PromptRow
    verify: Callable[[Row, str], float] | None = None
    compare: Callable[[Row, list[str]], list[float]] | None = None
    check: Callable[[Row], str | None] = lambda row: None
    waits: bool = False
    environment_factory: type[Episode] | None = None
    reads_response: bool = True
    answer: Callable[[Row], str | None] = lambda row: None
    tags: Callable[[Row], list[str]] = lambda row: []
    metrics: Callable[[Row, str], dict[str, float]] = lambda row, response: {}
    file: Path | None = None
    has_own_check: bool = False
    seconds: float | None = None
    other_answers_fail: bool = True
