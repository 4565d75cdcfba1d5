"""What a backend is asked for, and which backends there are."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.recipe.models import Checkpointing
from scripts.train.stop import StopRequest


@dataclass(frozen=True)
class TrainingJob:
    """One attempt at a stage.

    The backend trains up to the planned step (`max_num_steps`), from the checkpoint `resume_from` where there is
    one; it seals checkpoints every ``checkpointing.save_period`` steps and at the planned step, logs every step to
    ``run/metrics.jsonl``, and at the end of each step asks `stop`: once that is due, it seals the step and returns.
    """

    stage: str
    config: dict[str, Any]
    train_split: Path
    parent_model: Path | None
    run: Path
    resume_from: Path | None
    max_num_steps: int
    checkpointing: Checkpointing
    threads: int
    stop: StopRequest
    nodes: int = 1


def load_backend(name: str) -> Callable[[TrainingJob], None]:
    """The `train` function of a backend; its module (and what that imports) is loaded only now."""
    return import_module(f"scripts.train.{name}_backend").train


def load_cluster_backend(name: str) -> Callable[[TrainingJob, Callable[[list[str]], int]], None]:
    """The function of a backend that trains on several nodes, given what runs a driver's command on a Ray cluster."""
    return import_module(f"scripts.train.{name}_cluster").train_on_cluster
