"""Group relative policy optimisation by TRL's GRPOTrainer, with rollouts by the model or by vLLM.

vLLM runs in the trainer's process. TRL gives the engine the trained weights before each step's rollouts, also after a
resume.
"""

import json
import logging
import math
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer as trl_grpo
from trl.trainer.utils import split_tensor_dict

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.grpo import REWARD_MODEL
from scripts.backends.trl.measuring import MeasuringTrainer, rewards_of
from scripts.backends.trl.setup import shared_arguments, shares_of, start_and_rows
from scripts.backends.trl.skipping import split_by_length
from scripts.errors import UserError
from scripts.evaluate.turns import prepare_for_tools
from scripts.model.generate import spare_head
from scripts.rewards.registry import environment_factory
from scripts.rows.prompts import open_picture, pictures_of, prompt_of

ONE_MESSAGE = ""


def make_trainer(job: TrainingJob) -> GRPOTrainer:
    """Make the trainer of GRPO on prompts in the order of the job."""
    start, rows = start_and_rows(job)
    factories = {name: factory for name in job.environments if (factory := environment_factory(name))}
    if factories:
        prepare_for_tools(start["processing_class"])
        factories[ONE_MESSAGE] = OneMessage
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    train_dataset = _with_tools(rows) if factories else with_pictures(rows, job.train_split)
    rewards, readers, weights = rewards_of(
        job, in_messages=train_dataset is not rows, processor=start["processing_class"]
    )
    trainer = MeasuringTrainer(
        reward_funcs=rewards,
        reward_processing_classes=readers,
        args=_arguments(job, weights),
        train_dataset=train_dataset,
        environment_factory=factories or None,
        **start,
    )
    if REWARD_MODEL in job.roles:
        trainer.reward_func_names[len(weights) - 1] = REWARD_MODEL
        trainer.reward_model = job.roles[REWARD_MODEL]
    trainer.stage = job.config
    by_length = partial(split_by_length, updates=job.config.updates_per_step)
    trl_grpo.split_tensor_dict = by_length if job.config.policy.skip_padding else split_tensor_dict
    set_sampler(trainer, job)
    return trainer


def set_sampler(trainer: Any, job: TrainingJob) -> None:
    """Let responses end at the stage's tokens too, and the sampler draw by the stage's seed."""
    trainer.eos_token_ids = [*trainer.eos_token_ids, *job.config.policy.generation.stop_token_ids]
    SETTING_UP[job.config.policy.generation.backend](trainer, job)


def set_transformers(trainer: Any, job: TrainingJob) -> None:
    """Let the trained model compute no more logits than it samples from, and end at the trainer's tokens."""
    spare_head(trainer.model)
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids


def set_vllm(trainer: Any, job: TrainingJob) -> None:
    """Let the engine load the weights of every step, and draw by the stage's seed."""
    if job.accelerator == "cpu":
        load_by_reload(trainer.vllm_generation)
    set_seed(job.config.seed)  # the engine has seeded what it draws from, always alike


SETTING_UP = {"transformers": set_transformers, "vllm": set_vllm}
"""What readies a trainer's sampler, by the sampler's name."""


def with_pictures(rows: Dataset, split: Path) -> Dataset:
    """Return the rows; if they show pictures, with messages and images, made on request, as TRL takes them."""
    has_pictures = rows.data.column("has_pictures")
    if not pc.any(has_pictures).as_py():
        return rows
    without = pc.index(has_pictures, False).as_py()
    if without >= 0:
        line = rows.data.column("line")[without]  # the table's rows are in file order, whatever the order of training
        raise UserError(
            f"{split}:{line}: shows no picture, but other rows do, which TRL cannot mix; "
            "give them a blend and a stage of their own"
        )

    def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        prompts = [prompt_of(json.loads(text)) for text in batch["row"]]
        images = [[open_picture(uri) for uri in pictures_of(prompt)] for prompt in prompts]
        for message in chain.from_iterable(prompts):
            for part in message["content"] if isinstance(message["content"], list) else ():
                part.pop("image", None)  # TRL fills in a row's images in order
        return batch | {"prompt": prompts, "images": images}

    return rows.with_transform(made)


