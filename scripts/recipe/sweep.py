"""What a recipe says of sweeps, choices among variants and checkpoints, and halving, and what becomes of them.

scripts.recipe.expand writes a sweep out as plain stages; what it needs besides these is in the recipe's ``sweeps``,
``checkpoints`` and ``choices``.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from scripts.recipe.strict import Name, Strict, invalid

HELD_OUT_MEAN, WORST_CHANGE = "held_out_mean", "worst_environment_change"
KEYS = frozenset({"sweep", "halving", "best"})


class Interval(Strict):
    """Where values are drawn from, evenly; with `log`, their logarithms are."""

    low: float
    high: float
    log: bool = False


class Halving(Strict):
    """Successive halving (Jamieson and Talwalkar, arXiv:1502.07943): at each of `steps`, only the best go on."""

    steps: list[PositiveInt] = Field(min_length=1, description="Multiples of the stage's save_period, ascending.")
    keep: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="The share that goes on, at least one.")
    by: str = Field(HELD_OUT_MEAN, description="What best means, as in a parent's `best`.")


Steps = PositiveInt | Literal["last", "best"] | Annotated[list[PositiveInt], Field(min_length=1)]


def _steps_or_word(value: Any) -> Any:
    steps = value if isinstance(value, list) and value else [value]
    if value not in ("last", "best") and not all(type(step) is int and step > 0 for step in steps):
        raise invalid("is a step, a list of steps, last or best")
    return value


class ParentChoice(Strict):
    """Variants or checkpoints of a stage to start from."""

    stage: Name
    each: bool = Field(False, description="Start from each: the stage gets as many variants.")
    best: str | None = Field(
        None, description="Start from the best by held_out_mean, worst_environment_change or a task's score."
    )
    checkpoint: Annotated[Steps, BeforeValidator(_steps_or_word)] = Field(
        "last", description="Of that step, or the best of these; best: of all that are saved."
    )


_VALUES = {"type": "array", "minItems": 1}
SWEEP_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "description": "A grid: the values of each key, by its dotted name. With draw (how many): random points.",
            "properties": {"draw": {"type": "integer"}, "draw_seed": {"type": "integer"}},
            "additionalProperties": {"anyOf": [_VALUES, Interval.model_json_schema()]},
        },
        {**_VALUES, "description": "Points: a value for each key.", "items": {"type": "object"}},
    ]
}
PARENT_SCHEMA = {"anyOf": [{"type": "string"}, ParentChoice.model_json_schema(), {"type": "null"}]}


class Sweep(Strict):
    """The variants of a stage with what differs; `rungs` are the choices of its halving, in order."""

    variants: dict[Name, dict[str, Any]]
    rungs: list[Name] = Field([])


class CheckpointOf(Strict):
    """A stage as of a step. `after`: the stage, or of halving the choice, that comes before; none: nothing does."""

    stage: Name
    step: int
    after: Name | None


class Choice(Strict):
    """The best of stages or checkpoints; `after`: only of the variants that this choice of halving keeps.

    `keep`: how many of them go on, of a rung; None: the best, which then stands for them all.
    """

    stage: Name
    by: str
    among: list[Name]
    keep: int | None = None
    after: Name | None = None
