"""Where a stage's files lie in its folder of results."""

import os
from dataclasses import dataclass
from pathlib import Path

MODEL = "model"
"""The folder, among those of the stages, of the recipe's pretrained model: its export, from which stages start."""


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
        """The run directory, where it trains; a stage as of a step links to the stage's."""
        run = self.directory / "run"
        return Path(os.path.normpath(self.directory / run.readlink())) if run.is_symlink() else run

    @property
    def owner(self) -> Path:
        """Which process trains in the run directory."""
        return self.run.with_name("owner.json")

    def exported(self, content: str) -> Path:
        """The folder of an exported model."""
        return self.directory / "exports" / content

    def sibling(self, stage: str) -> "StagePaths":
        """The files of another stage of the same results."""
        return StagePaths(self.directory.with_name(stage))
