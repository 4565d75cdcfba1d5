"""The setting by which a stage ends early, and publishes its best checkpoint."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from scripts.recipe.effect import Fact
from scripts.recipe.strict import Strict


class StopWhen(Strict):
    """End a stage early by its held-out rows, measured every `val_period` steps, and publish its best checkpoint."""

    metric: Literal["validation_loss", "validation_accuracy", "validation_margin"] = "validation_loss"
    """The loss is better the lower it is, accuracy and margin the higher they are."""
    patience: PositiveInt = 3
    """End after so many measurements in a row without an improvement."""
    min_change: NonNegativeFloat = 0.0
    """An improvement is larger than this."""
    publish: Literal["best", "last"] = "best"
    """The checkpoint that is published."""
    val_period: Fact[PositiveInt | None] = None
    """The section's, which decides where the stage may end."""
    val_batches: Fact[int | None] = None
    """The section's."""
