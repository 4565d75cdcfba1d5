"""KTO on single answers with a label, by TRL's KTOTrainer."""

from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from trl import KTOConfig, KTOTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.errors import UserError

OTHERS = "KL_completion_ids"


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
    others = rows.select(before).select_columns("completion_ids").rename_column("completion_ids", OTHERS)
    return concatenate_datasets([rows, others], axis=1)


def make_trainer(job: TrainingJob) -> KTOTrainer:
    """Make the trainer of KTO on rows in file order, without a last incomplete batch."""
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
