"""Sources of rows, and the conversion of their columns."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt

from scripts.recipe.environment import EnvironmentName
from scripts.recipe.strict import Place, Strict, Text, invalid, matching

Share = Annotated[float, Field(ge=0, le=1)]
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
COMMIT = re.compile(r"[0-9a-f]{40}")


class SyntheticSource(Strict):
    """Blends written by demo.synthesize, laid out as the published blends are on the hub."""

    kind: Literal["synthetic"]
    seed: int = 0
    """Another seed, another data set."""
    placeholder_share: Share = 0.2
    """Share of the math rows written as _hf_placeholder rows."""

    publishes: ClassVar[bool] = False
    """Whether there are files to take rows from; otherwise rows are written here."""
    is_pinned: ClassVar[bool] = True
    """Whether the rows are the same whenever they are fetched, but for edits of the user's own files."""
    own_folders: ClassVar[tuple[Path, ...]] = ()
    """The folder of this machine that the rows are in, where they are in one."""

    def contradicts(self, origin: Mapping[str, Any]) -> bool:
        """Whether rows with this origin, of the source's record, cannot be of this source."""
        return origin["revision"] != f"synthetic-{self.seed}"


class _Published(Strict):
    """A dataset repository, or a folder with its layout."""

    publishes: ClassVar[bool] = True
    """Whether there are files to take rows from."""

    subset: Text | None = Field(None, exclude_if=lambda value: value is None)
    """A config of the dataset card, or a folder; none: the default."""
    split: Text | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="By the dataset card, or by the names of files and folders; train+test: both in order. None: by "
        "file, or else train.",
    )

    def whole(self) -> Self:
        """Return the source without subset and split."""
        return self.model_copy(update={"subset": None, "split": None})


class HubSource(_Published):
    """Rows of a dataset repository on the Hugging Face hub."""

    kind: Literal["hub"]
    repository: str
    revision: str = "main"
    """A commit; a branch is resolved once, and the commit recorded."""
    own_folders: ClassVar[tuple[Path, ...]] = ()
    """The folder of this machine that the rows are in: none."""

    @property
    def shown(self) -> str:
        """The name in messages and records."""
        return self.repository

    @property
    def is_pinned(self) -> bool:
        """Whether the rows are the same whenever they are fetched: those of a commit are."""
        return COMMIT.fullmatch(self.revision) is not None

    def contradicts(self, origin: Mapping[str, Any]) -> bool:
        """Whether rows with this origin, of the source's record, cannot be of this source."""
        wanted = self.revision if self.is_pinned else origin["revision"]
        return (origin["source"], origin["revision"]) != (self.repository, wanted)


class FolderSource(_Published):
    """Rows in a folder of this machine with the layout of a dataset repository."""

    kind: Literal["folder"]
    path: Place
    is_pinned: ClassVar[bool] = True
    """Whether the rows are the same whenever they are fetched, but for edits of the files."""

    @property
    def shown(self) -> str:
        """The name in messages and records."""
        return str(Path(self.path))

    @property
    def own_folders(self) -> tuple[Path, ...]:
        """The folder that the rows are in."""
        return (Path(self.path),)

    def contradicts(self, origin: Mapping[str, Any]) -> bool:
        """Whether rows with this origin cannot be of this source: a folder may have moved, and its contents count."""
        return False


Source = SyntheticSource | HubSource | FolderSource
"""Where a recipe's rows come from."""


class Files(Strict):
    """Published files."""

    source: Annotated[HubSource | FolderSource, Field(discriminator="kind")] | None = None
    """Instead of the recipe's."""
    file: str | list[str] | None = Field(
        None,
        description="In the source: Parquet, CSV, TSV, JSONL or JSON, may be compressed; with * and ** several, and "
        "train-*-of-00006.parquet means six. None: as subset and split say, or the blend's name with .jsonl.",
    )

    def _refuse_misfits(self) -> None:
        if self.file and self.source and (self.source.subset or self.source.split):
            raise invalid("file says which files, and so do subset and split of source; leave one out")


class Rows(Files):
    """Published files with the conversion of their columns."""

    columns: Literal["gsm8k", "tulu3"] | dict[Text, Text] | None = Field(
        None,
        description="Columns of fields with other names: {prompt: question, expected_answer: answer}; gsm8k and "
        "tulu3: the columns of these data sets. None: the standard shapes (docs/data.md).",
    )
    filter: list[tuple[Text, Operator, Any]] = Field([])
    """Conditions on rows, all to be met, in pyarrow's form: [[difficulty, '>=', 3]]."""
    environment: EnvironmentName | None = None
    """The environment of rows that name none."""
    constants: dict[Text, Any] = Field({})
    """Prompts: fields with an equal value in all rows."""
    system_prompt: Text | None = None
    """The first message of conversations without a system prompt."""
    prompt_template: matching(r"\{prompt\}") | None = Field(
        None, description='What the last message of the user becomes, such as "{prompt}\\n\\nAnswer in \\boxed{}."'
    )
    answer_after: Text | None = None
    """A mark, such as '####', between reasoning and answer; of several the last counts. Numbers lose commas."""
    completion_template: Text | None = Field(
        None, description='What the answer becomes in demonstrations, such as "{reasoning}\\n\\boxed{{answer}}".'
    )
    remove: Text | None = None
    """A regular expression; matches are taken out of completions."""
    json_columns: list[Text] = Field([])
    """Columns whose texts are JSON (tools always may be)."""
    drop_invalid: bool = False
    """Leave out and count rows that do not fit, rather than refuse the blend."""

    def _refuse_misfits(self) -> None:
        try:
            re.compile(self.remove or "")
        except re.error as error:
            raise invalid(f"is no regular expression ({error})", key="remove") from None


class Part(Rows):
    """A source of a mixture; the blend's settings fill in."""

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the rows, drawn by the seed."""
    rows: PositiveInt | None = None
    """Number of rows, drawn by the seed."""

    def _refuse_misfits(self) -> None:
        if self.share is not None and self.rows is not None:
            raise invalid("has share and rows; one of them says how much")


class Reasoning(Strict):
    """Demonstrations that lose part of their reasoning, but not the answer after."""

    strip_share: Share = 0.1
    """Share of the rows with reasoning that lose the reasoning."""
    truncate_share: Share = 0.03
    """Share of these rows that keep the reasoning's beginning."""
    budgets: list[PositiveInt] = Field([64, 256, 1024], min_length=1)
    """Words to keep; each truncated row gets a number below its length."""

    def _refuse_misfits(self) -> None:
        if self.strip_share + self.truncate_share > 1:
            raise invalid("strip_share and truncate_share are more than 1 together")
