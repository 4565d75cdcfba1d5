"""The first training rows of a stage as tokens, kept with what else is measured of the split."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scripts.backends.by_name import backend_of
from scripts.backends.tokens import shortened_row, without_torch
from scripts.model.generation_settings import tokens_of
from scripts.records import ShownRow
from scripts.rows.chat_format import ChatFormat, contents_of_tokenizer, facts_of_rendering
from scripts.rows.measures import Measure
from scripts.stage.stage import Stage

BACKENDS = Path(__file__).parents[1] / "backends"


@dataclass
class Shown:
    """The first rows, long ones shortened; or the reason why they cannot be shown."""

    rows: list[ShownRow] = field(default_factory=list)
    reason: str | None = None


@dataclass(frozen=True)
class ShownOf(Measure[Shown]):
    """The first `count` training rows as the trainer of a stage gets them."""

    name: ClassVar = "shown"
    outcome: ClassVar = Shown
    code: ClassVar = tuple(map(str, sorted(BACKENDS.rglob("*.py"))))

    stage: Stage
    chat_format: ChatFormat | None
    count: int

    @property
    def facts(self) -> dict[str, Any]:
        """The stage's config, and the contents of its start's tokenizer and of what renders the rows."""
        facts: dict[str, Any] = {"config": self.stage.config.values(), "count": self.count}
        if self.chat_format is not None:
            folder = self.chat_format.folder
            facts["tokenizer"] = contents_of_tokenizer(folder)
            facts["rendering"] = facts_of_rendering(self.chat_format.chat_template, folder)
            facts["ends"] = tokens_of(folder)
        return facts

    def is_kept(self, found: Shown) -> bool:
        """Whether the rows can be shown; what is missing may be there the next time."""
        return found.reason is None

    def of_split(self, split: Path) -> Shown:
        """Return the rows; UserError where the trainer would refuse them."""
        told = without_torch(backend_of(self.stage.settings.made_by).shown_rows, self.stage, self.count)
        if isinstance(told, str):
            return Shown(reason=told)
        return Shown([shortened_row(row) for row in told])
