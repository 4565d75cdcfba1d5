"""How rollouts are sampled: TRL's options, and where a response ends."""

from functools import partial
from typing import Any

from trl import GRPOTrainer

from scripts.backends.trl.training import GrpoConfig
from scripts.evaluate.generate import ResponseEnds


def sampling_arguments(config: GrpoConfig, accelerator: str) -> dict[str, Any]:
    """TRL's options, by which both samplers go, for a stage of this resolved config."""
    generation = config.policy.generation
    cache = {"max_memory_percent": 0.05} if accelerator == "cpu" else None  # of a node's memory; TRL's 0.5 of a GPU's
    more: dict[str, Any] = {}
    if generation.stop_strings:
        more |= (
            {"stop": generation.stop_strings, "skip_special_tokens": False}
            if config.samples_by_vllm
            else {"stop_strings": generation.stop_strings}
        )
    if generation.stop_token_ids and config.samples_by_vllm:
        more["stop_token_ids"] = generation.stop_token_ids
    return {
        "max_completion_length": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k or 0,
        "min_p": generation.min_p,
        "use_transformers_continuous_batching": generation.paged,
        "transformers_continuous_batching_config": cache if generation.paged else None,
        "generation_kwargs": more or None,
        "max_tool_calling_iterations": generation.max_tool_calling_iterations,
        "chat_template_kwargs": config.policy.tokenizer.chat_template_kwargs or None,
    }


def end_responses(trainer: GRPOTrainer, config: GrpoConfig) -> ResponseEnds:
    """Let the trainer's sampler end responses where the stage says so besides the model's own end tokens."""
    generation, tokenizer = config.policy.generation, trainer._tokenizer
    trainer.eos_token_ids = [*trainer.eos_token_ids, *generation.stop_token_ids]
    if not config.samples_by_vllm:
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
        if generation.stop_strings:
            trainer.model.generate = partial(trainer.model.generate, tokenizer=tokenizer)
    return ResponseEnds(tokenizer, {*trainer.eos_token_ids, tokenizer.pad_token_id}, generation.stop_strings)
