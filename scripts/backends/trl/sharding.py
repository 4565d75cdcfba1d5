"""FSDP2: each process holds a share of weights, gradients and moments.

Checkpoints are whole, so a training goes on in any number of processes, with shares or copies.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.ranks import rank

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
    state = trainer.optimizer.state_dict()
    state["state"] = {
        number: {name: _whole(value) for name, value in moments.items()} for number, moments in state["state"].items()
    }
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
