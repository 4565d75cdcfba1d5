"""The rewards of a GRPO stage as TRL takes them: the environments', and a reward model's."""

from collections.abc import Callable
from typing import Any

import torch

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.grpo import REWARD_MODEL
from scripts.backends.trl.measuring import environment_reward
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.rows.prompts import render

MARK = "an answer"


class EndedTexts:
    """A tokenizer that ends each text as the chat template ends an answer.

    TRL gives a reward model the texts of prompts and responses, which lack the end that the model learnt to score at.
    """

    def __init__(self, tokenizer: Any, **variables: Any) -> None:
        self.tokenizer, self.pad_token_id = tokenizer, tokenizer.pad_token_id
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        self.end = render(said, tokenizer, **variables).rpartition(MARK)[2]

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Tokenize the ended texts."""
        return self.tokenizer(text=[each + self.end for each in text], **options)


def rewards_of(job: TrainingJob, in_messages: bool) -> tuple[list[Callable[..., Any]], list[Any], list[float]]:
    """Return a stage's rewards, the tokenizers of reward models among them (else None), and the weights.

    `in_messages`: TRL has prompts and responses as messages, and renders them itself.
    """
    config, folder = job.config, job.roles.get(REWARD_MODEL)
    by_environment = environment_reward(config.grpo.num_generations_per_prompt, job.train_split)
    if folder is None:
        return [by_environment], [None], [1.0]
    model, tokenizer = load_model(folder, getattr(torch, config.policy.precision)), load_processor(folder)
    reads = tokenizer if in_messages else EndedTexts(tokenizer, **config.policy.tokenizer.chat_template_kwargs)
    weights = config.grpo.reward_weights
    rewards = [(by_environment, None, weights.environment), (model, reads, weights.reward_model)]
    functions, readers, shares = zip(*(each for each in rewards if each[2]), strict=True)
    return list(functions), list(readers), list(shares)
