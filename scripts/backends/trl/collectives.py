"""What the processes of a training ask of one another; a process by itself is rank 0 of 1."""

from typing import Any

import torch.distributed as dist


def rank() -> int:
    """Return this process's rank; only rank 0 logs, prints and seals."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all_ranks() -> None:
    """Return once every rank is here."""
    if world_size() > 1:
        dist.barrier()


def as_rank_0_says(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
