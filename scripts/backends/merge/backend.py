"""A merge as a backend: checks before it, and its export; scripts.train.merge_stage merges."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.backends.merge.merging import misfit
from scripts.backends.protocol import Backend
from scripts.finding import Check, Finding, Moment
from scripts.recipe.site import Site
from scripts.records import ShownRow
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage


def check_parts(candidate: Candidate) -> Iterator[Finding]:
    """Find the first difference between the parts."""
    stage = candidate.stage
    parts = [stage.role_exports[role] for role in stage.config.parts]
    base = [stage.parent_export] if stage.settings.merging.has_base else []
    difference = misfit(*parts, *base)
    if difference is not None:
        yield candidate.stops(difference)


class Merge(Backend):
    """Checks and exports merges; nothing trains them."""

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return why there are no rows."""
        return "a merge has none"

    def checks(self) -> Sequence[Check[Candidate]]:
        """Return the protocol's checks, and one of the parts."""
        return [*super().checks(), Check(Moment.PREFLIGHT, check_parts)]

    def export(self, stage: Stage, site: Site | None, log: Path | None) -> None:
        """Export the merged weights, with the settings of a pretrained base."""
        self.export_as_it_is(stage)


BACKEND = Merge()
