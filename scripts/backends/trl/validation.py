"""Measure the held-out rows of written answers before the first step, during the training, and after the last step.

`Trainer.evaluate` is not used: it takes the mean of the batches' means, which weighs a row by the batch that it happens
to be in, and several processes repeat rows to fill the last batch. Here every row counts once. Sums over rows, or over
learnt tokens, are added up in double precision, so micro-batches and processes change the figures by rounding alone.
The forward passes and the losses are TRL's, and nothing that the training uses is changed.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa
import torch
from datasets import Dataset
from transformers import Trainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.collectives import rank, world_size
from scripts.backends.trl.offline import Validated
from scripts.backends.trl.rows import BATCH
from scripts.backends.trl.tokenization import Line, lines_of, preparation_of
from scripts.errors import UserError, warn

Sums = Counter[str]
"""Sums by name; `rows` counts the rows."""


class Measuring(Protocol):
    """What a trainer of written answers tells about held-out rows."""

    def held_out_rows(self, rows: Dataset) -> Dataset:
        """Return the tokenized rows with whatever else the loss takes."""

    def begin_validation(self, validation: "Validation") -> None:
        """Measure what the loss of a row takes from all rows."""

    def sums_of(self, batch: dict[str, Any]) -> dict[str, float]:
        """Return the sums over a batch's rows."""

    def figures_of(self, sums: Sums) -> dict[str, float]:
        """Return the columns of metrics.parquet, of the sums over all rows."""


class Validation:
    """The held-out rows of a stage, and when they are measured."""

    def __init__(self, trainer: Any, job: TrainingJob, rows: Dataset) -> None:
        self.trainer, self.job = trainer, job
        self.rows: Dataset = trainer.held_out_rows(rows)
        self.seconds = 0.0
        """What the last measuring took."""

    @classmethod
    def of(cls, trainer: Trainer, job: TrainingJob) -> "Validation | None":
        """Return the validation of a job; None where nothing is held out, measured or written beforehand."""
        settings, stop_when = job.settings.section, job.config.stopping
        if not isinstance(settings, Validated) or not (stop_when or settings.validates):
            return None
        rows = held_out(job, trainer.processing_class)
        if stop_when and not len(rows):
            raise UserError(f"{job.stage}: stop_when needs held-out rows; there are none: raise the blend's holdout")
        return cls(trainer, job, rows) if len(rows) else None

    @property
    def is_due_at_start(self) -> bool:
        """Whether the rows are measured before the first step; a training that goes on was measured when it began."""
        return self.job.settings.section.val_at_start and self.job.start == self.job.begun

    def is_due(self, step: int) -> bool:
        """Whether the rows are measured after a step: regularly, at the end, and where a checkpoint is to be kept."""
        settings = self.job.settings.section
        is_kept = step == self.job.planned or step in self.job.settings.checkpointing.keep_steps
        return self.is_regular(step) or (settings.val_at_end and is_kept)

    def is_regular(self, step: int) -> bool:
        """Whether the rows are measured after a step by the period; of a stage that may end early by its config's."""
        stop_when = self.job.config.stopping
        period = stop_when.val_period if stop_when else self.job.settings.section.val_period
        is_last = stop_when is not None and step == self.job.planned
        return is_last or (period > 0 and step % period == 0)

    def measure(self) -> dict[str, float]:
        """Return the columns of metrics.parquet for the weights as they are; every process must call."""
        began = time.monotonic()
        with _undisturbed(self.trainer):
            self.trainer.begin_validation(self)
            sums: Sums = Counter()
            with _by_itself(self.trainer):
                for batch, share in self.batches():
                    found = self.trainer.sums_of(batch)
                    sums.update({name: share * value for name, value in found.items()})
            sums = self.over_all_ranks(sums)
        self.seconds = time.monotonic() - began
        return {"validation_rows": int(sums["rows"]), **self.trainer.figures_of(sums)}

    def batches(self) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield this process's batches, on its device, with their weight.

        All processes get as many batches, since sharded weights are gathered in each forward pass. A process without a
        last batch gets the first one with weight 0.
        """
        size = self.trainer.args.per_device_train_batch_size
        starts = range(0, len(self.rows), size)
        rounds = -(-len(starts) // world_size())
        for place in range(rounds):
            number = place * world_size() + rank()
            is_own = number < len(starts)
            start = starts[number if is_own else 0]
            rows = self.rows.select(range(start, min(start + size, len(self.rows)))).to_list()
            yield self.trainer._prepare_inputs(self.trainer.data_collator(rows)), float(is_own)

    def over_all_ranks(self, sums: Sums) -> Sums:
        """Return the sums over all processes, which have the same names."""
        names = sorted(sums)
        values = torch.tensor([[sums[name] for name in names]], dtype=torch.float64)
        gathered = self.trainer.accelerator.gather(values.to(self.trainer.accelerator.device))
        return Counter(dict(zip(names, gathered.sum(0).tolist(), strict=True)))


def held_out(job: TrainingJob, processor: Any) -> Dataset:
    """Return a job's held-out rows, tokenized as its training rows are.

    Answers above the length limit lose their end. Rows that the stage could not train on are left out and counted.
    """
    split = job.train_split.with_name("val-split.jsonl")
    stop_when, batch = job.config.stopping, job.config.rows_per_step
    count = stop_when.val_batches if stop_when else job.settings.section.val_batches
    most = count * batch if count > 0 else None
    schema, prepare = preparation_of(job.config, processor)
    if "cuts" in prepare.keywords:
        prepare.keywords["cuts"] = True
    lines = islice(lines_of(split), most) if split.exists() else iter(())
    batches, refused, first = [], 0, ""
    while part := [*islice(lines, BATCH)]:
        prepared, unfit = _prepared(prepare, part)
        batches.append(pa.RecordBatch.from_pylist(prepared, schema=schema))
        refused, first = refused + len(unfit), first or next(iter(unfit), "")
    if refused and rank() == 0:
        warn(f"{job.stage}: {refused} held-out rows are not measured, for the stage could not train on them: {first}")
    return Dataset(pa.Table.from_batches(batches, schema=schema))


def _prepared(prepare: Any, lines: list[Line]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tokenized rows, and why others cannot be tokenized."""
    try:
        return prepare(lines), []
    except UserError as error:
        if len(lines) == 1:
            return [], [str(error)]
    rows, unfit = [], []
    for line in lines:
        fits, problems = _prepared(prepare, [line])
        rows += fits
        unfit += problems
    return rows, unfit


@contextmanager
def _undisturbed(trainer: Any) -> Iterator[None]:
    """Measure without dropout and gradients; random numbers and TRL's own measures go on as if nothing had happened."""
    model, device = trainer.model, trainer.accelerator.device
    was_training = model.training
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), trainer.compute_loss_context_manager():
        model.eval()
        _keep_packing(model)
        try:
            yield
        finally:
            model.train(was_training)
            trainer._metrics["eval"].clear()


def _keep_packing(model: Any) -> None:
    """Keep weights of 4 bits as they are packed for training.

    A layer of bitsandbytes that is not in training packs its weights for inference on CPUs with AVX-512, for good, and
    no gradient passes through them afterwards. The layer itself computes the same in training.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.training = True


@contextmanager
def _by_itself(trainer: Any) -> Iterator[None]:
    """Let TRL take its measures of a batch from this process alone.

    Over all processes they are means of batches' means, which are no mean over rows.
    """
    accelerator = trainer.accelerator
    accelerator.gather = accelerator.gather_for_metrics = lambda values, *_, **__: values
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics
