"""Settings of the reward probe."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from scripts.recipe.strict import Strict

_ROLLOUTS = "look at zero_variance_share and truncation_rate of the first steps, which gates can bound (docs/gates.md)"


class Probe(Strict):
    """How a stage's reward is tried on answers made from its rows before training. Changes no weight."""

    gone: ClassVar = {
        "seconds_per_check": "leave the key out: a verifier may take 30 seconds for a response",
        "ask_judges": "name the judge's server of NeMo-Gym in gym",
        **dict.fromkeys(["rollouts", "prompts", "generations", "zero_variance_share", "truncation_rate"], _ROLLOUTS),
    }

    rows: PositiveInt = 8
    """Rows of each environment to make answers from."""
    tolerated_share: float = Field(0.25, ge=0, lt=1)
    """Share of rows in which an empty answer, the prompt or another row's answer may pay as well."""
    action: Literal["stop", "warn"] = "stop"
    """What a reward that cannot be trained on leads to."""
