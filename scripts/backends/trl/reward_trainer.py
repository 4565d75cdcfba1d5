"""Reward models by TRL's RewardTrainer."""

from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from trl import RewardConfig, RewardTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.offline import HELD_OUT
from scripts.backends.trl.setup import shared_arguments, start_and_rows
from scripts.backends.trl.tokenization import lines_of, preparation_of
from scripts.errors import UserError
from scripts.model.loading import class_of


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


def make_trainer(job: TrainingJob) -> RewardTrainer:
    """Make the trainer of a reward model on pairs in file order, without a last incomplete batch."""
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
