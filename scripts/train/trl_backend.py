"""Backend `trl`: train with TRL's SFTTrainer and GRPOTrainer, on the CPU.

A GPU is left alone where there is one, so that a tiny model's weights do not depend on the machine. On one node this
process trains; on several, one process a node does (`scripts.train.trl_cluster`), each with an equal part of every
step's rows, and they keep equal weights.
"""

import json
import shutil
import time
import warnings
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments, set_seed
from transformers import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from scripts.data.prompts import render_prompt
from scripts.data.rows import read_rows
from scripts.errors import UserError
from scripts.files import sha256_text
from scripts.recipe.judges import Judges
from scripts.rewards.judge import Panel
from scripts.rewards.registry import reward_groups
from scripts.train.backend import TrainingJob
from scripts.train.ranks import as_rank_0_says, rank, wait_for_all_ranks, world_size
from scripts.train.retention import prune_checkpoints
from scripts.train.rundir import seal_checkpoint
from scripts.train.scratch import make_model, make_tokenizer

ENVIRONMENT_PREFIX = "environment/"
UNREAD_VERDICTS = "judge/unread"
LOG_NAMES = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_share",
    "kl": "kl",
    "completions/mean_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "completions/clipped_ratio": "truncation_rate",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    UNREAD_VERDICTS: "judge_unread_share",
}


def train(job: TrainingJob) -> None:
    """Train a stage in this process, from its model (or its newest checkpoint) to the planned step."""
    if job.nodes != 1:
        raise UserError(f"{job.stage}: {job.nodes} nodes need a Ray cluster (scripts.train.trl_cluster)")
    train_rank(job)


def train_rank(job: TrainingJob) -> None:
    """Train a stage as one of `job.nodes` ranks; torch.distributed is up where there are several."""
    if world_size() != job.nodes:
        raise ValueError(f"{job.stage} is to train on {job.nodes} nodes, but {world_size()} ranks are up")
    _check_release(job.config["release"])
    torch.set_num_threads(job.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _remove_half_saved(job)
    trainer = {"sft": _sft_trainer, "grpo": _grpo_trainer}[job.config["algorithm"]](job)
    trainer.create_model_card = lambda *arguments, **options: None
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback", "RichProgressCallback"):
            trainer.remove_callback(callback)
    torch.set_num_threads(job.threads)  # accelerate may have set its own
    _seed_where_no_state_was_saved(job)
    try:
        trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)
        wait_for_all_ranks()  # each still looks into the directory that rank 0 removes
    except Exception as error:
        if "No space left on device" in str(error) or shutil.disk_usage(job.run).free == 0:
            raise UserError(
                f"{job.run}: the disk is full; make room and start again: training resumes from the newest checkpoint"
            ) from error
        raise
    finally:
        _remove_half_saved(job)


def _remove_half_saved(job: TrainingJob) -> None:
    if rank() == 0:
        shutil.rmtree(job.run / "saving", ignore_errors=True)


def _seed_where_no_state_was_saved(job: TrainingJob) -> None:
    """Seed a rank that the checkpoint does not know, having been made on fewer nodes (or one, or several).

    The checkpoint's own states replace the seed where it has them; without either, the rank would repeat the random
    numbers of its first steps.
    """
    if job.resume_from and not (job.resume_from / _rng_files(job.nodes)[rank()]).exists():
        set_seed(int(sha256_text(f"{job.config['seed']} {job.resume_from.name} {rank()}")[:8], 16))


def _rng_files(nodes: int) -> list[str]:
    """The names under which Trainer saves each rank's random state."""
    return [f"rng_state_{number}.pth" for number in range(nodes)] if nodes > 1 else ["rng_state.pth"]


def _check_release(release: dict[str, str]) -> None:
    for package, pinned in release.items():
        installed = version(package).split("+")[0]
        if installed != pinned:
            raise UserError(
                f"{package} {installed} is installed, but this stage is pinned to {pinned} (envs/trl.txt); "
                "install the pinned requirements: make setup"
            )


def _arguments(job: TrainingJob) -> dict[str, Any]:
    """Training arguments that both trainers share."""
    optimizer = job.config["policy"]["optimizer"]
    return {
        "output_dir": str(job.run / "saving"),
        "max_steps": job.max_num_steps,
        "learning_rate": optimizer["lr"],
        "lr_scheduler_type": optimizer["schedule"] if optimizer["schedule"] == "cosine" else "constant_with_warmup",
        "warmup_steps": optimizer["lr_warmup_iters"],
        "weight_decay": optimizer["weight_decay"],
        "adam_beta1": optimizer["adam_beta1"],
        "adam_beta2": optimizer["adam_beta2"],
        "max_grad_norm": optimizer["clip_grad"],
        "seed": job.config["seed"],
        "data_seed": job.config["seed"],
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "save_strategy": "steps",
        "save_steps": job.checkpointing.save_period,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level_replica": "error",
        # Also keeps DDP from regrouping gradients after the first step, which would round a resumed step otherwise.
        "ddp_find_unused_parameters": True,
    }


