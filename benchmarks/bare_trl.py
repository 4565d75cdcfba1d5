"""SFT, DPO and GRPO by TRL alone, as a script of one's own would do it: what benchmarks/beside_trl.py compares with.

    python benchmarks/bare_trl.py grpo MODEL SPLIT.jsonl OUTPUT     (or by torchrun, in several processes)

Only the verifiers of GRPO are Stagecoach's.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.beside_trl import BATCH, GENERATIONS, LENGTH, LR, NEW_TOKENS, SAVE_PERIOD, STEPS
from scripts.rewards.registry import reward_groups
from scripts.rows.examples import preference_of
from scripts.rows.prompts import prompt_of

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
THREADS = int(os.environ["OMP_NUM_THREADS"])


class Steps(TrainerCallback):
    """Prints every step's end, as Stagecoach does."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Print the step that was logged."""
        if "loss" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}/{STEPS} {logs['num_tokens']:.0f} tokens", flush=True)


def arguments(algorithm: str, output: str) -> dict[str, Any]:
    """The options that the three trainers share."""
    return {
        "output_dir": output,
        "per_device_train_batch_size": BATCH[algorithm] // PROCESSES,
        "max_steps": STEPS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_steps": SAVE_PERIOD,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }


def reward(completions: list[Any], row: list[str], **_: Any) -> list[float]:
    """Stagecoach's verifiers, for groups of completions of one prompt."""
    texts = [completion[0]["content"] for completion in completions]
    groups = [(json.loads(row[start]), texts[start : start + GENERATIONS]) for start in range(0, len(row), GENERATIONS)]
    return [value for group in reward_groups(groups) for value in group]


def trainer_of(algorithm: str, model: str, split: str, output: str) -> Any:
    """TRL's trainer, with rows as conversations that TRL tokenises."""
    lines = Path(split).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    shared = {"model": model, "processing_class": AutoTokenizer.from_pretrained(model)}
    in_order = {"train_sampling_strategy": "sequential"}
    if algorithm == "sft":
        data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        options = SFTConfig(max_length=LENGTH, shuffle_dataset=False, **in_order, **arguments(algorithm, output))
        return SFTTrainer(args=options, train_dataset=Dataset.from_list(data), **shared)
    if algorithm == "dpo":
        pairs = [preference_of(row) for row in rows]
        data = [{"prompt": pair.prompt, "chosen": pair.answers[0], "rejected": pair.answers[1]} for pair in pairs]
        options = DPOConfig(max_length=LENGTH, beta=0.05, **in_order, **arguments(algorithm, output))
        return DPOTrainer(args=options, train_dataset=Dataset.from_list(data), **shared)
    data = [{"prompt": prompt_of(row), "row": line} for row, line in zip(rows, lines, strict=True)]
    options = GRPOConfig(
        num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS,
        epsilon_high=0.28,
        shuffle_dataset=False,
        remove_unused_columns=False,
        **arguments(algorithm, output),
    )
    return GRPOTrainer(args=options, train_dataset=Dataset.from_list(data), reward_funcs=[reward], **shared)


def main() -> None:
    """Train."""
    torch.set_num_threads(THREADS)
    trainer = trainer_of(*sys.argv[1:])
    torch.set_num_threads(THREADS)
    trainer.add_callback(Steps())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
