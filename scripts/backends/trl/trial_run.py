"""Try one batch of a stage, as a program of scripts.backends.trl.trial: ``trial_run FOLDER``.

FOLDER holds job.pickle, the stage's own job, and limits.json; the outcome is left in outcome.json there. A step is
trained by the stage's trainer, saved, loaded for a second step, saved again, exported, and the export is loaded.
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers import logging as transformers_logging

from scripts.backends.protocol import TrainingJob, read_job
from scripts.backends.trl import measuring
from scripts.backends.trl.placing import out_of_memory
from scripts.backends.trl.small_job import SmallJob, small_job
from scripts.backends.trl.small_model import SmallModel, make_small
from scripts.backends.trl.train import train_rank
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.model.hugging_face import model_files
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.processes import PARENT, end_with_parent
from scripts.stage.publish import take_settings

OUTCOME = "outcome.json"
OPERATIONS = 5e11
"""Multiplications and additions of a try, some ten seconds of two cores."""


@dataclass
class Outcome:
    """How far a try came, and how it ended; written after every part of it."""

    file: Path
    doing: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    failed: str | None = None
    """What went wrong in the stage's own code or settings."""
    not_tried: str | None = None
    """Why the try itself was not possible."""
    more: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def part(self, doing: str) -> Iterator[None]:
        """Note what is being done and the seconds it takes."""
        self.doing, started = doing, time.monotonic()
        self.write()
        yield
        self.seconds[doing] = round(time.monotonic() - started, 1)

    def write(self) -> None:
        """Write the outcome so far."""
        values = {name: value for name, value in vars(self).items() if name != "file"}
        write_json(self.file, values)


def run_trial(folder: Path, outcome: Outcome) -> None:
    """Try the job in a folder; the outcome is noted as it comes."""
    job, limits = read_job(folder / "job.pickle"), read_json(folder / "limits.json")
    with outcome.part("reading the model's files"):
        for source in dict.fromkeys([job.parent_model, *job.roles.values()]):
            if source is not None:
                check_files(source, folder / "written")
    try:
        with outcome.part("making a small model"):
            small = _small(job, folder, limits, outcome)
    except Exception as error:  # of the try's own making, so the stage is not to blame
        traceback.print_exc()
        outcome.not_tried = f"the model cannot be made small: {_last_line(error)}"
        return
    _reward_by_length()
    with outcome.part("training a step"):
        train_rank(small.job, in_own_precision=not limits["on_cpu"])
    first = small.job.training.checkpoint(1).path
    gc.collect()
    with outcome.part("going on from its checkpoint"):
        train_rank(replace(small.job, resume_from=first, max_num_steps=2), in_own_precision=not limits["on_cpu"])
    gc.collect()
    with outcome.part("exporting"):
        _export(small.job, small.job.training.checkpoint(2).path, folder / "export")


def check_files(source: Path, written: Path) -> None:
    """Raise UserError where a model's settings can be read but not written."""
    kinds = {"config.json": AutoConfig, "generation_config.json": GenerationConfig}
    for name, kind in kinds.items():
        if not (source / name).is_file():
            continue
        settings = kind.from_pretrained(source, local_files_only=True)
        try:
            settings.save_pretrained(written)
        except Exception as error:
            raise UserError(
                f"{source / name}: can be read but not written, as every checkpoint does: {_last_line(error)}; "
                f"correct {name} in the model's folder"
            ) from error
    load_processor(source).save_pretrained(written)


def _small(job: TrainingJob, folder: Path, limits: dict[str, Any], outcome: Outcome) -> SmallJob:
    """Return the small job, its start and roles cut, and note their sizes."""
    made: dict[Path, tuple[Path, SmallModel]] = {}
    for number, source in enumerate(dict.fromkeys([job.parent_model, *job.roles.values()])):
        if source is not None:
            target = folder / f"model_{number}"
            made[source] = target, make_small(source, target, limits["parameters"])
    start = made.get(job.parent_model)
    parameters = sum(small.parameters for _, small in made.values())
    most_tokens = limits["tokens"]
    if start is not None:
        _, size = start
        outcome.remarks += size.remarks
        outcome.more |= {"layers": size.layers, "layers_of_model": size.all_layers, "parameters": size.parameters}
        most_tokens = min(most_tokens, int(OPERATIONS / (6 * parameters * 4)))
    small = small_job(job, folder, most_tokens, limits["on_cpu"])
    outcome.remarks += small.remarks
    outcome.more |= {"rows": small.lines, "most_tokens": small.job.config.max_length}
    roles = {role: made[source][0] for role, source in job.roles.items()}
    small.job = replace(small.job, parent_model=start[0] if start else None, roles=roles)
    return small


def _reward_by_length() -> None:
    """Reward a response by its length: the probe of the preflight tries the environments, whose servers may be far."""
    measuring.reward_groups = lambda groups, *_, **__: [[float(len(text)) for text in texts] for _, texts in groups]


def _export(job: TrainingJob, checkpoint: Path, export: Path) -> None:
    """Export a checkpoint as the stage is, and load the export with its tokenizer."""
    if job.config.policy.lora is None:
        export.mkdir()
        for path in model_files(checkpoint):
            path.rename(export / path.name)
    else:
        from scripts.model.merge import NotMerged, write_merged  # noqa: PLC0415 - only where adapters are trained

        try:
            write_merged(job.parent_model, checkpoint, export)
        except NotMerged as error:
            raise UserError(str(error)) from None
    if job.parent_model is not None:
        take_settings(job.parent_model, export, job.config.chat_template)
    load_model(export)
    load_processor(export)


def _last_line(error: BaseException) -> str:
    """Return an error's kind and first line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def main() -> None:
    """Try the job of a folder, and leave its outcome there."""
    if PARENT in os.environ:
        end_with_parent()
    folder = Path(sys.argv[1])
    outcome = Outcome(folder / OUTCOME)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(read_job(folder / "job.pickle").threads)
    try:
        run_trial(folder, outcome)
    except UserError as error:
        traceback.print_exc()
        outcome.failed = str(error)
        if isinstance(error.__cause__, Exception) and out_of_memory(error.__cause__, read_job(folder / "job.pickle")):
            outcome.failed, outcome.not_tried = None, f"this machine lacks the memory: {error.__cause__}"
    except Exception as error:
        traceback.print_exc()
        outcome.failed = _last_line(error)
    outcome.write()


if __name__ == "__main__":
    main()
