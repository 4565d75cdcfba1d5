"""Rows and tables in the user's own folders: as they are now, and as they were fetched."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.contents import Contents
from scripts.data.own_rows import OwnRows, fetched_rows, has_own_rows, own_rows
from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.records import SourceRecord, read_if_there


@dataclass(frozen=True)
class OwnData:
    """Rows and tables in the user's own folders: as they are now, and as they were fetched."""

    now: OwnRows
    then: OwnRows
    are_own: bool
    """Whether any blend has rows in such a folder."""
    record: SourceRecord | None
    """What was fetched, by the source's record; None without one, or where it is damaged, which is told elsewhere."""

    @classmethod
    def of(cls, recipe: Recipe, data: Path, contents: Contents) -> "OwnData":
        """Return the rows of a recipe whose data are in this folder."""
        record = record_if_sound(data / "source/record.json")
        now, then = own_rows(recipe, contents, record), fetched_rows(recipe, record)
        return cls(now, then, has_own_rows(recipe), record)

    def of_blend(self, name: str) -> str | None:
        """Return the hash of a blend's files; where they are gone, of those that it was made of."""
        return self.now.blends.get(name, self.then.blends.get(name))

    def is_other(self, name: str) -> bool:
        """Whether a blend was made of other files than there are; unknown counts as no."""
        now, then = self.now.blends.get(name), self.then.blends.get(name)
        return now is not None and then is not None and now != then

    @property
    def tables(self) -> str | None:
        """The hash of the tables; where they are gone, of those that were fetched."""
        return self.now.tables or self.then.tables

    @property
    def has_other_tables(self) -> bool:
        """Whether other tables were fetched than there are; unknown counts as no."""
        return bool(self.now.tables and self.then.tables) and self.now.tables != self.then.tables

    @property
    def are_other(self) -> bool:
        """Whether anything was made of other files than there are."""
        return self.has_other_tables or any(map(self.is_other, self.now.blends))


def record_if_sound(path: Path) -> SourceRecord | None:
    """Return the source's record; None where it is missing, or damaged, which is told elsewhere."""
    with suppress(UserError):
        return read_if_there(path, SourceRecord)
    return None
