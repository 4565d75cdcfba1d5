"""Name the files in a stage's folder of results."""

import os
from dataclasses import dataclass
from pathlib import Path

MODEL = "model"
"""Folder, beside the stages', of the recipe's pretrained model: the export that first stages start from."""
STORE = "store"
"""Folder, beside the runs', of all trainings (scripts.stage.store)."""


class Below:
    """Describe a path below a stage's folder."""

    def __init__(self, path: str, about: str) -> None:
        self._path, self.__doc__ = path, about

    def __get__(self, stage: "StagePaths", _: type) -> Path:
        return stage.directory / self._path


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage; `directory` is ``results/<run>/<stage>``."""

    directory: Path

    config = Below("config.yaml", "The resolved training config.")
    preflight = Below("preflight.json", "Checks before any node is asked for.")
    logs = Below("logs", "Logs.")
    attempts_log = Below("logs/attempts.log", "Output of every attempt at training.")
    ckpt = Below("ckpt", "The published checkpoint: record.json and weights.")
    record = Below("ckpt/record.json", "The published checkpoint's record.")
    export_record = Below("hf/record.json", "The record of the export in Hugging Face's format.")
    weights = Below("ckpt/weights", "The published checkpoint's files, a link into the store.")
    export = Below("hf/model", "The exported model, a link into the store.")
    metrics = Below("metrics.parquet", "One row a training step.")
    evaluation = Below("eval.json", "Held-out scores by environment.")
    test = Below("test.json", "Scores on the test split, beside the chain's first model.")
    benchmarks = Below("benchmarks.json", "Scores on benchmarks.")
    rollouts = Below("rollouts.parquet", "Held-out rows with responses before and after the stage.")
    gate = Below("gate.json", "The gate's verdict.")
    criteria = Below("criteria.json", "Value and verdict of each criterion.")
    choice = Below("choice.json", "The chosen, in a choice's folder.")

    @property
    def name(self) -> str:
        """Return the stage's name."""
        return self.directory.name

    @property
    def run(self) -> Path:
        """Return the folder of the stage's last training, to which ``run`` leads."""
        run = self.directory / "run"
        while run.is_symlink():
            run = _target(run)
        return run

    def exported(self, content: str) -> Path:
        """Return the folder of an exported model, beside the target of ``hf/model``."""
        exports = _target(self.export).parent if self.export.is_symlink() else self.directory / "exports"
        return exports / content

    def sibling(self, stage: str) -> "StagePaths":
        """Return the files of another stage of the same results."""
        return StagePaths(self.directory.with_name(stage))


def owner_of(run: Path) -> Path:
    """Return the lock of a training folder: within a folder of the store, beside a run directory of earlier commits."""
    return run / "owner.json" if run.parent.name == STORE else run.with_name("owner.json")


def _target(link: Path) -> Path:
    """Return where a link leads, as a path like its own where ``..`` allows."""
    target = Path(os.path.normpath(link.parent / link.readlink()))
    return target if target.resolve() == link.resolve() else link.resolve()
