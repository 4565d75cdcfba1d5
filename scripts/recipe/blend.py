"""Blends of training data and where they come from."""

import re
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
    file: str | list[str] | None = Field(
        None,
        description="Its file in the source; none: the blend's name with .jsonl. With columns also several, of which "
        "train-*-of-00006.parquet means six.",
    )
    columns: Literal["gsm8k", "tulu3"] | None = Field(
        None, description="Whose columns its Parquet files have, which become rows (docs/data.md); none: it is JSONL."
    )
    shuffle: bool = Field(
        False, description="With columns: mix the rows of each file, or of the parts that one name means, always alike."
    )
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

    @property
    def names_environments(self) -> bool:
        """Whether each of its rows names an environment; those of preferences do not, of demonstrations as it says."""
        return self.kind == "prompts" or (self.kind == "demonstrations" and bool(self.environments))

    def published_files(self, name: str) -> dict[str, str]:
        """The files of the blend `name` in its source, by the path they get below ``data/source/``."""
        if self.columns is not None:
            return {f"{name}/{part}": part for parts in self.sets_of_files() for part in parts}
        if self.format == "jsonl":
            return {f"{name}.jsonl": self.file or f"{name}.jsonl"}
        return {f"{name}/{file}": file for file in IMAGE_FILES[self.format]}

    def sets_of_files(self) -> list[list[str]]:
        """The files of columns in their order, those together that one name with ``*-of-00006`` means."""
        return [_parts(file) for file in ([self.file] if isinstance(self.file, str) else self.file or [])]

    @model_validator(mode="after")
    def _reasoning_is_demonstrated(self) -> "Blend":
        if self.reasoning is not None and self.kind != "demonstrations":
            raise invalid("reasoning is for demonstrations; leave it out")
        return self

    @model_validator(mode="after")
    def _columns_have_files(self) -> "Blend":
        if self.columns is None and (isinstance(self.file, list) or self.shuffle):
            raise invalid("several files, and shuffle, are for columns; a blend of JSONL has one file, in its order")
        if self.columns is not None and (not self.file or self.format != "jsonl"):
            raise invalid("columns are those of Parquet files; name them as file, and leave format out")
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


def _parts(file: str) -> list[str]:
    """The names that one with ``*-of-00006`` in it means; any other means itself."""
    count = re.search(r"\*-of-(\d+)", file)
    return [file.replace("*", f"{part:05}") for part in range(int(count[1]))] if count else [file]
