"""Name the files in a stage's folder of results."""

import os
from dataclasses import dataclass
from pathlib import Path

STORE = "store"
"""Folder, beside the runs', of all trainings (scripts.stage.store)."""


def below(path: str, about: str) -> property:
    """Return the property of a path below a stage's folder."""
    return property(lambda stage: stage.directory / path, doc=about)


@dataclass(frozen=True)
class StagePaths:
    """The files of one stage; `directory` is ``results/<run>/<stage>``."""

    directory: Path

    config = below("config.yaml", "The resolved training config.")
    amended = below("amended.json", "The amendments by which the stage goes on from another training.")
    again = below("again.json", "The trainings again of an identity, which have folders of their own.")
    preflight = below("preflight.json", "Checks before any node is asked for.")
    logs = below("logs", "Logs.")
    attempts_log = below("logs/attempts.log", "Output of every attempt at training.")
    ckpt = below("ckpt", "The published checkpoint: record.json and weights.")
    record = below("ckpt/record.json", "The published checkpoint's record.")
    export_record = below("hf/record.json", "The record of the export in Hugging Face's format.")
    weights = below("ckpt/weights", "The published checkpoint's files, a link into the store.")
    export = below("hf/model", "The exported model, a link into the store.")
    metrics = below("metrics.parquet", "One row a training step.")
    evaluation = below("eval.json", "Held-out scores by environment.")
    test = below("test.json", "Scores on the test split, beside the chain's first model.")
    benchmarks = below("benchmarks.json", "Scores on benchmarks.")
    rollouts = below("rollouts.parquet", "Held-out rows with responses before and after the stage.")
    gate = below("gate.json", "The gate's verdict.")
    criteria = below("criteria.json", "Value and verdict of each criterion.")
    pushed = below("pushed.json", "What was pushed to the remote store.")
    choice = below("choice.json", "The chosen, in a choice's folder.")

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


def _target(link: Path) -> Path:
    """Return where a link leads, as a path like its own where ``..`` allows."""
    target = Path(os.path.normpath(link.parent / link.readlink()))
    return target if target.resolve() == link.resolve() else link.resolve()
