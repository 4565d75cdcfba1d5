"""What a recipe may say of its stages."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from scripts.recipe.pins import pinned_versions
from scripts.recipe.stage import StageSettings, Training, TrainingConfig

if TYPE_CHECKING:
    from scripts.recipe.recipe import Recipe


class PlainTraining(Training):
    backend: Literal["plain"]
    algorithm: Literal["sft"]
    steps: PositiveInt
    rows_per_step: PositiveInt
    max_length: PositiveInt
    lr: PositiveFloat

    def planned_step(self, train_rows: int | None) -> int:
        return self.steps


class PlainConfig(TrainingConfig, PlainTraining):
    pass


class PlainSettings(StageSettings, PlainTraining):
    config_model: ClassVar[type[TrainingConfig]] = PlainConfig

    def release_in(self, recipe: "Recipe") -> dict[str, str]:
        return pinned_versions("trl", ("torch", "transformers"))


STAGES = {"sft": PlainSettings}