def _sft_trainer(job: TrainingJob) -> SFTTrainer:
    policy = job.config["policy"]
    batch = policy["train_global_batch_size"]
    model, tokenizer = _model_and_tokenizer(job)
    rows = _rows(job, job.max_num_steps * batch)
    tokenized = _tokenize(rows, tokenizer, policy["max_total_sequence_length"])
    if job.nodes > 1:
        tokenized = _fill_last_batch(tokenized, batch)
    arguments = SFTConfig(
        per_device_train_batch_size=batch // job.nodes,
        train_sampling_strategy="sequential",
        shuffle_dataset=False,
        max_length=policy["max_total_sequence_length"],
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        model_init_kwargs={"dtype": "float32"} if isinstance(model, str) else None,
        **_arguments(job),
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(tokenized),
        processing_class=tokenizer,
        callbacks=[_StageCallback(job)],
    )


def _tokenize(rows: list[dict[str, Any]], tokenizer: Any, max_length: int) -> list[dict[str, list[int]]]:
    """Token ids and labels of demonstrations; only the last message, the assistant's, is learnt."""
    prompts = [row["messages"][:-1] for row in rows]
    prompt_texts = [tokenizer.apply_chat_template(it, tokenize=False, add_generation_prompt=True) for it in prompts]
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    prompt_ids = tokenizer(prompt_texts, add_special_tokens=False)["input_ids"]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [
        {"input_ids": full[:max_length], "labels": ([-100] * len(prompt) + full[len(prompt) :])[:max_length]}
        for prompt, full in zip(prompt_ids, ids, strict=True)
    ]


def _fill_last_batch(tokenized: list[dict[str, list[int]]], batch: int) -> list[dict[str, list[int]]]:
    """The rows, and as many of which nothing is learnt as the last batch lacks to be shared evenly.

    Without them the first rows of the split would be learnt twice an epoch, as one process never does.
    """
    filler = {"input_ids": tokenized[0]["input_ids"][:1], "labels": [-100]}
    return tokenized + [filler] * (-len(tokenized) % batch)


def _grpo_trainer(job: TrainingJob) -> GRPOTrainer:
    grpo, loss, policy = job.config["grpo"], job.config["loss_fn"], job.config["policy"]
    model, tokenizer = _model_and_tokenizer(job)
    rows = _rows(job, job.max_num_steps * grpo["num_prompts_per_step"])
    longest_prompt = policy["max_total_sequence_length"] - policy["generation"]["max_new_tokens"]
    prompts = [render_prompt(row, tokenizer) for row in rows]
    for number, ids in enumerate(tokenizer(prompts)["input_ids"], start=1):
        if len(ids) > longest_prompt:
            raise UserError(
                f"{job.train_split}:{number}: the prompt has {len(ids)} tokens, but max_total_sequence_length less "
                f"max_new_tokens leaves {longest_prompt}; raise policy.max_total_sequence_length or drop the row"
            )
    arguments = GRPOConfig(
        per_device_train_batch_size=grpo["num_prompts_per_step"] // job.nodes * grpo["num_generations_per_prompt"],
        num_generations=grpo["num_generations_per_prompt"],
        max_completion_length=policy["generation"]["max_new_tokens"],
        temperature=policy["generation"]["temperature"],
        top_p=policy["generation"]["top_p"],
        beta=loss["reference_policy_kl_penalty"],
        epsilon=loss["ratio_clip_min"],
        epsilon_high=loss["ratio_clip_max"],
        loss_type="dapo",
        scale_rewards="group" if grpo["normalize_rewards"] else "none",
        mask_truncated_completions=grpo["overlong_filtering"],
        num_iterations=1,
        shuffle_dataset=False,
        remove_unused_columns=False,
        model_init_kwargs={"dtype": "float32"},
        **_arguments(job),
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=[environment_reward(grpo["num_generations_per_prompt"], _panel(job))],
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt, "row": json.dumps(row)} for prompt, row in zip(prompts, rows, strict=True)]
        ),
        processing_class=tokenizer,
        callbacks=[_StageCallback(job)],
    )


def _panel(job: TrainingJob) -> Panel | None:
    settings = job.config.get("judges")
    return Panel(Judges.model_validate(settings), job.judge_servers) if settings else None


