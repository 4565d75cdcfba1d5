"""Supervised fine-tuning on demonstrations, by TRL's SFTTrainer."""

from typing import Any

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.setup import (
    adapters,
    expand_pictures,
    model_and_processor,
    pictures_by_row,
    shared_arguments,
    shares_of,
    start_options,
    training_rows,
)
from scripts.data.prompts import as_chat, open_picture, render
from scripts.model.load import tokenizer_of


def make_trainer(job: TrainingJob) -> SFTTrainer:
    """The trainer of a stage of SFT; rows are learnt in file order."""
    policy = job.config.policy
    batch = policy.train_global_batch_size
    model, processor = model_and_processor(job)
    rows = training_rows(job, job.max_num_steps * batch)
    pictures = pictures_by_row(job, [as_chat(row["messages"]) for row in rows], processor)
    tokenized = tokenize_demonstrations(
        rows, processor, policy.max_total_sequence_length, policy.tokenizer.chat_template_kwargs
    )
    if tokenizer_of(processor) is not processor:
        tokenized = [row | {"pictures": uris} for row, uris in zip(tokenized, pictures, strict=True)]
    if job.ranks * shares_of(job)[1] > 1:
        tokenized = fill_last_batch(tokenized, batch)
    arguments = SFTConfig(
        train_sampling_strategy="sequential",
        shuffle_dataset=False,
        max_length=policy.max_total_sequence_length,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        model_init_kwargs=start_options(job) if isinstance(model, str) else None,
        **shared_arguments(job),
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(tokenized),
        data_collator=_PictureCollator(processor) if "pictures" in tokenized[0] else None,
        processing_class=processor,
        peft_config=adapters(job),
    )


def tokenize_demonstrations(
    rows: list[dict[str, Any]], processor: Any, max_length: int, variables: dict[str, Any] | None = None
) -> list[dict[str, list[Any]]]:
    """Token ids and labels of demonstrations; only the last message, the assistant's, is learnt.

    `variables` are those of the chat template.
    """
    variables, tokenizer = variables or {}, tokenizer_of(processor)
    conversations = [as_chat(row["messages"]) for row in rows]
    prompts = [render(messages[:-1], processor, add_generation_prompt=True, **variables) for messages in conversations]
    texts = [render(messages, processor, **variables) for messages in conversations]
    prompt_ids = tokenizer(expand_pictures(prompts, processor), add_special_tokens=False)["input_ids"]
    ids = tokenizer(expand_pictures(texts, processor), add_special_tokens=False)["input_ids"]
    return [
        {"input_ids": full[:max_length], "labels": ([-100] * len(prompt) + full[len(prompt) :])[:max_length]}
        for prompt, full in zip(prompt_ids, ids, strict=True)
    ]


class _PictureCollator:
    """TRL's collator for text, and the pictures of those rows of a batch that have any."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.collate = DataCollatorForLanguageModeling(pad_token_id=processor.tokenizer.pad_token_id)

    def __call__(self, rows: list[dict[str, list[Any]]]) -> dict[str, torch.Tensor]:
        pictures = [open_picture(uri) for row in rows for uri in row["pictures"]]
        batch = self.collate([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
        if pictures:
            batch["pixel_values"] = self.processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
        return batch


def fill_last_batch(tokenized: list[dict[str, list[int]]], batch: int) -> list[dict[str, list[int]]]:
    """The rows, and as many of which nothing is learnt as the last batch lacks to be shared evenly.

    Without them the first rows of the split would be learnt twice an epoch, as one process never does.
    """
    filler = {"input_ids": tokenized[0]["input_ids"][:1], "labels": [-100]}
    filler |= {"pictures": []} if "pictures" in tokenized[0] else {}
    return tokenized + [filler] * (-len(tokenized) % batch)
