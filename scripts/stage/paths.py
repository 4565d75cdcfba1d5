"""Where a stage's files lie in its folder of results."""

import os
from dataclasses import dataclass
from pathlib import Path

MODEL = "model"
"""The folder, among those of the stages, of the recipe's pretrained model: its export, from which stages start."""


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage; `directory` is ``results/<run>/<stage>``."""

    directory: Path

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.directory.name

    @property
    def config(self) -> Path:
        """The resolved training config."""
        return self.directory / "config.yaml"

    @property
    def preflight(self) -> Path:
        """What was checked before any node was asked for."""
        return self.directory / "preflight.json"

    @property
    def run(self) -> Path:
        """The run directory, where it trains; a stage as of a step links to the stage's."""
        run = self.directory / "run"
        return Path(os.path.normpath(self.directory / run.readlink())) if run.is_symlink() else run

    @property
    def owner(self) -> Path:
        """Which process trains in the run directory."""
        return self.run.with_name("owner.json")

    @property
    def logs(self) -> Path:
        """The folder of its logs."""
        return self.directory / "logs"

    @property
    def attempts_log(self) -> Path:
        """What every attempt at training printed."""
        return self.logs / "attempts.log"

    @property
    def ckpt(self) -> Path:
        """The published checkpoint: record.json and weights, a link into the run directory."""
        return self.directory / "ckpt"

    @property
    def record(self) -> Path:
        """The published checkpoint's record."""
        return self.ckpt / "record.json"

    @property
    def export_record(self) -> Path:
        """The record of the export in Hugging Face's format."""
        return self.directory / "hf/record.json"

    @property
    def export(self) -> Path:
        """The exported model, a link to a folder named by its content."""
        return self.directory / "hf/model"

    def exported(self, content: str) -> Path:
        """The folder of an exported model."""
        return self.directory / "exports" / content

    @property
    def metrics(self) -> Path:
        """One row a training step."""
        return self.directory / "metrics.parquet"

    @property
    def evaluation(self) -> Path:
        """Held-out scores by environment."""
        return self.directory / "eval.json"

    @property
    def test(self) -> Path:
        """Scores on the test split by environment, beside those of the model that the chain started from."""
        return self.directory / "test.json"

    @property
    def benchmarks(self) -> Path:
        """Scores on benchmarks."""
        return self.directory / "benchmarks.json"

    @property
    def rollouts(self) -> Path:
        """Each held-out row with its responses before and after the stage."""
        return self.directory / "rollouts.parquet"

    @property
    def gate(self) -> Path:
        """The gate's verdict."""
        return self.directory / "gate.json"

    @property
    def criteria(self) -> Path:
        """What each criterion of the gate came to."""
        return self.directory / "criteria.json"

    @property
    def choice(self) -> Path:
        """What was chosen, where the folder is that of a choice."""
        return self.directory / "choice.json"

    def sibling(self, stage: str) -> "StagePaths":
        """The files of another stage of the same results."""
        return StagePaths(self.directory.with_name(stage))
