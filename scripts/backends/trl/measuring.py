"""TRL's GRPOTrainer with rewards by environments and a reward model, more measures and another baseline."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl import grpo
from scripts.errors import UserError, warn
from scripts.model.generate import sampled_by_arguments
from scripts.model.loading import load_model
from scripts.model.processor import load_processor
from scripts.rewards.answers import unfinished_share
from scripts.rewards.episode import Episode, EpisodeResponse, episode_response
from scripts.rewards.registry import own_metrics, reward_groups
from scripts.rewards.verdict import Unjudged
from scripts.rows.prompts import render, render_prompt
from scripts.rows.thoughts import ResponseReader

Completion = str | list[dict[str, Any]]


class MeasuringTrainer(GRPOTrainer):
    """GRPO with the seconds of a step's rollouts, and vLLM's distance from the trainer.

    TRL measures the distance only to weight the loss by it; where the stage does not ask for that, the weight is 1.
    """

    stage: grpo.GrpoSettings
    reward_model: Path | None = None
    """The export whose scores are the last of a response's rewards; None: no reward model pays."""
    _has_warned: bool = False

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, dict[str, Any]]:
        """Tokenize texts without special tokens, since the chat template prints the first token."""
        if isinstance(prompts[0], str):
            return self._tokenizer(prompts, add_special_tokens=False)["input_ids"], None, {}
        tokenized = super()._tokenize_prompts(prompts)
        longest = max(range(len(prompts)), key=lambda place: len(tokenized[0][place]))
        if self.tools and len(tokenized[0][longest]) > self.stage.longest_prompt:
            raise UserError(
                f"environment {self._batch_environments[longest]}: with what reset() adds, a prompt has "
                f"{len(tokenized[0][longest])} tokens, but max_total_sequence_length less max_new_tokens leaves "
                f"{self.stage.longest_prompt}; raise policy.max_total_sequence_length, or let reset() add less"
            )
        return tokenized

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Sample by the stage's settings alone."""
        with sampled_by_arguments(self.model):
            return super()._generate_single_turn(*arguments, **options)

    def _tool_call_loop(self, prompts: list[Any], *arguments: Any) -> tuple[Any, ...]:
        """Leave responses in environments without tools as one message, even if they look like calls."""
        _, responses, completions, *_ = arguments
        for name, ids, completion in zip(self._batch_environments, responses, completions, strict=True):
            if not self._env_tools[name]:
                completion[0] = {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
        return super()._tool_call_loop(prompts, *arguments)

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        started = time.monotonic()
        rewards = super()._calculate_rewards(*arguments)
        self._metrics["train"][grpo.REWARD_SECONDS].append(time.monotonic() - started)
        if self.reward_model is not None:
            self._leave_out_unscored(rewards)
        return rewards

    def _leave_out_unscored(self, rewards: torch.Tensor) -> None:
        """Let responses whose score by the reward model is no number teach nothing, and count them.

        `rewards` are those of all processes, responses x rewards, and are changed: a response with no reward but NaN is
        left out of its group by TRL. UserError where the reward model scores none of a step's responses.
        """
        is_unscored = ~rewards[:, -1].isfinite()
        unscored, count = int(is_unscored.sum()), len(rewards)
        if unscored == count:
            raise UserError(
                f"reward_model: none of the step's {count} responses got a score that is a number from the model "
                f"{self.reward_model} (nan or infinite); its weights or its precision are at fault, so score with "
                "another one"
            )
        rewards[is_unscored] = torch.nan
        share = unscored / count
        by_environment = self._pending_metrics.get(grpo.UNJUDGED, [0.0])
        self._pending_metrics[grpo.UNJUDGED] = [min(1.0, value + share) for value in by_environment]
        if unscored and not self._has_warned and self.accelerator.is_main_process:
            self._has_warned = True
            warn(
                f"reward_model: {unscored} of the step's {count} responses got no score that is a number from the "
                f"model {self.reward_model} (nan or infinite), and teach nothing; each step's share is in the metrics "
                "(unjudged_share)"
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started = time.monotonic()
        output = super()._generate_and_score_completions(inputs)
        self._metrics["train"][grpo.ROLLOUT_SECONDS].append(time.monotonic() - started)
        if self.stage.grpo.use_leave_one_out_baseline:
            normalize = self.stage.grpo.normalize_rewards
            output["advantages"] = leave_one_out(output["advantages"], self.num_generations, normalize)
        if self.use_vllm:
            sampled = output["completion_mask"] * output.get("tool_mask", 1)
            measured = mismatch(output["old_per_token_logps"], output["sampling_per_token_logps"], sampled)
            for name, value in measured.items():
                self._metrics["train"][name].append(value)
            if not self.stage.loss_fn.use_importance_sampling_correction:
                output["importance_sampling_ratio"] = torch.ones_like(output["importance_sampling_ratio"])
        return output


def leave_one_out(rewards: torch.Tensor, group_size: int, normalize: bool) -> torch.Tensor:
    """Subtract from each reward the mean of the rest of its group, and divide by their deviation unless 0.

    NeMo-RL's formula; centred rewards give the same result.
    """
    groups, others = rewards.double().view(-1, group_size), group_size - 1
    mean = (groups.sum(1, keepdim=True) - groups) / others
    advantages = groups - mean
    if normalize and others > 1:
        squares = (groups.square().sum(1, keepdim=True) - groups.square()) / others
        deviation = ((squares - mean.square()).clamp(min=0) * others / (others - 1)).sqrt()
        advantages = torch.where(deviation > 1e-6, advantages / (deviation + 1e-6), advantages)
    return advantages.view(-1).to(rewards.dtype)


def mismatch(trainer: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return NeMo-RL's measures of the distance between trainer and sampler, by their columns' names.

    Log-probabilities of the sampled tokens and the mask are responses x tokens. Tokens without a log-probability of
    vLLM's (nan) do not count; the result is empty where no token counts.
    """
    log_ratio = (trainer - sampler)[mask.bool() & ~sampler.isnan()].double()
    if not log_ratio.numel():
        return {}
    ratio = log_ratio.exp()
    measures = (log_ratio.abs().exp(), ratio - log_ratio - 1, ratio)
    return {name: values.mean().item() for name, values in zip(grpo.MISMATCH, measures, strict=True)}


class StageReader:
    """Read the completions of a stage as its verifiers do: with the thoughts that the prompt began and their marks."""

    def __init__(self, processor: Any, config: grpo.GrpoSettings) -> None:
        self.told = config.thoughts
        self._reader = ResponseReader(processor, self.told)
        self._processor, self._variables = processor, config.policy.tokenizer.chat_template_kwargs

    def read(self, row: dict[str, Any], prompt: Any, completion: str, ids: list[int]) -> str:
        """Return the text of a completion of one message; `ids` are its tokens, `prompt` is a text or messages."""
        if self._reader.keeps_special_tokens:
            completion = self._reader.decode(ids)
        if not isinstance(prompt, str):
            prompt = render_prompt(row, self._processor, **self._variables)
        return self._reader.whole(prompt, completion)


def environment_reward(
    group_size: int, split: Path | None = None, reader: StageReader | None = None
) -> Callable[..., list[float]]:
    """Return a TRL reward function: environments reward the `group_size` completions of a prompt together.

    The function takes a step's completions (of this rank), their rows as JSON and the rows' lines in `split`; `reader`
    reads completions of one message. Logged are each group's mean reward under its environment's name and each
    response's own metrics (TRL averages both over all ranks), the share of responses whose thoughts do not end, and the
    share of responses that could not be judged, with a warning at the first.
    """
    told = reader.told if reader else None
    warned: list[str] = []

    def reward(
        completions: list[Completion],
        row: list[str],
        log_metric: Callable[[str, float], None],
        line: Sequence[int] = (),
        environments: Sequence[Any] = (),
        prompts: Sequence[Any] = (),
        completion_ids: Sequence[list[int]] = (),
        **_: Any,
    ) -> list[float]:
        episodes = environments or [None] * len(row)
        responses = [_response(*given) for given in zip(completions, episodes, strict=True)]
        starts = range(0, len(row), group_size)
        fields = {start: json.loads(row[start]) for start in starts}
        if reader is not None:
            given = zip(responses, prompts, completion_ids, strict=True)
            responses = [
                response
                if isinstance(response, EpisodeResponse)
                else reader.read(fields[place - place % group_size], prompt, response, ids)
                for place, (response, prompt, ids) in enumerate(given)
            ]
        groups = [(fields[start], responses[start : start + group_size]) for start in starts]
        places = [f"{split}:{line[start]}" for start in starts] if line else ()
        rewards = reward_groups(groups, places, told=told)
        for (asked, given), group in zip(groups, rewards, strict=True):
            name = asked["agent_ref"]["name"]
            log_metric(f"{grpo.ENVIRONMENT_PREFIX}{name}", sum(group) / len(group))
            for metric, value in (each for response in given for each in own_metrics(asked, response, told).items()):
                log_metric(f"{grpo.METRIC_PREFIX}{name}: {metric}", value)
        values = [value for group in rewards for value in group]
        log_metric(grpo.UNFINISHED, unfinished_share(values))
        unjudged = [
            f"{split}:{line[place] if line else '?'}: {value.why}"
            for place, value in enumerate(values)
            if isinstance(value, Unjudged)
        ]
        log_metric(grpo.UNJUDGED, len(unjudged) / len(values))
        if unjudged and not warned:
            warned.extend(unjudged)
            warn(
                f"{len(unjudged)} of the step's {len(values)} responses could not be judged and earn 0, the first, to "
                f"{unjudged[0]}; each step's share is in the metrics (unjudged_share)"
            )
        return values

    return reward


def _response(completion: Completion, episode: Any) -> str:
    """Return the rewarded text of a completion, a list of messages for a prompt of messages."""
    if isinstance(episode, Episode):
        return episode_response(completion, episode)
    return completion if isinstance(completion, str) else completion[0]["content"]


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


def rewards_of(
    job: TrainingJob, in_messages: bool, processor: Any
) -> tuple[list[Callable[..., Any]], list[Any], list[float]]:
    """Return a stage's rewards, the tokenizers of reward models among them (else None), and the weights.

    `in_messages`: TRL has prompts and responses as messages, and renders them itself. `processor` is the policy's.
    """
    config, folder = job.config, job.roles.get(grpo.REWARD_MODEL)
    reader = StageReader(processor, config)
    by_environment = environment_reward(config.grpo.num_generations_per_prompt, job.train_split, reader)
    if folder is None:
        return [by_environment], [None], [1.0]
    model, tokenizer = load_model(folder, getattr(torch, config.policy.precision)), load_processor(folder)
    reads = tokenizer if in_messages else EndedTexts(tokenizer, **config.policy.tokenizer.chat_template_kwargs)
    weights = config.grpo.reward_weights
    rewards = [(by_environment, None, weights.environment), (model, reads, weights.reward_model)]
    functions, readers, shares = zip(*(each for each in rewards if each[2]), strict=True)
    return list(functions), list(readers), list(shares)
