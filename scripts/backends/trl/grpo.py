"""Group relative policy optimisation, by TRL's GRPOTrainer; each group is rewarded by its row's environment."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.callback import ENVIRONMENT_PREFIX, REWARD_SECONDS, UNJUDGED, UnjudgedAlarm
from scripts.backends.trl.grpo_trainer import LeaveOneOutTrainer, MeasuringTrainer
from scripts.backends.trl.placing import is_served
from scripts.backends.trl.rows import training_rows
from scripts.backends.trl.sampling import end_responses, sampling_arguments
from scripts.backends.trl.setup import adapters, model_and_processor, shared_arguments, shares_of, start_options
from scripts.backends.trl.tokenization import PROMPTS, render_prompts
from scripts.backends.trl.vllm import load_by_reload, prepare_engine, vllm_arguments
from scripts.errors import UserError
from scripts.evaluate.turns import prepare_for_tools
from scripts.rewards.episode import Episode, episode_response
from scripts.rewards.registry import environment_factory, reward_groups, tool_schemas
from scripts.rewards.verdict import Unjudged
from scripts.rows.prompts import open_picture, pictures_of, prompt_of

Completion = str | list[dict[str, Any]]
ONE_MESSAGE = ""


def make_trainer(job: TrainingJob) -> GRPOTrainer:
    """The trainer of a stage of GRPO; prompts are taken in file order."""
    grpo, policy = job.config.grpo, job.config.policy
    model, processor = model_and_processor(job)
    factories = {name: factory for name in job.environments if (factory := environment_factory(name))}
    prepare = partial(
        render_prompts,
        processor=processor,
        max_length=job.config.longest_prompt,
        keep_to=job.config.data.max_input_seq_length,
        variables=policy.tokenizer.chat_template_kwargs,
        **({"tools": tool_schemas(factories)} if factories else {}),
    )
    rows = training_rows(job, job.planned * grpo.num_prompts_per_step, PROMPTS, prepare)
    if factories:
        prepare_for_tools(processor)
        factories[ONE_MESSAGE] = OneMessage
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer_class = LeaveOneOutTrainer if grpo.use_leave_one_out_baseline else MeasuringTrainer
    by_vllm = job.config.samples_by_vllm
    if by_vllm:
        prepare_engine()
    trainer = trainer_class(
        model=model,
        reward_funcs=[environment_reward(grpo.num_generations_per_prompt, job.train_split)],
        args=_arguments(job),
        train_dataset=_with_tools(rows) if factories else _with_pictures(rows, job.train_split),
        processing_class=processor,
        peft_config=adapters(job),
        environment_factory=factories or None,
    )
    trainer.longest_prompt = job.config.longest_prompt
    trainer.normalize_rewards = grpo.normalize_rewards
    trainer.ends = end_responses(trainer, job.config)
    trainer.filters_overlong = grpo.overlong_filtering
    if by_vllm:
        trainer.corrects_sampling = job.config.loss_fn.use_importance_sampling_correction
        if job.accelerator == "cpu" and not is_served(job.settings):
            load_by_reload(trainer.vllm_generation)
        set_seed(job.config.seed)  # the engine has seeded what it draws from, always alike
    return trainer


def _with_pictures(rows: Dataset, split: Path) -> Dataset:
    """The rows; where they show pictures, with messages and images, as TRL takes them, made when a row is asked for."""
    has_pictures = rows.data.column("has_pictures")
    if not pc.any(has_pictures).as_py():
        return rows
    if (without := pc.index(has_pictures, False).as_py()) >= 0:
        raise UserError(
            f"{split}:{rows[without]['line']}: shows no picture, but other rows do, which TRL cannot mix; "
            "give them a blend and a stage of their own"
        )

    def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        messages = [prompt_of(json.loads(text)) for text in batch["row"]]
        return {
            "prompt": [_without_pictures(prompt) for prompt in messages],
            "images": [[open_picture(uri) for uri in pictures_of(prompt)] for prompt in messages],
            "row": batch["row"],
            "line": batch["line"],
        }

    return rows.with_transform(made)


class OneMessage:
    """The environment, for TRL, of rows whose own has no tools."""

    def reset(self, **_: Any) -> None:
        """Add nothing to the prompt."""


def _with_tools(rows: Dataset) -> Dataset:
    """The rows with messages and their environment's name, as TRL takes those of environments with tools."""

    def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        fields = [json.loads(text) for text in batch["row"]]
        names = [row["agent_ref"]["name"] for row in fields]
        return {
            "prompt": [prompt_of(row) for row in fields],
            "environment": [name if environment_factory(name) else ONE_MESSAGE for name in names],
            "row": batch["row"],
            "line": batch["line"],
        }

    return rows.with_transform(made)


