"""Train with TRL's trainers, as one of a stage's processes.

Each process has an equal part of every step's rows, and a copy or a share of the weights. The algorithm's module makes
the trainer; resuming and the end are here, the steps in `scripts.backends.trl.callback`.
"""

import os
import shutil
import warnings
from functools import partial
from importlib import import_module

import accelerate.accelerator
import torch
from transformers import Trainer, set_seed
from transformers import logging as transformers_logging

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.callback import StageCallback, rng_files
from scripts.backends.trl.memory import out_of_memory
from scripts.backends.trl.ranks import rank, wait_for_all_ranks, world_size
from scripts.backends.trl.setup import train_adapters_in_float32
from scripts.backends.trl.sharding import ShardingState, is_sharded, load_shares, sample_in_step, save_whole
from scripts.backends.trl.versions import check_versions
from scripts.errors import UserError
from scripts.files import sha256_text
from scripts.model.loading import load_model
from scripts.rewards.registry import register, register_gym


def train_rank(job: TrainingJob) -> None:
    """Train a stage as one of `job.ranks` processes; several have torch.distributed up."""
    try:
        _train(job)
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
    register(job.environments, job.config.environments)
    if getattr(job.config, "gym", None):
        register_gym(job.config.gym, job.settings.gym_servers, job.gym_python)
    torch.set_num_threads(job.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _remove_half_saved(job)
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.stage_directory / "tensorboard"))
    if is_sharded(job):
        accelerate.accelerator.AcceleratorState = ShardingState
    trainer = import_module(job.config.trainer).make_trainer(job)
    train_adapters_in_float32(trainer.model, job)
    trainer.create_model_card = lambda *arguments, **options: None
    if is_sharded(job):
        sample_in_step(trainer)
        trainer._save_optimizer_and_scheduler = partial(save_whole, trainer)
        trainer._load_optimizer_and_scheduler = partial(load_shares, trainer)
    if job.resume_from:
        _load_weights(trainer, job)
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback", "RichProgressCallback"):
            trainer.remove_callback(callback)
    trainer.add_callback(StageCallback(job))
    torch.set_num_threads(job.threads)  # accelerate may have set its own
    _seed_where_no_state_was_saved(job)
    trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)
    wait_for_all_ranks()  # each still looks into the directory that rank 0 removes


def _load_weights(trainer: Trainer, job: TrainingJob) -> None:
    """Load a checkpoint's weights or adapters before the weights are shared out.

    Trainer's loading expects the model's names, which LLaVA's files have not, and skips missing weights.
    """
    if job.config.policy.lora is None:
        trainer.model.load_state_dict(load_model(job.resume_from).state_dict())
    else:
        trainer._load_from_checkpoint(str(job.resume_from))
    trainer._load_from_checkpoint = lambda *_: None


def _remove_half_saved(job: TrainingJob) -> None:
    if rank() == 0:
        shutil.rmtree(job.run / "saving", ignore_errors=True)


def _seed_where_no_state_was_saved(job: TrainingJob) -> None:
    """Seed a rank without a random state in the checkpoint, made by fewer ranks.

    Unseeded, the rank would repeat the random numbers of its first steps.
    """
    if job.resume_from and not (job.resume_from / rng_files(job.ranks)[rank()]).exists():
        set_seed(int(sha256_text(f"{job.config.seed} {job.resume_from.name} {rank()}")[:8], 16))
