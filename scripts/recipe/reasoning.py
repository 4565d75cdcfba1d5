"""What a blend's demonstrations lose of their reasoning; apart from the recipe, since filling starts quicker so."""

from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from scripts.recipe.strict import Strict, invalid

Share = Annotated[float, Field(ge=0, le=1)]


class Reasoning(Strict):
    """Demonstrations with less reasoning than they came with; the answer after it stays."""

    strip_share: Share = Field(0.1, description="Share of the rows with reasoning that lose it.")
    truncate_share: Share = Field(0.03, description="Share of them that keep the beginning of it.")
    budgets: list[PositiveInt] = Field(
        [64, 256, 1024], min_length=1, description="Words to keep; each truncated row gets one that it exceeds."
    )

    @model_validator(mode="after")
    def _shares_add_up(self) -> "Reasoning":
        if self.strip_share + self.truncate_share > 1:
            raise invalid("strip_share and truncate_share are more than 1 together")
        return self
