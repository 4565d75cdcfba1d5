"""Blends of training data."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, model_validator

from scripts.recipe.environment import EnvironmentName
from scripts.recipe.generated import GeneratedSource, Select, kind_of
from scripts.recipe.row_fields import FIELDS
from scripts.recipe.source import Files, FolderSource, HubSource, Part, Reasoning, Rows, Share
from scripts.recipe.strict import Amount, Name, Strict, Text, invalid, matching, nearest

RowKey = matching(r"^[0-9a-f]{12}$")
MMPR_HOLDOUT = 2000
RANDOM = "random"
CARRIED = "_holdout_by"
"""The key of a composed row, until it is split, for the value of the column by which it is."""
IMAGE_FILES = {
    "mmpr": ("meta.json", "annotations.zip", "images.zip"),
    "mmpr_tiny": ("mmpr_tiny.parquet", "images.zip"),
}
COMPOSES = frozenset({*Rows.model_fields} - {"source", "file"} | {"sources", "shuffle", "deduplicate", "decontaminate"})
"""The settings any of which makes a blend be composed, rather than linked as it is published."""
GENERATED_HOLDOUT = 0.05
"""Share of a generated blend that validates, unless the blend says another: its rows are few, and their number open."""
OF_OTHERS = COMPOSES | {"file", "test", "rows", "pictures", "hallucinated_tools"}
"""Settings that no generated blend has."""


class Benchmark(Files):
    """A benchmark that no prompt of a blend may overlap (defined in scripts.data.clean)."""

    name: Name = Field(description="Its name in the counts.")
    columns: list[Text] = Field(min_length=1, description="Columns of text; of several, the mean overlap counts.")
    ngram: int = Field(8, ge=2, le=32, description="Words of an n-gram.")
    overlap: float = Field(0.5, ge=0, lt=1)
    """Leave out a row when more than this share of an instance's words stand in shared n-grams."""


class HoldoutColumn(Strict):
    """A column that tells which rows are held out.

    With `value`: the rows that have it there, as a data set's own column split has. Without: `holdout` rows at random,
    where rows with one value stay together, as all rows of a conversation or all answers to a prompt.
    """

    column: Text
    value: str | int | float | bool | None = None
    """Of the rows that validate; none: keep rows with one value together."""
    test: str | int | float | bool | None = None
    """Of the rows of the test split."""

    @property
    def left_out(self) -> str | None:
        """The column where no row keeps it: one that names splits, or that only the split needs."""
        return self.column if self.value is not None or self.column == CARRIED else None

    def _refuse_misfits(self) -> None:
        if self.test is not None and self.value is None:
            raise invalid("test is a value of the column beside value, which is missing")


HoldoutBy = Literal["random"] | HoldoutColumn
HOLDOUT_BY: TypeAdapter[HoldoutBy] = TypeAdapter(HoldoutBy)


