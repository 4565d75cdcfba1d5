"""What a recipe may say of its stages."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from scripts.recipe.effect import WithoutEffect
from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.strict import Name


class LightSettings(StageSettings):
    """A stage of steps of `batch` rows."""

    is_converted: ClassVar[bool] = True  # so that no held-out scores are taken, which need transformers
    ROLES = ("teachers",)

    backend: Literal["light"]
    algorithm: Literal["sft"]
    steps: PositiveInt
    batch: PositiveInt
    teachers: WithoutEffect[dict[Name, Name]] = Field({})

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

    def release_in(self, release: str | None) -> dict[str, str]:
        """It is pinned to nothing."""
        return {"light": "1"}


STAGES = {"sft": LightSettings}
