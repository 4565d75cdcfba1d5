"""How a stage's reward is tried before the stage trains."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from scripts.recipe.strict import Strict


class Probe(Strict):
    """A stage's reward is tried on responses made from its rows and, if wanted, on rollouts. May change no weight."""

    rows: PositiveInt = Field(8, description="Rows of each environment that responses are made from.")
    seconds_per_check: PositiveFloat = Field(
        1.0, description="What a verifier may take for a response (the median counts); judges have their own time-outs."
    )
    tolerated_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.25,
        description="Share of rows that may pay an empty answer or a copy of the prompt more than a wrong one.",
    )
    ask_judges: bool = Field(True, description="Ask the judges too; if not, what only they reward is not tried.")
    rollouts: bool = Field(
        False, description="Training waits for the rollouts; if not, <stage>/probe.json is made when asked for by name."
    )
    prompts: PositiveInt = Field(8, description="Rows that rollouts are sampled for.")
    generations: Annotated[int, Field(ge=2)] = Field(8, description="Rollouts of a row.")
    zero_variance_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.8, description="Share of the groups whose rollouts all earn the same, above which a warning is given."
    )
    truncation_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="Share of the rollouts cut at max_new_tokens, above which a warning is given."
    )
    action: Literal["stop", "warn"] = Field("stop", description="What a reward that cannot be trained on leads to.")