class Blend(Rows):
    """A set of training data."""

    source: Annotated[HubSource | FolderSource | GeneratedSource, Field(discriminator="kind")] | None = None
    """Instead of the recipe's; or responses of models (kind: generated, docs/generated.md)."""
    select: Select | None = None
    """Of a generated blend: which responses become rows."""
    kind: Literal["prompts", "demonstrations", "preferences", "unpaired"] = Field(
        "prompts",
        description="prompts: rows that an environment rewards; demonstrations: rows with the answer to imitate; "
        "preferences: rows with a better and a worse answer; unpaired: rows with an answer and a label, wanted or not.",
    )
    environments: list[EnvironmentName] = Field([])
    """Environments whose rows the blend may hold; none: any (NeMo-Gym's own names are free)."""
    format: Literal["jsonl", "mmpr", "mmpr_tiny"] = Field(
        "jsonl",
        description="How it is published: rows in a JSONL file, or images with their annotations as OpenGVLab/MMPR or "
        "OpenGVLab/MMPR-Tiny.",
    )
    sources: list[Part] = Field([])
    """Several sources instead of source and file, their rows mixed, with a share or rows of each."""
    shuffle: bool = False
    """Mix the rows of each file or pattern; sources are always mixed."""
    seed: int = 0
    """Another seed, another order of mixed rows, and other rows of a share."""
    reasoning: Reasoning | None = None
    """Demonstrations: how much reasoning some lose; none: none."""
    rows: PositiveInt | None = None
    """Rows to synthesize, held-out rows included."""
    pictures: Share = 0.0
    """Share of the synthesized math and multiple-choice rows that ask about a picture."""
    hallucinated_tools: bool = False
    """Synthesized: a spoilt answer to a task with tools calls a tool that is not declared."""
    holdout: Amount = 100
    """N rows, or this share of all rows, become the validation split: the last, unless `holdout_by` says otherwise."""
    holdout_by: HoldoutBy | None = Field(
        None,
        description="Which rows are held out, if not the last: random, drawn by seed; {column: split, value: "
        "validation}; or {column: conversation}, rows with one value together.",
    )
    test: NonNegativeInt = 0
    """N more rows, by default those before the validation split, become a test split, for no training."""
    allow: list[RowKey] = Field([])
    """Bad rows to let pass, by the key that scripts.data.check prints."""
    missing_images: Share = 0.0
    """Of format mmpr: the share of rows that may lack their image."""
    deduplicate: Literal["prompt", "row"] | None = None
    """Leave out rows with an earlier row's prompt, or equal to an earlier row; white space does not count."""
    decontaminate: list[Benchmark] = Field([])
    """Leave out rows with prompts that overlap with benchmarks."""

    @property
    def has_test(self) -> bool:
        """Whether there is a test split."""
        return bool(self.test) or (isinstance(self.holdout_by, HoldoutColumn) and self.holdout_by.test is not None)

    @property
    def holdout_column(self) -> str | None:
        """The column that tells which rows are held out."""
        return self.holdout_by.column if isinstance(self.holdout_by, HoldoutColumn) else None

    @property
    def holdout_options(self) -> list[str]:
        """The filler's options of `holdout_by`; a composed row carries the column's value under another key."""
        by = self.holdout_by
        if by is None:
            return []
        if self.is_composed and isinstance(by, HoldoutColumn):
            by = by.model_copy(update={"column": CARRIED})
        return ["--holdout-by", HOLDOUT_BY.dump_json(by).decode(), "--holdout-seed", str(self.seed)]

    @property
    def generated(self) -> GeneratedSource | None:
        """The models and prompts that the rows are made of; None for a blend that is published or synthesized."""
        return self.source if isinstance(self.source, GeneratedSource) else None

    @property
    def makers(self) -> list[str]:
        """The names of the models that make and rank the rows; none of a blend that is not generated."""
        if self.generated is None:
            return []
        return [*dict.fromkeys([*self.generated.models, *([self.select.rank.by] if self.select.rank else [])])]

    @property
    def names_environments(self) -> bool:
        """Whether each row names an environment: of prompts, and of demonstrations with `environments`."""
        return self.kind == "prompts" or (self.kind == "demonstrations" and bool(self.environments))

    @property
    def is_composed(self) -> bool:
        """Whether rows are made from columns of published files; otherwise the blend's file is linked."""
        if self.generated:
            return False
        is_part = self.source and (self.source.subset or self.source.split)
        is_linked = self.file is None or (isinstance(self.file, str) and re.fullmatch(r"[^*]*\.jsonl", self.file))
        return bool(is_part or not is_linked or any(getattr(self, name) for name in COMPOSES))

    def parts(self) -> list[Part]:
        """Return the parts of a composed blend with all settings."""
        common = {name: getattr(self, name) for name in self.model_fields_set & Rows.model_fields.keys()}
        own = [{name: getattr(part, name) for name in part.model_fields_set} for part in self.sources or [Part()]]
        return [Part(**common | part) for part in own]

    def published_files(self, name: str) -> dict[str, str]:
        """Return the blend's linked files in the source by path below ``data/source/``; `name` is the blend's."""
        if self.format == "jsonl":
            return {} if self.is_composed or self.generated else {f"{name}.jsonl": self.file or f"{name}.jsonl"}
        return {f"{name}/{file}": file for file in IMAGE_FILES[self.format]}

    @model_validator(mode="before")
    @classmethod
    def _says_what_follows(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        source, select, sources = (data.get(key) for key in ("source", "select", "sources"))
        if isinstance(source, dict) and source.get("kind") == "generated" and isinstance(select, dict):
            data = {"kind": kind_of(select), "holdout": GENERATED_HOLDOUT} | data
        parts = [data, *(sources if isinstance(sources, list) else [])]
        named = [part.get("environment") for part in parts if isinstance(part, dict)]
        named = [*dict.fromkeys(name for name in named if isinstance(name, str))]
        return data | {"environments": named} if named and not data.get("environments") else data

    def _refuse_misfits(self) -> None:
        self._is_generated_whole()
        self._holds_out_one_way()
        if self.reasoning is not None and self.kind != "demonstrations":
            raise invalid("reasoning is for demonstrations; leave it out")
        names = [benchmark.name for benchmark in self.decontaminate]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise invalid(f"decontaminate names {repeated[0]} twice")
        if self.is_composed and self.format != "jsonl":
            raise invalid(f"{self.format} is prepared as it is published; leave out what composes rows")
        if self.sources and (self.source or self.file or self.shuffle):
            raise invalid("sources stand in for source and file, and are always mixed; leave these and shuffle out")
        for part in self.parts() if self.is_composed else ():
            if self.kind in ("preferences", "unpaired") and part.environment:
                raise invalid(f"no environment rewards {self.kind}; leave it out")
            self._refuse_unknown_fields(part)
            if self.kind != "prompts" and part.constants:
                raise invalid("constants are fields of prompts; leave them out")
            if part.environment and part.environment not in self.environments:
                raise invalid(f"environments has not {part.environment}, which environment names; add it")
        if self.format == "jsonl":
            return
        kind = "preferences" if self.format == "mmpr" else "prompts"
        if self.kind != kind:
            raise invalid(f"{self.format} holds {kind}: set kind")
        if isinstance(self.holdout, float) or (self.format == "mmpr" and self.holdout != MMPR_HOLDOUT) or self.test:
            rows = MMPR_HOLDOUT if self.format == "mmpr" else "the stage's data.val_size"
            raise invalid(f"{self.format} is split by NeMo-RL itself: holdout must be {rows}, and test left out")

    def _holds_out_one_way(self) -> None:
        """Refuse a number of rows beside a column whose value chooses them, and a choice that NeMo-RL makes itself."""
        if self.holdout_by is None:
            return
        if self.format != "jsonl":
            raise invalid(f"{self.format} is split by NeMo-RL itself; leave holdout_by out")
        by_value = isinstance(self.holdout_by, HoldoutColumn) and self.holdout_by.value is not None
        given = sorted({"holdout", "test"} & self.model_fields_set)
        if by_value and given:
            raise invalid(f"holdout_by names the rows by a column's value; leave {given[0]} out")

    def _refuse_unknown_fields(self, part: Part) -> None:
        """Refuse keys of `columns` that are no fields of the kind; prompts also have an environment's fields."""
        if self.kind == "prompts" or not isinstance(part.columns, dict):
            return
        valid = FIELDS[self.kind]
        unknown = next((field for field in part.columns if field not in valid), None)
        if unknown is not None:
            raise invalid(f"columns: {unknown} is no field of {self.kind}{nearest(unknown, valid)}")

    def _is_generated_whole(self) -> None:
        """Refuse settings of published rows in a generated blend, and selection in others."""
        if (self.generated is None) != (self.select is None):
            raise invalid("source.kind: generated and select go together; say both or neither")
        if self.generated is None:
            return
        own = OF_OTHERS & self.model_fields_set
        if given := sorted(name for name in own if getattr(self, name)):
            says = "is of rows that are published or synthesized; say it of the blend of the prompts"
            raise invalid(f"{given[0]} {says}")
        if self.format != "jsonl" or self.kind != self.select.kind:
            raise invalid(f"select makes {self.select.kind} in jsonl; leave kind and format out")
