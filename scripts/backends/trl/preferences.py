"""Direct and mixed preference optimisation on pairs of answers, by TRL's DPOTrainer."""

from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithms import Dpo
from scripts.backends.trl.setup import adapters, model_and_processor, shared_arguments, start_options, training_rows
from scripts.data.examples import Preference, preference_of
from scripts.data.prompts import render
from scripts.errors import UserError
from scripts.model.load import tokenizer_of


class TokenizedPairsTrainer(DPOTrainer):
    """TRL's trainer on pairs that are tokenized already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def make_trainer(job: TrainingJob) -> DPOTrainer:
    """The trainer of a stage of DPO or MPO; pairs are learnt in file order, less what fills no whole batch."""
    settings, policy = job.config.section, job.config.policy
    batch, longest = policy.train_global_batch_size, policy.max_total_sequence_length
    model, processor = model_and_processor(job)
    rows = training_rows(job, job.max_num_steps * batch)
    preferences = [preference_of(row) for row in rows]
    pairs = tokenize_pairs(preferences, tokenizer_of(processor), **policy.tokenizer.chat_template_kwargs)
    for number, pair in enumerate(pairs, start=1):
        length = len(pair["prompt_ids"]) + max(len(pair["chosen_ids"]), len(pair["rejected_ids"]))
        if length > longest:
            raise UserError(
                f"{job.train_split}:{number}: prompt and answer have {length} tokens, more than the {longest} of "
                "policy.max_total_sequence_length; raise that or drop the row"
            )
    loss_types, loss_weights = losses(settings)
    arguments = DPOConfig(
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        max_length=longest,
        beta=settings.reference_policy_kl_penalty,
        loss_type=loss_types,
        loss_weights=loss_weights,
        remove_unused_columns=False,
        model_init_kwargs=start_options(job),
        **shared_arguments(job),
    )
    return TokenizedPairsTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(pairs),
        processing_class=processor,
        peft_config=adapters(job),
    )


def losses(settings: Dpo) -> tuple[list[str], list[float]]:
    """TRL's names of the losses that have a weight, and the weights."""
    preference = "sigmoid_norm" if settings.preference_average_log_probs else "sigmoid"
    named = {
        preference: settings.preference_loss_weight,
        "bco_pair": getattr(settings, "bco_loss_weight", 0),
        "sft": settings.sft_loss_weight,
    }
    weighted = {name: weight for name, weight in named.items() if weight}
    return list(weighted), list(weighted.values())


def tokenize_pairs(preferences: list[Preference], tokenizer: Any, **variables: Any) -> list[dict[str, list[int]]]:
    """Token ids of prompts, chosen and rejected answers in the chat template, of which `variables` are set."""

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    prompts = [render(pair.prompt, tokenizer, add_generation_prompt=True, **variables) for pair in preferences]
    answers = {
        name: [
            render([*pair.prompt, *getattr(pair, name)], tokenizer, **variables).removeprefix(prompt)
            for pair, prompt in zip(preferences, prompts, strict=True)
        ]
        for name in ("chosen", "rejected")
    }
    pairs = zip(ids(prompts), ids(answers["chosen"]), ids(answers["rejected"]), strict=True)
    return [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs]
