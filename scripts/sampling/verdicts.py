"""What a verdict on a response depends on: the key under which it is kept."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from scripts.errors import warn
from scripts.files import sha256_text
from scripts.recipe.gym_release import GymServer
from scripts.rewards.gym_yaml import agents_of, configured
from scripts.rewards.judging_code import code_of, files_hash
from scripts.rewards.registry import spec_of
from scripts.rewards.verdict import Unjudged
from scripts.rows.jsonl import environment_named
from scripts.rows.messages import Row
from scripts.sampling.kept import Kept, is_finite

if TYPE_CHECKING:
    from scripts.recipe.evaluation import Evaluation
    from scripts.recipe.generated import GeneratedSource

    Judging = GeneratedSource | Evaluation

KEY_LENGTH = 32
OF_SERVERS = ("*.py", "*.yaml", "*.json", "requirements.txt")
"""Files of a server of Gym that decide its verdicts."""
SECONDS = 20.0
"""How long a server may take to describe itself."""
ASKED_AGAIN = 8
"""Verdicts of a server elsewhere that are asked for again, to see whether it is the one of before."""
SAME = 1e-6
"""The difference up to which two rewards are the same."""


def is_verdict(answer: list[Any]) -> bool:
    """Whether an answer that was kept is a reward or a score: one finite number."""
    return len(answer) == 1 and is_finite(answer[0])


def described_by(base_url: str) -> str | None:
    """Return a hash of the description that a server gives of itself (its OpenAPI schema); None where it has none."""
    try:
        answer = httpx2.get(f"{base_url.rstrip('/')}/openapi.json", timeout=SECONDS)
    except httpx2.HTTPError:
        return None
    return sha256_text(answer.text) if answer.status_code == 200 else None


@dataclass
class Judges:
    """What judges the responses of a blend.

    Attributes:
        own: Files of the user's environments by name.
        judging: Whose `gym` and `gym_servers` judge.
        gym_python: The Python of the environment with NeMo-Gym.
        reading: Settings by which a response is parted into thoughts and an answer.
        ranker: The content of the reward model's export; None without one.
    """

    own: dict[str, Path]
    judging: "Judging"
    gym_python: str
    reading: dict[str, Any] = field(default_factory=dict)
    ranker: str | None = None
    _agents: dict[str, str] | None = None
    _by: dict[str, str] = field(default_factory=dict)

    @property
    def agents(self) -> dict[str, str]:
        """Return the servers of Gym by the environments that they judge."""
        if self._agents is None:
            self._agents = agents_of(self.judging.gym, self.gym_python)
        return self._agents

    def of(self, environment: str) -> str:
        """Return a hash of all that judges the rows of an environment."""
        if environment not in self._by:
            server = self.agents.get(environment)
            code = code_of(environment, self.own, is_by_gym=server is not None)
            facts = {"code": code.with_versions, "reading": self.reading}
            if server is not None:
                facts["gym"] = self._server(server)
            self._by[environment] = _hash(facts)
        return self._by[environment]

    def is_unknown(self, environment: str) -> bool:
        """Whether a server elsewhere judges, of which nothing says that it is still the one of before."""
        server = self.agents.get(environment)
        reach = self.judging.gym_servers.get(server) if server else None
        return reach is not None and reach.base_url is not None and reach.revision is None

    def _server(self, name: str) -> dict[str, Any]:
        """Return what is known of a server of Gym."""
        gym, reach = self.judging.gym, self.judging.gym_servers.get(name, GymServer())
        facts: dict[str, Any] = {"version": gym.version, "name": name, "settings": gym.settings.get(name, {})}
        if reach.base_url is None:
            its = configured(gym, name, self.gym_python)
            return facts | {"files": files_hash(its.folder, OF_SERVERS), "config": its.config}
        return facts | {"at": reach.revision or reach.base_url, "describes": described_by(reach.base_url)}


@dataclass(frozen=True)
class Asked:
    """A prompt with its responses, and the keys of the verdicts on them.

    Attributes:
        line: The prompt's line in its split.
        row: The row, as the environment gets it.
        texts: The responses.
        rewards: The keys of the rewards; None where the row names no environment.
        scores: The keys of the reward model's scores; None without a reward model.
    """

    line: int
    row: Row
    texts: list[str]
    rewards: list[str] | None
    scores: list[str] | None


def asked_of(judges: Judges, line: int, row: Row, texts: list[str], changes: int = 0) -> Asked:
    """Return a prompt's responses with the keys of their verdicts.

    `changes` counts how often the server of the row's environment turned out to be another one.
    """
    row_hash = _hash(row)
    rewards = scores = None
    environment = environment_named(row)
    if environment:
        by = [judges.of(environment), row_hash, *([changes] if changes else [])]
        # An environment that compares gives a reward to a response by the others next to it.
        others = _hash(texts) if spec_of(row).compare else None
        rewards = [_key("reward", by, others, text) for text in texts]
    if judges.ranker is not None:
        by = [judges.ranker, judges.reading, row_hash]
        scores = [_key("score", by, None, text) for text in texts]
    return Asked(line, row, texts, rewards, scores)


def renewed(
    groups: list[Asked], judges: Judges, kept: Kept[str], rewards_of: Callable[[list[Asked]], list[list[float]]]
) -> list[Asked]:
    """Return the groups with other keys where a server elsewhere is no longer the one whose verdicts are kept.

    Some kept verdicts of a server of which nothing is known are asked for again by `rewards_of`; one that differs makes
    all of them count as another server's. That is kept too.
    """
    by_environment = dict[str, list[Asked]]()
    for group in groups:
        name = environment_named(group.row)
        if name is not None and judges.is_unknown(name):
            by_environment.setdefault(name, []).append(group)
    others = dict[int, Asked]()
    for name, its in by_environment.items():
        changes = _changes(judges, name, kept)
        current = [asked_of(judges, group.line, group.row, group.texts, changes) for group in its]
        if _differs(name, current, kept, rewards_of):
            changes += 1
            kept.add({_change(judges, name, changes): [0.0]})
            current = [asked_of(judges, group.line, group.row, group.texts, changes) for group in its]
        others |= {group.line: group for group in current}
    return [others.get(group.line, group) for group in groups]


def _changes(judges: Judges, environment: str, kept: Kept[str]) -> int:
    """Return how often the server of an environment turned out to be another one."""
    number = 0
    while _change(judges, environment, number + 1) in kept.answers:
        number += 1
    return number


def _change(judges: Judges, environment: str, number: int) -> str:
    return f"another server {number} {judges.of(environment)}"


def _differs(
    environment: str,
    groups: list[Asked],
    kept: Kept[str],
    rewards_of: Callable[[list[Asked]], list[list[float]]],
) -> bool:
    """Whether a server gives another reward than the kept one to one of some responses."""
    some = [one for group in groups for one in _kept_responses(group, kept)][:ASKED_AGAIN]
    for one, (reward,) in zip(some, rewards_of(some) if some else (), strict=True):
        (before,) = kept.answers[one.rewards[0]]
        if isinstance(reward, Unjudged) or abs(reward - before) <= SAME:
            continue
        warn(
            f"the server of {environment} gives {float(reward):g} where it gave {before:g} (to row {one.line} of the "
            "prompts), so all its verdicts are asked for again; gym_servers.<server>.revision says when it is another"
        )
        return True
    return False


def _kept_responses(group: Asked, kept: Kept[str]) -> Iterator[Asked]:
    """Yield a group's responses with a kept reward, one by one."""
    for text, key in zip(group.texts, group.rewards or (), strict=True):
        if key in kept.answers:
            yield replace(group, texts=[text], rewards=[key], scores=None)


def _key(kind: str, by: list[Any], others: str | None, text: str) -> str:
    return _hash([kind, by, others, text])[:KEY_LENGTH]


def _hash(value: Any) -> str:
    """Return a hash of any JSON, of NaN and of lone surrogates too, which canonical JSON and UTF-8 refuse."""
    return sha256_text(json.dumps(value, sort_keys=True, separators=(",", ":")))
