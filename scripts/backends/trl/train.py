"""Train with TRL's trainers, as one of a stage's processes.

Each process has an equal part of every step's rows, and a copy or a share of the weights. The algorithm's module makes
the trainer (`TRAINERS`); resuming, the steps and the end are here.
"""

import math
import os
import shutil
import time
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import accelerate.accelerator
import torch
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed
from transformers import logging as transformers_logging

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl import setup
from scripts.backends.trl.collectives import as_rank_0_says, rank, wait_for_all_ranks, world_size
from scripts.backends.trl.grpo import BY_NAME, REWARD_SECONDS, ROLLOUT_SECONDS
from scripts.backends.trl.placing import out_of_memory
from scripts.backends.trl.skipping import skip_padding
from scripts.backends.trl.validation import Validation
from scripts.backends.trl.versions import check_versions
from scripts.errors import UserError
from scripts.evaluate.gate import refuse_divergence
from scripts.files import append_json, sha256_text
from scripts.model.finite import refuse_not_numbers
from scripts.model.loading import load_model
from scripts.python_files import see_beside
from scripts.rewards.registry import register, register_gym
from scripts.rows.chat_format import pin_date
from scripts.stage.measured import words_of
from scripts.stage.publish import DIVERGED
from scripts.stage.stopping import best_so_far, ending_in
from scripts.stage.store import prune_checkpoints

OFFLINE = "scripts.backends.trl.offline_trainers"
TRAINERS = {
    "sft": f"{OFFLINE}:make_sft_trainer",
    "dpo": f"{OFFLINE}:make_dpo_trainer",
    "mpo": f"{OFFLINE}:make_dpo_trainer",
    "kto": f"{OFFLINE}:make_kto_trainer",
    "reward": f"{OFFLINE}:make_reward_trainer",
    "grpo": "scripts.backends.trl.grpo_trainer:make_trainer",
    "distillation": "scripts.backends.trl.distillation_trainer:make_trainer",
}
"""What makes TRL's trainer of a job, by algorithm; imported when it is called, since each loads another part of TRL."""


def train_rank(job: TrainingJob, in_own_precision: bool = False) -> None:
    """Train a stage as one of `job.ranks` processes; several have torch.distributed up.

    `in_own_precision`: compute in the stage's precision even where this machine's CPU is slow in it.
    """
    try:
        _train(job if in_own_precision else setup.in_fast_precision(job))
    except Exception as error:
        if says := out_of_memory(error, job):
            raise UserError(says) from error
        if "No space left on device" in str(error) or shutil.disk_usage(job.run).free == 0:
            raise UserError(
                f"{job.run}: the disk is full; make room and start again: training resumes from the newest checkpoint"
            ) from error
        raise
    finally:
        _remove_half_saved(job)


def _train(job: TrainingJob) -> None:
    if world_size() != job.ranks:
        raise ValueError(f"{job.stage} is to train in {job.ranks} processes, but {world_size()} are up")
    check_versions(job.config.release)
    pin_date(job.config.template_date)
    see_beside(job.run.resolve())
    register(job.environments, job.config.environments)
    if getattr(job.config, "gym", None):
        register_gym(job.config.gym, job.settings.gym_servers, job.gym_python)
    torch.set_num_threads(job.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _remove_half_saved(job)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.stage_directory / "tensorboard"))
    if setup.is_sharded(job):
        accelerate.accelerator.AcceleratorState = setup.ShardingState
    make_trainer = resolve_name(TRAINERS[job.config.algorithm])
    trainer = make_trainer(job)
    setup.train_in_float32(trainer.model)
    setup.warm_up_from_first_step(trainer, job)
    skip_padding(trainer, job)
    trainer.create_model_card = lambda *arguments, **options: None
    if setup.is_sharded(job):
        setup.sample_in_step(trainer)
        trainer._save_optimizer_and_scheduler = partial(setup.save_whole, trainer)
        trainer._load_optimizer_and_scheduler = partial(setup.load_shares, trainer)
    if job.goes_on_by_config:
        setup.go_on_by_the_config(trainer, job)
    if job.resume_from:
        # Before the weights are shared out; Trainer's loading expects the model's names, which LLaVA's files have not,
        # and skips missing weights.
        if job.config.policy.lora is None:
            trainer.model.load_state_dict(load_model(job.resume_from).state_dict())
        else:
            trainer._load_from_checkpoint(str(job.resume_from))
        trainer._load_from_checkpoint = lambda *_: None
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StageCallback(job, Validation.of(trainer, job)))
    torch.set_num_threads(job.threads)  # accelerate may have set its own
    if job.resume_from and not (job.resume_from / rng_files(job.ranks)[rank()]).exists():
        # Fewer ranks saved; unseeded, this one would repeat the random numbers of its first steps.
        set_seed(int(sha256_text(f"{job.config.seed} {job.resume_from.name} {rank()}")[:8], 16))
    trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)
    wait_for_all_ranks()  # each still looks into the directory that rank 0 removes


