"""TRL's trainers of algorithms that learn from written answers."""

from functools import partial
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForImageTextToText
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.offline import HELD_OUT, Dpo
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.backends.trl.tokenization import IGNORED, lines_of, preparation_of
from scripts.errors import UserError
from scripts.model.loading import class_of
from scripts.rows.chat_format import tokenizer_of
from scripts.rows.prompts import open_picture


def make_sft_trainer(job: TrainingJob) -> SFTTrainer:
    """Make the trainer of SFT on the rows of the job."""
    start, rows = start_and_rows(job)
    if job.ranks * shares_of(job)[1] > 1:
        rows = fill_last_batch(rows, job.config.rows_per_step)
    processor = start["processing_class"]
    arguments = SFTConfig(
        max_length=None,  # the rows are cut already
        dataset_kwargs={"skip_prepare_dataset": True},
        **shared_arguments(job),
    )
    collator = None if tokenizer_of(processor) is processor else partial(_batch_with_pictures, processor=processor)
    return SFTTrainer(args=arguments, train_dataset=rows, data_collator=collator, **start)


def _batch_with_pictures(rows: list[dict[str, list[Any]]], processor: Any) -> dict[str, torch.Tensor]:
    """Return the batch of TRL's collator for text, with the pictures of its rows."""
    collate = DataCollatorForLanguageModeling(pad_token_id=processor.tokenizer.pad_token_id)
    batch = collate([{key: row[key] for key in ("input_ids", "labels")} for row in rows])
    if pictures := [open_picture(uri) for row in rows for uri in row["pictures"]]:
        batch["pixel_values"] = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    return batch


def fill_last_batch(rows: Dataset, batch: int) -> Dataset:
    """Return the rows, filled up by unlearnt rows until the last batch can be shared evenly.

    Otherwise the split's first rows would be learnt twice an epoch, unlike in one process.
    """
    filler = {"input_ids": rows[0]["input_ids"][:1], "labels": [IGNORED], "pictures": []}
    lacking = -len(rows) % batch
    return concatenate_datasets([rows, Dataset.from_list([filler] * lacking, rows.features)]) if lacking else rows


