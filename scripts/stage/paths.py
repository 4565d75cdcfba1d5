"""Where a stage's files lie in its folder of results."""

import os
from dataclasses import dataclass
from pathlib import Path

MODEL = "model"
"""The folder, among those of the stages, of the recipe's pretrained model: its export, from which stages start."""


STORE = "store"
"""The folder, among those of the runs, of what all runs trained (scripts.stage.store)."""


class Below:
    """A path below a stage's folder, and what is there."""

    def __init__(self, path: str, about: str) -> None:
        self._path, self.__doc__ = path, about

    def __get__(self, stage: "StagePaths", _: type) -> Path:
        return stage.directory / self._path


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage; `directory` is ``results/<run>/<stage>``."""

    directory: Path

    config = Below("config.yaml", "The resolved training config.")
    preflight = Below("preflight.json", "What was checked before any node was asked for.")
    logs = Below("logs", "The folder of its logs.")
    attempts_log = Below("logs/attempts.log", "What every attempt at training printed.")
    ckpt = Below("ckpt", "The published checkpoint: record.json and weights, a link into the run directory.")
    record = Below("ckpt/record.json", "The published checkpoint's record.")
    export_record = Below("hf/record.json", "The record of the export in Hugging Face's format.")
    weights = Below("ckpt/weights", "The published checkpoint's files, a link into the store.")
    export = Below("hf/model", "The exported model, a link to a folder named by its content.")
    metrics = Below("metrics.parquet", "One row a training step.")
    evaluation = Below("eval.json", "Held-out scores by environment.")
    test = Below("test.json", "Scores on the test split, beside those of the model that the chain started from.")
    benchmarks = Below("benchmarks.json", "Scores on benchmarks.")
    rollouts = Below("rollouts.parquet", "Each held-out row with its responses before and after the stage.")
    gate = Below("gate.json", "The gate's verdict.")
    criteria = Below("criteria.json", "What each criterion of the gate came to.")
    choice = Below("choice.json", "What was chosen, where the folder is that of a choice.")

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.directory.name

    @property
    def run(self) -> Path:
        """Return the folder in which the stage trained last: where ``run`` leads."""
        run = self.directory / "run"
        while run.is_symlink():
            run = _target(run)
        return run

    @property
    def owner(self) -> Path:
        """Return the lock of that folder."""
        return owner_of(self.run)

    def exported(self, content: str) -> Path:
        """Return the folder of an exported model, beside the one that ``hf/model`` links to."""
        exports = _target(self.export).parent if self.export.is_symlink() else self.directory / "exports"
        return exports / content

    def sibling(self, stage: str) -> "StagePaths":
        """The files of another stage of the same results."""
        return StagePaths(self.directory.with_name(stage))


def owner_of(run: Path) -> Path:
    """Return the lock of a training folder: within a folder of the store, beside a run directory of earlier commits."""
    return run / "owner.json" if run.parent.name == STORE else run.with_name("owner.json")


def _target(link: Path) -> Path:
    """Return where a link leads, as a path like its own where ``..`` allows."""
    target = Path(os.path.normpath(link.parent / link.readlink()))
    return target if target.resolve() == link.resolve() else link.resolve()