def _without_pictures(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose pictures are placeholders, into which TRL puts a row's images in order."""
    return [
        message
        | {"content": [{key: value for key, value in part.items() if key != "image"} for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _arguments(job: TrainingJob) -> GRPOConfig:
    grpo, loss, policy = job.config.grpo, job.config.loss_fn, job.config.policy
    is_scaled_by_trl = grpo.normalize_rewards and not grpo.use_leave_one_out_baseline
    return GRPOConfig(
        steps_per_generation=job.config.updates_per_step * shares_of(job)[1],
        num_generations=grpo.num_generations_per_prompt,
        beta=loss.reference_policy_kl_penalty,
        epsilon=loss.ratio_clip_min,
        epsilon_high=loss.ratio_clip_max,
        delta=loss.ratio_clip_c,
        importance_sampling_level="sequence" if loss.sequence_level_importance_ratios else "token",
        loss_type="dapo" if loss.token_level_loss else "grpo",
        scale_rewards="group" if is_scaled_by_trl else "none",
        # TRL takes what ends at a text for cut; the trainer below does not.
        mask_truncated_completions=grpo.overlong_filtering and not policy.generation.stop_strings,
        num_iterations=1,
        shuffle_dataset=False,
        remove_unused_columns=False,
        model_init_kwargs=start_options(job),
        **sampling_arguments(job.config, job.accelerator),
        **(vllm_arguments(job) if job.config.samples_by_vllm else {}),
        **shared_arguments(job),
    )


def environment_reward(group_size: int, split: Path | None = None) -> Callable[..., list[float]]:
    """A TRL reward function: each `group_size` completions, one prompt's, are rewarded by their environment together.

    It takes a step's completions (of this rank), their rows as JSON and these rows' lines in `split`, and logs each
    group's mean reward under the name of its environment; TRL averages what is logged over the groups of all ranks. Of
    the rewards it logs how long they took, and of the responses the share that could not be judged, with a warning.
    """
    alarm = UnjudgedAlarm()

    def reward(
        completions: list[Completion],
        row: list[str],
        log_metric: Callable[[str, float], None],
        line: Sequence[int] = (),
        environments: Sequence[Any] = (),
        **_: Any,
    ) -> list[float]:
        episodes = environments or [None] * len(row)
        responses = [_response(*given) for given in zip(completions, episodes, strict=True)]
        starts = range(0, len(row), group_size)
        groups = [(json.loads(row[start]), responses[start : start + group_size]) for start in starts]
        started = time.monotonic()
        rewards = reward_groups(groups, [f"{split}:{line[start]}" for start in starts] if line else ())
        log_metric(REWARD_SECONDS, time.monotonic() - started)
        for (fields, _), group in zip(groups, rewards, strict=True):
            log_metric(f"{ENVIRONMENT_PREFIX}{fields['agent_ref']['name']}", sum(group) / len(group))
        values = [value for group in rewards for value in group]
        unjudged = [
            f"{split}:{line[place] if line else '?'}: {value.why}"
            for place, value in enumerate(values)
            if isinstance(value, Unjudged)
        ]
        log_metric(UNJUDGED, len(unjudged) / len(values))
        alarm.hear(unjudged, len(values))
        return values

    return reward


def _response(completion: Completion, episode: Any) -> str:
    """What is rewarded of a completion, which TRL makes messages where the prompt is some."""
    if isinstance(episode, Episode):
        return episode_response(completion, episode)
    return completion if isinstance(completion, str) else completion[0]["content"]