class TokenizedPairsTrainer(DPOTrainer):
    """TRL's trainer on tokenized pairs.

    The sft loss is a mean over the tokens of an update, however many processes and micro-batches share them; TRL
    takes the mean over a process's micro-batch.
    """

    tokens_at_once = 1.0
    """Chosen tokens of the update that a process takes at once, on average."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def get_batch_samples(self, *arguments: Any) -> tuple[list[dict[str, torch.Tensor]], Any]:
        """The micro-batches of an update."""
        batches, items = super().get_batch_samples(*arguments)
        counts = torch.stack([_chosen_tokens(batch) for batch in batches]).to(self.accelerator.device)
        self.tokens_at_once = self.accelerator.gather(counts).double().mean().item()
        return batches, items

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *arguments: Any) -> Any:
        weights = self.args.loss_weights
        share = _chosen_tokens(inputs).item() / self.tokens_at_once
        self.loss_weights = [
            weight * share if name == "sft" else weight for name, weight in zip(self.loss_types, weights, strict=True)
        ]
        return super()._compute_loss(model, inputs, *arguments)


def _chosen_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens of a batch's chosen answers, the first half of its rows."""
    mask = batch["completion_mask"]
    return mask[: len(mask) // 2].sum()


def make_dpo_trainer(job: TrainingJob) -> DPOTrainer:
    """Make the trainer of DPO or MPO on pairs, without a last incomplete batch."""
    loss_types, loss_weights = losses(job.config.section)
    if {"aot", "aot_unpaired"} & {*loss_types} and shares_of(job)[0] < job.config.rows_per_update:
        raise UserError(
            f"{job.stage}: loss_type {loss_types[0]} sorts the pairs that a process takes at once; train it in one "
            "process, without policy.train_micro_batch_size"
        )
    start, pairs = start_and_rows(job)
    arguments = DPOConfig(
        dataloader_drop_last=True,
        max_length=job.config.max_length,
        beta=job.config.section.reference_policy_kl_penalty,
        loss_type=loss_types,
        label_smoothing=job.config.section.label_smoothing,
        loss_weights=loss_weights,
        **shared_arguments(job),
    )
    return TokenizedPairsTrainer(args=arguments, train_dataset=pairs, **start)


def losses(settings: Dpo) -> tuple[list[str], list[float]]:
    """Return TRL's names of the losses with a weight, and the weights."""
    preference = "sigmoid_norm" if settings.preference_average_log_probs else settings.loss_type
    named = [
        (preference, settings.preference_loss_weight),
        ("bco_pair", getattr(settings, "bco_loss_weight", 0)),
        ("sft", settings.sft_loss_weight),
    ]
    weighted = [(name, weight) for name, weight in named if weight]
    return [name for name, _ in weighted], [weight for _, weight in weighted]


class TokenizedAnswersTrainer(KTOTrainer):
    """TRL's trainer on tokenized answers.

    The KL is the mean over an update's rows, however many processes and micro-batches share them; TRL takes the mean
    over the micro-batches that processes compute at once.
    """

    kl: torch.Tensor

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset

    def get_batch_samples(self, *arguments: Any) -> tuple[list[dict[str, torch.Tensor]], Any]:
        """The micro-batches of an update."""
        batches, items = super().get_batch_samples(*arguments)
        if self.calculate_KL:
            self.kl = torch.stack([self._kl_of(self._prepare_inputs(batch)) for batch in batches]).mean()
        return batches, items

    def _kl_of(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        policy = super()._compute_kl_logps(self.model_wrapped, batch)
        others = {name: batch[f"KL_{name}"] for name in ("input_ids", "attention_mask", "completion_mask")}
        self.calculate_KL = False
        reference, _ = self.compute_ref_log_probs(self.ref_model or self.model, others)
        self.calculate_KL = True
        return (policy - reference).mean()

    def _compute_loss(self, *arguments: Any) -> Any:
        self.policy_and_reference = iter((self.kl, torch.zeros_like(self.kl)) if self.calculate_KL else (None, None))
        return super()._compute_loss(*arguments)

    def _compute_kl_logps(self, *_: Any) -> torch.Tensor | None:
        """The first is the policy's, the second the reference's."""
        return next(self.policy_and_reference)


def with_others(rows: Dataset, batch: int) -> Dataset:
    """Return the rows, each beside the answer of the row before in its batch, of which TRL's KL is estimated."""
    starts = (place - place % batch for place in range(len(rows)))
    before = [(place - 1 if place > start else min(start + batch, len(rows)) - 1) for place, start in enumerate(starts)]
    others = rows.select(before).select_columns("completion_ids").rename_column("completion_ids", "KL_completion_ids")
    return concatenate_datasets([rows, others], axis=1)


def make_kto_trainer(job: TrainingJob) -> KTOTrainer:
    """Make the trainer of KTO on labelled answers, without a last incomplete batch."""
    kto, at_once = job.config.kto, shares_of(job)[0]
    if at_once < 2:
        raise UserError(f"{job.stage}: KTO takes 2 rows a process at once or more; raise policy.train_micro_batch_size")
    start, rows = start_and_rows(job)
    arguments = KTOConfig(
        dataloader_drop_last=True,
        max_length=job.config.max_length,
        beta=kto.reference_policy_kl_penalty,
        loss_type=kto.loss_type,
        desirable_weight=kto.desirable_weight,
        undesirable_weight=kto.undesirable_weight,
        **shared_arguments(job),
    )
    rows = with_others(rows, job.config.rows_per_step) if kto.loss_type == "kto" else rows
    return TokenizedAnswersTrainer(args=arguments, train_dataset=rows, **start)


class PairsTrainer(RewardTrainer):
    """TRL's trainer, which compares the held-out pairs at every checkpoint."""

    held_out: list[dict[str, Any]]
    """Tokenized pairs."""

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Log a step, with the held-out accuracy where the step is saved."""
        if "loss" in logs and self.control.should_save:
            self._metrics["train"][HELD_OUT] = [self.held_out_accuracy()]
        super().log(logs, *arguments)

    @torch.no_grad()
    def held_out_accuracy(self) -> float:
        """Return the share of held-out pairs whose chosen answer scores higher; every process compares all."""
        right, size = 0, self.args.per_device_train_batch_size
        for start in range(0, len(self.held_out), size):
            batch = self._prepare_inputs(self.data_collator(self.held_out[start : start + size]))
            chosen, rejected = self.model_wrapped(**batch).logits.squeeze(-1).chunk(2)
            right += (chosen > rejected).sum().item()
        return right / len(self.held_out)


def make_reward_trainer(job: TrainingJob) -> RewardTrainer:
    """Make the trainer of a reward model on pairs, without a last incomplete batch."""
    if class_of(job.parent_model) is AutoModelForImageTextToText:
        raise UserError(f"{job.stage}: {job.parent_model} sees pictures, and no such model has a head for rewards")
    start, pairs = start_and_rows(job)
    arguments = RewardConfig(
        dataloader_drop_last=True,
        max_length=None,
        center_rewards_coefficient=job.config.reward.center_rewards_coefficient or None,
        **shared_arguments(job),
    )
    trainer = PairsTrainer(args=arguments, train_dataset=pairs, **start)
    _, prepare = preparation_of(job.config, start["processing_class"])
    trainer.held_out = prepare(list(lines_of(job.train_split.with_name("val-split.jsonl"))))
    return trainer
