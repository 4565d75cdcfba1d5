"""TRL's trainers of algorithms that learn from written answers."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoModelForImageTextToText
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.offline import Dpo
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.backends.trl.tokenization import IGNORED
from scripts.backends.trl.validation import Sums, Validation
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
    return DemonstrationsTrainer(args=arguments, train_dataset=rows, data_collator=collator, **start)


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


class AllRowsAlike:
    """A trainer whose loss of a held-out row takes nothing from the others."""

    def held_out_rows(self, rows: Dataset) -> Dataset:
        """The rows as they are tokenized."""
        return rows

    def begin_validation(self, validation: Validation) -> None:
        """Nothing is measured beforehand."""


class DemonstrationsTrainer(AllRowsAlike, SFTTrainer):
    """TRL's trainer, which measures the held-out rows by token."""

    def sums_of(self, batch: dict[str, Any]) -> dict[str, float]:
        """The negative log-likelihood of a batch's learnt tokens, without losses of a router."""
        labels = batch["labels"]
        outputs = self.model_wrapped(**batch, use_cache=False, fused_lm_head=True)
        nats = -outputs.log_probs.double().sum().item()
        return {"rows": len(labels), "nats": nats, "tokens": outputs.label_mask.sum().item()}

    def figures_of(self, sums: Sums) -> dict[str, float]:
        """The mean over learnt tokens."""
        return {"validation_loss": sums["nats"] / sums["tokens"]} if sums["tokens"] else {}


class PairsMeasures(AllRowsAlike):
    """The figures of pairs: the loss, how often the chosen answer has the higher reward, and by how much."""

    _metrics: dict[str, dict[str, list[float]]]
    ACCURACY, MARGIN = "rewards/accuracies", "rewards/margins"

    def sums_of(self, batch: dict[str, Any]) -> dict[str, float]:
        """The loss of a batch's pairs and TRL's measures of it."""
        pairs = len(batch["input_ids"]) // 2
        loss = self.compute_loss(self.model_wrapped, batch).item()
        measured = self._metrics["eval"]
        right, margin = measured[self.ACCURACY][-1], measured[self.MARGIN][-1]
        return {"rows": pairs, "loss": pairs * loss, "right": pairs * right, "margin": pairs * margin}

    def figures_of(self, sums: Sums) -> dict[str, float]:
        """The means over pairs."""
        named = {"loss": "validation_loss", "right": "validation_accuracy", "margin": "validation_margin"}
        return {column: sums[name] / sums["rows"] for name, column in named.items()}


class TokenizedPairsTrainer(PairsMeasures, DPOTrainer):
    """TRL's trainer on tokenized pairs.

    The sft loss is a mean over the tokens of an update, however many processes and micro-batches share them; TRL
    takes the mean over a process's micro-batch.
    """

    tokens_at_once = 1.0
    """Chosen tokens of the update that a process takes at once, on average."""
    tokens_of_pair = 1.0
    """Chosen tokens of a held-out pair, on average."""

    def begin_validation(self, validation: Validation) -> None:
        """Count the chosen tokens, whose mean loss is over all held-out pairs."""
        lengths = map(len, validation.rows["chosen_ids"])
        self.tokens_of_pair = sum(lengths) / len(validation.rows)

    def sums_of(self, batch: dict[str, Any]) -> dict[str, float]:
        """The sums, in which the sft loss weighs chosen tokens alike."""
        self.tokens_at_once = self.tokens_of_pair * (len(batch["input_ids"]) // 2)
        return super().sums_of(batch)

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


class TokenizedAnswersTrainer(AllRowsAlike, KTOTrainer):
    """TRL's trainer on tokenized answers.

    The KL is the mean over an update's rows, however many processes and micro-batches share them; TRL takes the mean
    over the micro-batches that processes compute at once.
    """

    kl: torch.Tensor

    def held_out_rows(self, rows: Dataset) -> Dataset:
        """The rows, each with the answer of the row before, of which the KL is estimated."""
        return with_others(rows, len(rows)) if self.calculate_KL and len(rows) else rows

    def begin_validation(self, validation: Validation) -> None:
        """Estimate the KL, which is the mean over all held-out rows."""
        if not self.calculate_KL:
            return
        sums: Sums = Counter()
        for batch, share in validation.batches():
            rows = share * len(batch["input_ids"])
            sums.update({"rows": rows, "kl": rows * self._kl_of(batch).item()})
        sums = validation.over_all_ranks(sums)
        self.kl = torch.tensor(sums["kl"] / sums["rows"], device=self.accelerator.device)

    def sums_of(self, batch: dict[str, Any]) -> dict[str, float]:
        """The loss of a batch's answers, and the implicit rewards of wanted and of unwanted ones."""
        rows, wanted = len(batch["input_ids"]), int(sum(batch["label"]))
        loss = self.compute_loss(self.model_wrapped, batch).item()
        measured = self._metrics["eval"]
        found = {"rows": rows, "loss": rows * loss, "wanted": wanted, "unwanted": rows - wanted}
        for name, key in (("wanted", "rewards/chosen"), ("unwanted", "rewards/rejected")):
            found[f"reward of {name}"] = found[name] * measured[key][-1] if found[name] else 0.0
        return found

    def figures_of(self, sums: Sums) -> dict[str, float]:
        """The mean loss, and the difference of the mean rewards where there are answers of both kinds."""
        found = {"validation_loss": sums["loss"] / sums["rows"]}
        if sums["wanted"] and sums["unwanted"]:
            wanted, unwanted = (sums[f"reward of {name}"] / sums[name] for name in ("wanted", "unwanted"))
            found["validation_margin"] = wanted - unwanted
        return found

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


class PairsTrainer(PairsMeasures, RewardTrainer):
    """TRL's trainer of a reward model, whose scores are the rewards."""

    ACCURACY, MARGIN = "accuracy", "margin"


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
    return PairsTrainer(args=arguments, train_dataset=pairs, **start)
