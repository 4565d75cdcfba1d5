"""Arguments, model and processor for the trainers of every algorithm; FSDP2.

With FSDP2 each process holds a share of weights, gradients and moments. Checkpoints are whole, so a training goes on in
any number of processes, with shares or copies.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.collectives import as_rank_0_says, rank
from scripts.backends.trl.rows import epochs_in_random_order, training_rows
from scripts.backends.trl.tokenization import preparation_of
from scripts.errors import UserError
from scripts.model.bfloat16 import computes_bfloat16
from scripts.model.loading import class_of, fresh_model
from scripts.model.processor import load_processor, use_template

SHARDING = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": True},
}
"""Trainer's options of FSDP2."""


def is_sharded(job: TrainingJob) -> bool:
    """Whether processes hold shares; a process alone holds all."""
    return job.settings.policy.dtensor_cfg.enabled and job.ranks > 1


class ShardingState(AcceleratorState):
    """accelerate's state, sharding on CPUs too, where accelerate silently keeps copies.

    Gradients are summed in float32 at every precision, as without shares.
    """

    def __init__(self, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        super().__init__(*arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is None:
            return
        if self._mixed_precision == "bf16":
            fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin


def sample_in_step(trainer: Trainer) -> None:
    """Let all processes sample to the longest response's end: each token takes all processes' weights."""
    for module in trainer.model.modules():
        if isinstance(module, PreTrainedModel):
            module._is_fsdp_managed_module = True


def save_whole(trainer: Trainer, folder: str) -> None:
    """Save all moments, as a process alone would, and the schedule."""
    state = tree_map(_whole, trainer.optimizer.state_dict())
    if rank() == 0:
        torch.save(state, Path(folder) / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / SCHEDULER_NAME)


def load_shares(trainer: Trainer, folder: str | None) -> None:
    """Load this process's share of the moments, and the schedule."""
    if folder is None:
        return
    state = torch.load(Path(folder) / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
    parameters = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    state["state"] = {
        number: {name: _share(value, parameters[number]) for name, value in moments.items()}
        for number, moments in state["state"].items()
    }
    trainer.optimizer.load_state_dict(state)
    trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / SCHEDULER_NAME, weights_only=True))


def _whole(value: Any) -> Any:
    """Return the value on the CPU of rank 0; every rank must call."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if rank() != 0:
        return None
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _share(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def shared_arguments(job: TrainingJob) -> dict[str, Any]:
    """Return the arguments of every trainer. TRL counts updates where a stage counts steps."""
    config, placing = job.config, job.settings.policy.dtensor_cfg
    policy, updates = config.policy, config.updates_per_step
    optimizer = policy.optimizer
    micro, accumulated = shares_of(job)
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulated,
        "optim": optimizer.name,
        "output_dir": str(job.run / "saving"),
        "max_steps": job.planned * updates,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
        "warmup_steps": optimizer.lr_warmup_iters * updates,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "max_grad_norm": optimizer.clip_grad,
        "seed": config.seed,
        "train_sampling_strategy": "sequential",
        "model_init_kwargs": start_options(job),
        "remove_unused_columns": False,
        "gradient_checkpointing": placing.activation_checkpointing,  # the name in vLLM's transformers too
        "bf16": policy.precision == "bfloat16",
        "use_cpu": job.accelerator == "cpu",
        "dataloader_pin_memory": job.accelerator != "cpu",
        "save_steps": job.settings.checkpointing.save_period * updates,
        "logging_steps": updates,
        "logging_nan_inf_filter": False,
        "report_to": list(job.report_to) or "none",
        "run_name": job.stage,
        "disable_tqdm": True,
        "log_level_replica": "error",
        # Also keeps DDP from regrouping gradients after the first step, which would round a resumed step otherwise.
        "ddp_find_unused_parameters": not placing.activation_checkpointing,
        **(SHARDING if is_sharded(job) else {}),
    }


def in_fast_precision(job: TrainingJob) -> TrainingJob:
    """Return the job, in float32 instead of bfloat16 where rank 0's CPU is slow in bfloat16; rank 0 says so."""
    policy = job.config.policy
    if policy.precision == "float32" or as_rank_0_says(computes_bfloat16(job.accelerator)):
        return job
    if rank() == 0:
        print(f"{job.stage}: computes in float32, since this CPU has no instructions for bfloat16", flush=True)
    policy = policy.model_copy(update={"precision": "float32"})
    return replace(job, config=job.config.model_copy(update={"policy": policy}))


def warm_up_from_first_step(trainer: Trainer, job: TrainingJob) -> None:
    """Let the rate rise from `lr_warmup_init` at the first update; transformers' schedules begin at 0."""
    optimizer, create = job.config.policy.optimizer, trainer.create_scheduler
    first = (optimizer.lr_warmup_init or 0) / optimizer.lr
    last = max(1, optimizer.lr_warmup_iters * job.config.updates_per_step)

    def created(*arguments: Any, **options: Any) -> Any:
        schedule = create(*arguments, **options)
        shares, groups = schedule.lr_lambdas[0], schedule.optimizer.param_groups
        schedule.lr_lambdas = [lambda update: shares(update) + first * max(0, 1 - update / last)] * len(groups)
        for group in groups:
            group["lr"] = group["initial_lr"] * schedule.lr_lambdas[0](0)
        schedule._last_lr = [group["lr"] for group in groups]  # which the log takes
        return schedule

    trainer.create_scheduler = created


def go_on_by_the_config(trainer: Trainer, job: TrainingJob) -> None:
    """Let the checkpoint's optimizer and schedule go on with the config's rate, betas and decay, not with their own."""
    load = trainer._load_optimizer_and_scheduler

    def loaded(folder: str | None) -> None:
        own = [dict(group) for group in trainer.optimizer.param_groups]
        load(folder)
        schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        schedule.base_lrs = [group["initial_lr"] for group in own]
        for group, settings, share in zip(trainer.optimizer.param_groups, own, schedule.lr_lambdas, strict=True):
            group.update(settings, lr=settings["initial_lr"] * share(schedule.last_epoch))
        schedule._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]

    trainer._load_optimizer_and_scheduler = loaded


