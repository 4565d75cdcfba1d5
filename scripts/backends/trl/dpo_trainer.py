"""Direct and mixed preference optimisation on pairs of answers, by TRL's DPOTrainer."""

from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.offline import Dpo
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.errors import UserError


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


def make_trainer(job: TrainingJob) -> DPOTrainer:
    """Make the trainer of DPO or MPO on pairs in file order, without a last incomplete batch."""
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
