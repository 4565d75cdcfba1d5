"""Blends of training data and where they come from."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, StringConstraints, model_validator

from scripts.recipe.environment import EnvironmentName
from scripts.recipe.reasoning import Reasoning, Share
from scripts.recipe.strict import Strict, invalid

Fraction = Annotated[float, Field(gt=0, lt=1)]
RowKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")]
MMPR_HOLDOUT = 2000
IMAGE_FILES = {
    "mmpr": ("meta.json", "annotations.zip", "images.zip"),
    "mmpr_tiny": ("mmpr_tiny.parquet", "images.zip"),
}


class SyntheticSource(Strict):
    """Blends written by scripts.data.synthesize, laid out as the published ones are on the hub."""

    kind: Literal["synthetic"]
    seed: int = Field(0, description="Another seed, another data set.")
    placeholder_share: Share = Field(0.2, description="Share of the math rows written as _hf_placeholder rows.")


class HubSource(Strict):
    """Blends of a dataset repository on the Hugging Face hub."""

    kind: Literal["hub"]
    repository: str
    revision: str = Field("main", description="A commit; a branch is resolved once, and the commit recorded.")


class FolderSource(Strict):
    """Blends in a folder of this machine, laid out as a dataset repository is."""

    kind: Literal["folder"]
    path: str


class Blend(Strict):
    """One set of training data."""

    kind: Literal["prompts", "demonstrations", "preferences"] = Field(
        "prompts",
        description="prompts: rows that an environment rewards; demonstrations: rows with the answer to imitate; "
        "preferences: rows with a better and a worse answer.",
    )
    environments: list[EnvironmentName] = Field(
        [], description="Environments whose rows the blend may hold; none: any (NeMo-Gym's own names are free)."
    )
    format: Literal["jsonl", "mmpr", "mmpr_tiny"] = Field(
        "jsonl",
        description="How it is published: rows in a JSONL file, or images with their annotations as OpenGVLab/MMPR or "
        "OpenGVLab/MMPR-Tiny.",
    )
    source: Annotated[HubSource | FolderSource, Field(discriminator="kind")] | None = Field(
        None, description="Instead of the recipe's."
    )
    file: str | None = Field(None, description="Its file in the source; none: the blend's name with .jsonl.")
    reasoning: Reasoning | None = Field(None, description="Demonstrations: how much reasoning some lose; none: none.")
    rows: PositiveInt | None = Field(None, description="Rows to synthesize, held-out rows included.")
    pictures: Share = Field(
        0.0, description="Share of the synthesized math and multiple-choice rows that ask about a picture."
    )
    hallucinated_tools: bool = Field(
        False, description="Synthesized: a spoilt answer to a task with tools calls a tool that is not declared."
    )
    holdout: PositiveInt | Fraction = Field(
        100, description="The last N rows, or this share of all rows, become the validation split."
    )
    test: int = Field(0, ge=0, description="The N rows before those become a test split, which nothing trains on.")
    allow: list[RowKey] = Field([], description="Bad rows to let pass, by the key that scripts.data.check prints.")
    missing_images: Share = Field(0.0, description="Of format mmpr: the share of rows that may lack their image.")

    def published_files(self, name: str) -> dict[str, str]:
        """The files of the blend `name` in its source, by the path they get below ``data/source/``."""
        if self.format == "jsonl":
            return {f"{name}.jsonl": self.file or f"{name}.jsonl"}
        return {f"{name}/{file}": file for file in IMAGE_FILES[self.format]}

    @model_validator(mode="after")
    def _reasoning_is_demonstrated(self) -> "Blend":
        if self.reasoning is not None and self.kind != "demonstrations":
            raise invalid("reasoning is for demonstrations; leave it out")
        return self

    @model_validator(mode="after")
    def _fits_its_format(self) -> "Blend":
        if self.format == "jsonl":
            return self
        kind = "preferences" if self.format == "mmpr" else "prompts"
        if self.kind != kind:
            raise invalid(f"{self.format} holds {kind}: set kind")
        if isinstance(self.holdout, float) or (self.format == "mmpr" and self.holdout != MMPR_HOLDOUT) or self.test:
            rows = MMPR_HOLDOUT if self.format == "mmpr" else "the stage's data.val_size"
            raise invalid(f"{self.format} is split by NeMo-RL itself: holdout must be {rows}, and test left out")
        return self
