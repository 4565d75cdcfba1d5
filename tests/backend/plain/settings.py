"""What a recipe may say of its stages."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.yaml_file import pinned_versions


class PlainSettings(StageSettings):
    backend: Literal["plain"]
    algorithm: Literal["sft"]
    steps: PositiveInt
    batch: PositiveInt
    tokens: PositiveInt
    lr: PositiveFloat

    @property
    def rows_per_step(self) -> int:
        return self.batch

    @property
    def max_length(self) -> int:
        return self.tokens

    def planned_step(self, train_rows: int | None) -> int:
        return self.steps

    def release_in(self, release: str | None) -> dict[str, str]:
        return pinned_versions("trl", ("torch", "transformers"))


STAGES = {"sft": PlainSettings}
