"""What a recipe may say of its stages."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from scripts.recipe.stage_settings import StageSettings, Training, TrainingConfig
from scripts.recipe.strict import Name


class LightTraining(Training):
    """Steps of `batch` rows."""

    backend: Literal["light"]
    algorithm: Literal["sft"]
    steps: PositiveInt
    batch: PositiveInt

    @property
    def rows_per_step(self) -> int:
        """Rows of a step."""
        return self.batch

    @property
    def max_length(self) -> int:
        """No row is too long."""
        return 1 << 20

    def planned_step(self, train_rows: int | None) -> int:
        """As many as the recipe says."""
        return self.steps


class LightConfig(TrainingConfig, LightTraining):
    """The resolved config."""


class LightSettings(StageSettings, LightTraining):
    """A stage of a recipe."""

    is_converted: ClassVar[bool] = True  # so that no held-out scores are taken, which need transformers
    ROLES = ("teachers",)
    teachers: dict[Name, Name] = Field({})

    config_model: ClassVar[type[TrainingConfig]] = LightConfig

    def release_in(self, release: str | None) -> dict[str, str]:
        """It is pinned to nothing."""
        return {"light": "1"}


STAGES = {"sft": LightSettings}
