"""What makes a merge: a stage without rows, which is done in one step by this process."""

from pathlib import Path

from scripts.backends.merge.merging import misfit
from scripts.backends.protocol import Allocation, Backend, TrainingJob
from scripts.recipe.site import Site
from scripts.records import ShownRow
from scripts.stage.stage import Stage


class Merge(Backend):
    """Merges exports."""

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return why there are no rows."""
        return "a merge has none"

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Merge in this process."""
        from scripts.backends.merge.merge_weights import merge_exports  # noqa: PLC0415 - it loads torch

        merge_exports(job)

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
