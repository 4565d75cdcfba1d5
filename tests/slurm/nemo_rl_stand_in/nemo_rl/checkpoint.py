"""The checkpoints of a run: written as tmp_step_N, renamed to step_N, kept by a metric."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from nemo_rl import weights


@dataclass
class Progress:
    """Where a run is: its weights' state, the steps done and the rows consumed."""

    state: str
    step: int = 0
    rows: int = 0


def saved(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by step."""
    return {int(path.name[5:]): path for path in directory.glob("step_*") if re.fullmatch(r"step_\d+", path.name)}


def save(
    config: dict[str, Any], progress: Progress, state: str, metrics: dict[str, float], halfway: Callable[[], None]
) -> None:
    """Save a run whose weights are those of `state`, and drop what is not among the best; ValueError for a bad metric.

    `halfway` is called when part of the checkpoint is written.
    """
    settings = config["checkpointing"]
    directory = Path(settings["checkpoint_dir"]).absolute()
    target, temporary = (directory / f"{prefix}step_{progress.step}" for prefix in ("", "tmp_"))
    temporary.mkdir(parents=True, exist_ok=True)
    asynchronous = config["grpo"]["async_grpo"]["enabled"]
    info = {
        "consumed_samples": progress.rows,
        "current_step": progress.step,
        "current_epoch": 0,
        "total_steps": 0 if asynchronous else progress.step,
        "total_valid_tokens": 1000 * progress.rows,
    }
    (temporary / "training_info.json").write_text(json.dumps(info | _chosen(settings["metric_name"], metrics)))
    (temporary / "config.yaml").write_text(yaml.safe_dump(config))
    halfway()

    iteration = temporary / "policy/weights/iter_0000000"
    iteration.mkdir(parents=True, exist_ok=True)
    weights.write(iteration, state)
    (iteration / "run_config.yaml").write_text(yaml.safe_dump({"model": {"seq_length": 65536}}))
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    optimizer = {"optimizer": {"step": progress.step}} if settings["save_optimizer"] else {}
    torch.save({"iteration": 0, "state": progress.state} | optimizer, iteration / "common.pt")
    (iteration.parent / "latest_checkpointed_iteration.txt").write_text("0")
    torch.save({"rows": progress.rows}, temporary / "train_dataloader.pt")
    if asynchronous:
        torch.save({"trajectories": []}, temporary / "replay_buffer.pt")

    old = directory / f"old_step_{progress.step}"
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    _drop(settings, directory)


def resume(directory: Path) -> Progress | None:
    """The run as its highest step left it; None if there is none."""
    steps = saved(directory)
    if not steps:
        return None
    path = steps[max(steps)]
    info = json.loads((path / "training_info.json").read_text())
    weights.read(path / "policy/weights/iter_0000000")
    state = torch.load(path / "policy/weights/iter_0000000/common.pt")["state"]
    return Progress(state, info["current_step"], torch.load(path / "train_dataloader.pt")["rows"])


def _chosen(name: str | None, metrics: dict[str, float]) -> dict[str, float]:
    """The metric by which checkpoints are kept; `metrics` bear the prefixes train: and val:."""
    if name is None:
        return {}
    prefix = name.split(":")[0]
    if prefix not in {"train", "val"} or ":" not in name:
        raise ValueError(f"metric_name={name} must start with 'val:' or 'train:'")
    if not any(each.startswith(f"{prefix}:") for each in metrics):
        print(f"warning: no {prefix} metrics were collected, so this checkpoint is not among the best", flush=True)
        return {}
    if name not in metrics:
        raise ValueError(f"Metric {name} not found in {prefix} metrics")
    return {name: metrics[name]}


def _drop(settings: dict[str, Any], directory: Path) -> None:
    if settings["keep_top_k"] is None:
        return
    sign = 1 if settings["higher_is_better"] else -1
    steps = saved(directory)

    def rank(step: int) -> tuple[float, int]:
        info = json.loads((steps[step] / "training_info.json").read_text())
        return sign * info.get(settings["metric_name"], -sign * float("inf")), step

    for step in sorted(steps, key=rank, reverse=True)[settings["keep_top_k"] :]:
        if step != max(steps):
            shutil.rmtree(steps[step])
