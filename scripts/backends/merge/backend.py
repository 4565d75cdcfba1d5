"""A merge as a backend: checks before it, and its export; scripts.train.merge_stage merges."""

from pathlib import Path

from scripts.backends.merge.merging import misfit
from scripts.backends.protocol import Backend
from scripts.recipe.site import Site
from scripts.records import ShownRow
from scripts.stage.stage import Stage


class Merge(Backend):
    """Checks and exports merges; nothing trains them."""

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return why there are no rows."""
        return "a merge has none"

    def preflight(self, stage: Stage, site: Site | None, python: str) -> list[str]:
        """Return the first difference of parts that do not fit together."""
        parts = [stage.role_exports[role] for role in stage.config.parts]
        base = [stage.parent_export] if stage.settings.merging.has_base else []
        says = misfit(*parts, *base)
        return [says] if says else []

    def export(self, stage: Stage, site: Site | None, log: Path | None) -> None:
        """Export the merged weights, with the settings of a pretrained base."""
        self.export_as_it_is(stage)


BACKEND = Merge()
