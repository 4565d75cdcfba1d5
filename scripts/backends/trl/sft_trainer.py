"""Supervised fine-tuning on demonstrations, by TRL's SFTTrainer."""

from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import open_picture


def make_trainer(job: TrainingJob) -> SFTTrainer:
    """Make the trainer of SFT on rows in file order."""
    start, rows = start_and_rows(job)
    if job.ranks * shares_of(job)[1] > 1:
        rows = fill_last_batch(rows, job.config.rows_per_step)
    processor = start["processing_class"]
    arguments = SFTConfig(
        max_length=None,  # the rows are cut already
        dataset_kwargs={"skip_prepare_dataset": True},
        **shared_arguments(job),
    )
    collator = None if tokenizer_of(processor) is processor else _PictureCollator(processor)
    return SFTTrainer(args=arguments, train_dataset=rows, data_collator=collator, **start)


class _PictureCollator:
    """TRL's collator for text, with the pictures of the batch's rows."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.collate = DataCollatorForLanguageModeling(pad_token_id=processor.tokenizer.pad_token_id)

    def __call__(self, rows: list[dict[str, list[Any]]]) -> dict[str, torch.Tensor]:
        pictures = [open_picture(uri) for row in rows for uri in row["pictures"]]
        batch = self.collate([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        if pictures:
            batch["pixel_values"] = self.processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
        return batch


def fill_last_batch(rows: Dataset, batch: int) -> Dataset:
    """Return the rows, filled up by unlearnt rows until the last batch can be shared evenly.

    Otherwise the split's first rows would be learnt twice an epoch, unlike in one process.
    """
    filler = {"input_ids": rows[0]["input_ids"][:1], "labels": [-100], "pictures": []}
    lacking = -len(rows) % batch
    return concatenate_datasets([rows, Dataset.from_list([filler] * lacking, rows.features)]) if lacking else rows