def environment_reward(group_size: int, panel: Panel | None = None) -> Callable[..., list[float]]:
    """A TRL reward function: each `group_size` completions, one prompt's, are rewarded by their environment together.

    It takes a step's completions (of this rank) and their rows as JSON, and logs each group's mean reward under the
    name of its environment; TRL averages what is logged over the groups of all ranks. Of the judges' answers it logs
    the share that could not be read.
    """

    def reward(
        completions: list[str], row: list[str], log_metric: Callable[[str, float], None], **_: Any
    ) -> list[float]:
        groups = [
            (json.loads(row[start]), completions[start : start + group_size])
            for start in range(0, len(row), group_size)
        ]
        rewards = reward_groups(groups, panel)
        for (fields, _), group in zip(groups, rewards, strict=True):
            log_metric(f"{ENVIRONMENT_PREFIX}{fields['agent_ref']['name']}", sum(group) / len(group))
        if panel is not None and (share := panel.unread_share()) is not None:
            log_metric(UNREAD_VERDICTS, share)
        return [value for group in rewards for value in group]

    return reward


def _model_and_tokenizer(job: TrainingJob) -> tuple[Any, PreTrainedTokenizerFast]:
    """The model to start from (a path, or a fresh model for a stage without a parent) and its tokenizer."""
    if job.parent_model is None:
        tokenizer = make_tokenizer()
        return make_model(job.config, tokenizer), tokenizer
    return str(job.parent_model), AutoTokenizer.from_pretrained(job.parent_model, local_files_only=True)


def _rows(job: TrainingJob, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of the training split in file order; the whole split when it has fewer."""
    return [row for _, _, row in islice(read_rows(job.train_split), count)]


class _StageCallback(TrainerCallback):
    """Logs every step, says where the stage stands, and seals checkpoints once they are whole; all on rank 0 alone.

    Rank 0 also decides for all when to stop.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.log_path = job.run / "metrics.jsonl"
        self.started = self.step_started = time.monotonic()
        self.first_step = 0
        self.saving_since = 0.0
        self.step_seconds: deque[float] = deque(maxlen=20)
        self.save_seconds: deque[float] = deque(maxlen=20)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        if rank() == 0 and self.log_path.exists() and not self.log_path.read_bytes().endswith(b"\n"):
            with self.log_path.open("ab") as file:  # a kill cut the last line; what follows must not join it
                file.write(b"\n")

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.step_started = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        self.step_seconds.append(time.monotonic() - self.step_started)
        if state.global_step == self.job.max_num_steps:
            control.should_save = True
        elif as_rank_0_says(rank() == 0 and self._stop_is_due()):
            control.should_save = control.should_training_stop = True
        self.saving_since = time.monotonic()

    def _stop_is_due(self) -> bool:
        """Asked with the longest of the last steps and saves; an unknown save is taken to last a step."""
        longest_step = max(self.step_seconds)
        return self.job.stop.is_due(longest_step, max(self.save_seconds, default=longest_step))

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs or rank() != 0:
            return
        now = time.monotonic()
        entry: dict[str, Any] = {"step": state.global_step, "seconds": now - self.step_started}
        entry |= {ours: logs[theirs] for theirs, ours in LOG_NAMES.items() if theirs in logs}
        entry["environment_rewards"] = {
            key.removeprefix(ENVIRONMENT_PREFIX): value
            for key, value in logs.items()
            if key.startswith(ENVIRONMENT_PREFIX)
        }
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        done = state.global_step - self.first_step
        left = (now - self.started) / done * (self.job.max_num_steps - state.global_step)
        if state.global_step % max(1, self.job.max_num_steps // 20) == 0 or left == 0:
            print(f"{self.job.stage}: {_progress(entry, self.job.max_num_steps, left)}", flush=True)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        wait_for_all_ranks()
        if rank() != 0:
            return
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for name in _rng_files(self.job.nodes):
            _wait_for(saved / name)
        seal_checkpoint(saved, self.job.run, state.global_step)
        self.save_seconds.append(time.monotonic() - self.saving_since)
        prune_checkpoints(self.job.run, self.job.checkpointing)


def _wait_for(file: Path, seconds: float = 90) -> None:
    """Wait until this host sees a file that another has written; shared file systems may take half a minute."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{file}: not seen after {seconds:.0f} s; results/ must be shared by all nodes of a stage")
        time.sleep(0.5)


def _progress(entry: dict[str, Any], last: int, left: float) -> str:
    parts = [f"step {entry['step']}/{last}"]
    if entry.get("reward_mean") is not None:
        parts.append(f"reward {entry['reward_mean']:.3f} ± {entry['reward_std']:.3f}")
        parts.append(f"length {entry['response_length_mean']:.1f}")
    else:
        parts.append(f"loss {entry['loss']:.3f}")
    parts += [f"{entry['seconds']:.2f} s/step", f"{left:.0f} s left"]
    return ", ".join(parts)
