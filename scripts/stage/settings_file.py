"""A settings file of a rule: values, the files made from them, and whether these are of other values."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.records import read_if_there, read_text

FOLDER = "settings"
Settings = dict[str, Any]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of a rule, the files made from them, and whether the records among those files contradict them.

    `made_from` is where the rule copies the settings file once the data are made from it. `differs_from` compares the
    settings with the values of that copy; None: the texts are compared. `added` are settings that results of earlier
    versions lack, which do without them unless their records contradict the settings.
    """

    values: Settings
    outputs: list[Path]
    is_contradicted: Callable[[], bool] = lambda: False
    made_from: Path | None = None
    differs_from: Callable[[Settings], bool] | None = None
    added: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The settings file's text."""
        return json.dumps(self.values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def differ(self) -> bool:
        """Whether the data on disk were made from other settings, as the copy says or else their records."""
        if not self.made_from.exists():
            return self.is_contradicted()
        if self.differs_from is not None:
            return self.differs_from(settings_written(self.made_from))
        return read_text(self.made_from) != self.text

    def grows(self, before: Settings) -> bool:
        """Whether the settings are those of before and some that earlier versions lacked, with nothing against them."""
        lacking = self.added & self.values.keys() - before.keys()
        kept = {name: value for name, value in self.values.items() if name not in lacking}
        return bool(lacking) and before == json.loads(json.dumps(kept)) and not self.is_contradicted()


def settings_written(path: Path) -> Settings:
    """Return the values of a settings file; none where it is missing, damaged or no file."""
    with suppress(UserError):
        return read_if_there(path, Settings) or {}
    return {}