def _remove_half_saved(job: TrainingJob) -> None:
    if rank() == 0:
        shutil.rmtree(job.run / "saving", ignore_errors=True)


class StageCallback(TrainerCallback):
    """Log each step, report progress, seal whole checkpoints and stop, decided by rank 0 for all ranks.

    A step may be several updates (TRL counts updates) and ends with the last.
    """

    def __init__(self, job: TrainingJob, validation: Validation | None = None) -> None:
        self.job, self.updates = job, job.config.updates_per_step
        self.validation = validation
        self.log_path = job.training.log
        self.started = self.step_started = time.monotonic()
        self.told = float("-inf")
        self.tokens = 0.0
        self.saving_since = 0.0
        self.step_seconds: deque[float] = deque(maxlen=20)
        self.save_seconds: deque[float] = deque(maxlen=20)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Measure the held-out rows where the stage begins, and note the attempt's start."""
        if self.validation and self.validation.is_due_at_start:
            measured = self.validation.measure()
            if rank() == 0:
                append_json(self.log_path, {"step": self.job.begun, **measured})
                told = ", ".join(words_of(measured))
                rows = measured["validation_rows"]
                print(f"{self.job.stage}: before the first step {told} ({rows} held-out rows)", flush=True)
        self.started = time.monotonic()
        self.tokens = state.num_input_tokens_seen  # what GRPO's count goes on from; the others begin at 0 again

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """End a diverging training; start the step's clock."""
        if state.global_step % self.updates == 0:
            if rank() == 0:
                step, gate = state.global_step // self.updates, self.job.settings.running_gate
                refuse_divergence(self.job.stage, gate, self.job.training, step)
            self.step_started = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint and an end at the job's last step, and when a stop is due."""
        if state.global_step % self.updates:
            return
        self.step_seconds.append(time.monotonic() - self.step_started)
        step = state.global_step // self.updates
        is_last = step == self.job.max_num_steps
        if self.job.config.stopping and self.validation and self.validation.is_regular(step):
            control.should_save = True  # the best measured checkpoint may be the one to publish
        longest_step = max(self.step_seconds) + (self.validation.seconds if self.validation else 0.0)
        longest_save = max(self.save_seconds, default=longest_step)  # an unknown one is taken to last a step
        if is_last or as_rank_0_says(rank() == 0 and self.job.stop.is_due(longest_step, longest_save)):
            control.should_save = control.should_training_stop = True
        self.saving_since = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: Any,
        control: Any,
        logs: dict[str, Any],
        model: torch.nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Add the step to the log; print progress after the first step, each twentieth, and 20 s without a line.

        Trainer's history of all steps, a part of every checkpoint, is cleared.
        """
        state.log_history.clear()
        if "loss" not in logs:
            return
        now, step = time.monotonic(), state.global_step // self.updates
        measured = self.validation.measure() if self.validation and self.validation.is_due(step) else {}
        self.saving_since = time.monotonic()
        if rank() == 0:
            self._log(logs, now, step, measured)
        self._refuse_broken_weights(logs, step, model)
        if measured and self.job.config.stopping:
            self._stop_early(step, control)

    def _refuse_broken_weights(self, logs: dict[str, Any], step: int, model: torch.nn.Module | None) -> None:
        """End the training where loss or gradient is no number, and some of this process's weights are none any more.

        Weights stay as they are where the optimizer passed such a gradient over.
        """
        figures = [float(logs[name]) for name in ("loss", "grad_norm") if name in logs]
        if all(map(math.isfinite, figures)) or model is None:
            return
        for name, parameter in model.named_parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad and not own.isfinite().all():
                told = ", ".join(f"{figure} {logs[figure]}" for figure in ("loss", "grad_norm") if figure in logs)
                raise UserError(
                    f"{self.job.stage}: diverged at step {step}: weights are no numbers any more ({name}; {told}). "
                    f"{self._remedy()}"
                )

    def _remedy(self) -> str:
        """Say what stays of a training that diverged, and what to do."""
        return f"{DIVERGED}. Its steps are in {self.log_path}, and its earlier checkpoints are kept"

    def _stop_early(self, step: int, control: Any) -> None:
        """End the training after a step where `stop_when` says so, by what rank 0 reads in the log."""
        stop_when = self.job.config.stopping
        ending = ending_in(self.job.training, stop_when, self.job.planned, step) if rank() == 0 else None
        if not as_rank_0_says(ending is not None):
            return
        control.should_save = control.should_training_stop = True
        if ending is not None and ending.last < self.job.planned:
            told = f"{stop_when.metric} has not improved in {stop_when.patience} measurements"
            best = f"best {ending.value:.4g} at step {ending.best}"
            print(f"{self.job.stage}: ends at step {step} of {self.job.planned}: {told} ({best})", flush=True)

    def _log(self, logs: dict[str, Any], now: float, step: int, measured: dict[str, Any]) -> None:
        """Add a step to the log, and print the progress."""
        entry: dict[str, Any] = {"step": step, "seconds": now - self.step_started} | measured
        entry |= {ours: logs[theirs] for theirs, ours in self.job.config.metrics.items() if theirs in logs}
        if "num_tokens" in logs:
            entry["tokens"], self.tokens = logs["num_tokens"] - self.tokens, logs["num_tokens"]
        is_filtered = getattr(self.job.config.section, "overlong_filtering", None)
        if is_filtered is not None:
            entry["masked_share"] = entry.get("truncation_rate") if is_filtered else 0.0
        for column, prefix in BY_NAME.items():
            entry[column] = {key.removeprefix(prefix): value for key, value in logs.items() if key.startswith(prefix)}
        entry["timing"] = None
        if ROLLOUT_SECONDS in logs:
            seconds, rollouts, rewards = entry["seconds"], logs[ROLLOUT_SECONDS], logs.get(REWARD_SECONDS, 0.0)
            entry["timing"] = {"generation": rollouts - rewards, "rewards": rewards, "update": seconds - rollouts}
            entry["generating_share"] = (rollouts - rewards) / seconds
            entry["training_share"] = (seconds - rollouts) / seconds
        append_json(self.log_path, entry)
        left = (now - self.started) / (step - self.job.start) * (self.job.max_num_steps - step)
        is_round = step % max(1, self.job.max_num_steps // 20) == 0
        if is_round or measured or left == 0 or now - self.told >= 20:
            self.told = now
            print(f"{self.job.stage}: {_progress(entry, self.job.max_num_steps, left)}", flush=True)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Seal the saved checkpoint, and remove checkpoints beyond the kept."""
        wait_for_all_ranks()
        if rank() != 0:
            return
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for name in rng_files(self.job.ranks):
            _wait_for(saved / name)
        step = state.global_step // self.updates
        refuse_not_numbers(saved, f"{self.job.stage}: diverged at step {step}", self._remedy())
        self.job.training.seal(saved, step)
        self.save_seconds.append(time.monotonic() - self.saving_since)
        stop_when = self.job.config.stopping
        best = best_so_far(self.job.training, stop_when, step) if stop_when else None
        prune_checkpoints(self.job.training, self.job.settings.checkpointing, best)


def rng_files(ranks: int) -> list[str]:
    """Return the names of the ranks' random states in Trainer's checkpoints."""
    return [f"rng_state_{number}.pth" for number in range(ranks)] if ranks > 1 else ["rng_state.pth"]


def _wait_for(file: Path, seconds: float = 90) -> None:
    """Wait until this host sees a file of another host; a shared file system may take half a minute."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{file}: not seen after {seconds:.0f} s; results/ must be shared by all nodes of a stage")
        time.sleep(0.5)


def _progress(entry: dict[str, Any], last: int, left: float) -> str:
    said = {"loss": entry["loss"]}
    if entry.get("reward_mean") is not None:
        said = {"reward": entry["reward_mean"], "length": entry["response_length_mean"]}
    told = ", ".join([f"{name} {value:.3f}" for name, value in said.items()] + words_of(entry))
    return f"step {entry['step']}/{last}, {told}, {entry['seconds']:.2f} s/step, {left:.0f} s left"