class OneMessage:
    """TRL's environment for rows whose environment has no tools."""

    def reset(self, **_: Any) -> None:
        """Add nothing to the prompt."""


def _with_tools(rows: Dataset) -> Dataset:
    """Return the rows with messages and the environment's name, as TRL takes rows with tools."""

    def made(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        fields = [json.loads(text) for text in batch["row"]]
        names = [row["agent_ref"]["name"] for row in fields]
        environments = [name if environment_factory(name) else ONE_MESSAGE for name in names]
        return batch | {"prompt": list(map(prompt_of, fields)), "environment": environments}

    return rows.with_transform(made)


def _arguments(job: TrainingJob, reward_weights: list[float]) -> GRPOConfig:
    grpo, loss = job.config.grpo, job.config.loss_fn
    level = "sequence" if loss.sequence_level_importance_ratios else "token"
    is_scaled_by_trl = grpo.normalize_rewards and not grpo.use_leave_one_out_baseline
    return GRPOConfig(
        steps_per_generation=job.config.updates_per_step * shares_of(job)[1],
        num_generations=grpo.num_generations_per_prompt,
        beta=loss.reference_policy_kl_penalty,
        epsilon=loss.ratio_clip_min,
        epsilon_high=loss.ratio_clip_max,
        delta=loss.ratio_clip_c,
        importance_sampling_level=level,
        loss_type="dapo" if loss.token_level_loss else "grpo",
        scale_rewards="group" if is_scaled_by_trl else "none",
        reward_weights=reward_weights,
        multi_objective_aggregation=grpo.multi_objective_aggregation,
        mask_truncated_completions=grpo.overlong_filtering,
        vllm_importance_sampling_mode=f"{level}_truncate",
        vllm_importance_sampling_clip_max=loss.truncated_importance_sampling_ratio or math.inf,
        **sampling_arguments(job),
        **shared_arguments(job),
    )


def sampling_arguments(job: TrainingJob) -> dict[str, Any]:
    """Return TRL's options for sampling responses to prompts in the order of the rows."""
    generation = job.config.policy.generation
    return dict(
        shuffle_dataset=False,
        max_completion_length=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
        max_tool_calling_iterations=generation.max_tool_calling_iterations,
        chat_template_kwargs=job.config.policy.tokenizer.chat_template_kwargs or None,
        **OPTIONS[generation.backend](job),
    )


def transformers_arguments(job: TrainingJob) -> dict[str, Any]:
    """Return no more options of TRL."""
    return {}


NEUTRAL_DEFAULTS = "vllm"
"""vLLM's word for its own defaults instead of generation_config.json's, whose end tokens count all the same."""
ENGINE_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def vllm_arguments(job: TrainingJob) -> dict[str, Any]:
    """Return TRL's options for rollouts by vLLM; set vLLM's variables, unless the site does, and log errors alone."""
    os.environ.update(ENGINE_SETTINGS | os.environ)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    config, cfg = job.config, job.settings.policy.generation.vllm_cfg
    eager = {"enforce_eager": True} if job.accelerator == "cpu" else {}
    vllm_generation.LLM = partial(vllm_generation.LLM, generation_config=NEUTRAL_DEFAULTS, **eager)
    ends = config.policy.generation.stop_token_ids
    return {
        "generation_kwargs": {"stop_token_ids": ends} if ends else None,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": config.policy.max_total_sequence_length,
        "vllm_tensor_parallel_size": cfg.tensor_parallel_size,
        "vllm_gpu_memory_utilization": cfg.gpu_memory_utilization or 0.3,
        "vllm_enable_sleep_mode": cfg.enable_sleep_mode,
    }


OPTIONS = {"transformers": transformers_arguments, "vllm": vllm_arguments}
"""TRL's further options, by the sampler's name."""


def load_by_reload(generation: VLLMGeneration) -> None:
    """Let a colocated engine on a CPU, with packed copies of its weights, load weights as a checkpoint's.

    vLLM leaves the packed copy of tied embeddings as before, so the copy is made again.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: PLC0415

    def load() -> None:
        runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=generation._iter_named_params())
        for layer in runner.get_model().modules():
            if isinstance(layer, VocabParallelEmbedding):
                layer.quant_method.process_weights_after_loading(layer)
        generation.llm.reset_prefix_cache()

    generation.sync_weights = load
