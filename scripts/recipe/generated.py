"""Settings of blends that models make: how responses are sampled, and which of them become rows."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from scripts.recipe.expand import Start
from scripts.recipe.gym_release import Gym, GymServer, ServerName, check_gym
from scripts.recipe.sampling import Sampling, TemplateVariables
from scripts.recipe.source import Operator, Share
from scripts.recipe.strict import Name, Strict, invalid, matching

COLUMNS = ("environment", "reward", "score", "tokens", "cut", "sample", "model", "pass_rate")
"""What `filter` may ask about: a response's columns in judged.parquet, and its prompt's pass rate."""
Part = matching(r"^[1-9]\d{0,3} of [1-9]\d{0,3}$")


class GeneratedSource(Sampling):
    """Responses of models to a blend's training prompts, none of them held out."""

    kind: Literal["generated"]
    by: Start | Annotated[list[Start], Field(min_length=1)]
    """Stages, checkpoints, choices or pretrained models that respond; of several, the responses are mixed."""
    prompts: Name
    """The blend of the prompts; its environments reward the responses."""
    part: Part | None = None
    """A share of the prompts, as "1 of 2", by a hash of the prompt: parts never overlap."""
    samples: PositiveInt = 8
    """Responses of each model to a prompt."""
    seed: int = 0
    """Another seed, other responses."""
    shards: PositiveInt = 1
    """Jobs that share the prompts; their number changes no response."""
    runtime: PositiveInt | None = None
    """Minutes of a shard's job; none: those of the site's light jobs."""
    responses_per_second: PositiveFloat | None = None
    """Expected pace of a shard, for plans; none: as measured, or unknown."""
    chat_template_kwargs: TemplateVariables = Field({})
    """Variables of the chat template, such as enable_thinking."""
    gym: Gym | None = None
    """NeMo-Gym's servers that reward the responses; none: those of evaluation, else the verifiers here."""
    gym_servers: dict[ServerName, GymServer] = Field({})
    """How Gym's servers are reached, by name."""

    @property
    def models(self) -> list[str]:
        """The names of the models that respond."""
        return [self.by] if isinstance(self.by, str) else self.by

    @property
    def share(self) -> tuple[int, int]:
        """The part's number from 0, and the number of parts."""
        number, _, parts = (self.part or "1 of 1").partition(" of ")
        return int(number) - 1, int(parts)

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that change responses."""
        return {"samples": self.samples, "part": self.part, **self.decoding}

    def _refuse_misfits(self) -> None:
        number, parts = self.share
        if number >= parts:
            raise invalid(f"part: '{self.part}' is beyond the last part; say '{parts} of {parts}'")
        if len({*self.models}) < len(self.models):
            raise invalid("by names a model twice")
        check_gym(self.gym, self.gym_servers)


class Best(Strict):
    """Rejection sampling: the best responses to a prompt become demonstrations."""

    keep: PositiveInt = 1
    """Most responses of one model to a prompt."""
    per_prompt: PositiveInt | None = None
    """Most responses to a prompt, of all models together; none: no limit beside keep."""
    min_reward: float | None = 1.0
    """Least reward; of ranked responses, least score. None: any."""
    shortest: bool = True
    """Of equally good responses the shortest is taken; false: the first sampled."""


class Pairs(Strict):
    """A better and a worse response to a prompt become a preference."""

    chosen: Literal["best"] = "best"
    rejected: Literal["worst", "random", "nearest_length"] = "worst"
    """Among the responses that are worse by `margin`: the worst, one by the seed, or the one nearest in length."""
    margin: PositiveFloat = 0.5
    """Least difference of the rewards; of ranked responses, of the scores."""
    max_length_ratio: Annotated[float, Field(ge=1)] | None = None
    """Most tokens of the longer response for one token of the shorter; none: any."""


class PassRate(Strict):
    """Prompts by the share of their responses that pass."""

    min: Share = 0.0
    max: Share = 1.0
    reward: float = 1.0
    """The least reward of a response that passes."""

    def _refuse_misfits(self) -> None:
        if self.min > self.max:
            raise invalid(f"min ({self.min:g}) is above max ({self.max:g})")


class Band(PassRate):
    """A band of pass rates, and its share of the rows."""

    share: Annotated[float, Field(gt=0, le=1)]


class Rank(Strict):
    """Another judge than the rewards."""

    by: Start
    """A stage of algorithm reward, or a pretrained reward model, whose scores order the responses."""


def kind_of(select: Mapping[str, Any]) -> str:
    """Return the kind of the rows that a selection makes, by the selection's values."""
    made = {"best": "demonstrations", "pairs": "preferences"}
    return next((kind for key, kind in made.items() if select.get(key) is not None), "prompts")


class Select(Strict):
    """What becomes of judged responses: `best`, `pairs`, or else prompts with their pass rate."""

    best: Best | None = None
    pairs: Pairs | None = None
    pass_rate: PassRate | None = None
    """Leave out prompts beyond these pass rates, of whatever the rows become."""
    curriculum: Literal["by_pass_rate"] | Annotated[list[Band], Field(min_length=1)] | None = None
    """Of prompts: the easiest first; or bands one after another, each with its share of the rows."""
    rank: Rank | None = None
    filter: list[tuple[Literal[COLUMNS], Operator, Any]] = Field([])
    """Conditions on responses, all to be met, in pyarrow's form: [[tokens, '<', 512]]."""

    @property
    def kind(self) -> str:
        """The kind of the rows."""
        return kind_of(vars(self))

    def _refuse_misfits(self) -> None:
        if self.best and self.pairs:
            raise invalid("says best and pairs; a blend holds one of them")
        if isinstance(self.curriculum, list) and sum(band.share for band in self.curriculum) > 1 + 1e-9:
            raise invalid("the bands' shares are more than 1 together", key="curriculum")
        takes_responses = self.best or self.pairs
        if self.curriculum and takes_responses:
            raise invalid(f"curriculum orders prompts, and {self.kind} are made here; leave it out")
        if self.rank and not takes_responses:
            raise invalid("rank orders the responses of best or pairs; say one of them")
        if not self.model_fields_set:
            raise invalid("says nothing: best, pairs, or pass_rate")