def shares_of(job: TrainingJob) -> tuple[int, int]:
    """Return the rows of a process's micro-batch, and the micro-batches of an update."""
    share = job.config.rows_per_update // job.ranks
    micro = min(job.settings.policy.train_micro_batch_size or share, share)
    return micro, share // micro


def start_options(job: TrainingJob) -> dict[str, Any] | None:
    """Return TRL's options for loading the parent's model, frozen weights in the computation's precision.

    None for a fresh model.
    """
    if job.parent_model is None:
        return None
    policy = job.config.policy
    frozen = policy.lora is not None and policy.precision == "bfloat16"
    options: dict[str, Any] = {"dtype": "bfloat16" if frozen else "float32"}
    if policy.attn_implementation is not None:
        options["attn_implementation"] = policy.attn_implementation
    if policy.lora is not None and policy.lora.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
        )
    return options


def adapters(job: TrainingJob) -> Any:
    """Return peft's config of new adapters; None where all weights are trained.

    UserError where the adapters would lie over nothing, or over layers that TRL refuses.
    """
    lora = job.config.policy.lora
    if lora is None:
        return None
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only where adapters are trained
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    config = LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules or ([] if lora.target_parameters else "all-linear"),
        target_parameters=lora.target_parameters or None,
        exclude_modules=lora.exclude_modules or None,
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        shape = class_of(job.parent_model).from_config(AutoConfig.from_pretrained(job.parent_model))
    try:
        adapted = get_peft_model(shape, deepcopy(config))
    except ValueError as error:
        raise UserError(f"{job.stage}: policy.lora: {error}") from None
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        raise UserError(f"{job.stage}: policy.lora.target_modules: TRL lays no adapters over lm_head; leave it out")
    return config


def start_and_rows(job: TrainingJob) -> tuple[dict[str, Any], Dataset]:
    """Return the trainer's start (a path or a fresh model, its tokenizer or processor, adapters), and the rows."""
    config, parent = job.config, job.parent_model
    if parent is None:
        model, processor = fresh_model(config)
    else:
        model, processor = str(parent), use_template(load_processor(parent), config.chat_template)
    columns, prepare = preparation_of(config, processor)
    planned = job.planned * config.rows_per_step
    if config.data.shuffle:
        rows = shuffled(training_rows(job, None, columns, prepare), job)
        return {"model": model, "processing_class": processor, "peft_config": adapters(job)}, rows
    rows = training_rows(job, planned, columns, prepare)
    if job.begun:
        whole = len(rows) // config.rows_per_step * config.rows_per_step
        first = job.begun * config.rows_per_step % whole
        rows = rows.select([*range(whole - first, whole), *range(whole - first)])  # the trainer goes on at row `first`
    return {"model": model, "processing_class": processor, "peft_config": adapters(job)}, rows


def shuffled(rows: Dataset, job: TrainingJob) -> Dataset:
    """Return the rows of all planned steps, one epoch after the other, each epoch in an order of its own.

    The trainer passes once over them, so its place after a resume is the number of rows before it. A batch may hold
    the last rows of an epoch and the first of the next: every epoch has all rows, and no batch lacks any.
    """
    rows_per_step = job.config.rows_per_step
    # A stage that continues its parent begins at its parent's step, as far into the rows as the parent came: whatever
    # stands before that place is skipped.
    skipped = job.begun * rows_per_step
    trained = (job.planned - job.begun) * rows_per_step
    order = epochs_in_random_order(len(rows), trained, job.config.seed)
    return rows.select([*[0] * skipped, *order])


def train_in_float32(model: Any) -> None:
    """Hold all trained weights in float32; TRL rounds new adapters over 4 bits."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
