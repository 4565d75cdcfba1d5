"""The checkpoints of a run: written as tmp_step_N, renamed to step_N, kept by a metric."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from nemo_rl import RELEASE, weights


def saved(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by step."""
    return {int(path.name[5:]): path for path in directory.glob("step_*") if re.fullmatch(r"step_\d+", path.name)}


def newest(directory: Path) -> Path | None:
    """The checkpoint that a run goes on from: the highest, whatever it holds."""
    steps = saved(directory)
    return steps[max(steps)] if steps else None


def save(
    config: dict[str, Any],
    step: int,
    state: str,
    info: dict[str, Any],
    loaders: dict[str, dict[str, Any]],
    halfway: Callable[[], None],
) -> None:
    """Save a step, and drop what is not among the best.

    `state`: the weights' state. `loaders`: other parts by the name of their file. `halfway` is called when the weights
    are written and not all of the rest. What a killed save left is overwritten in place, but by main, which removes it.
    """
    settings = config["checkpointing"]
    directory = Path(settings["checkpoint_dir"]).absolute()
    target, temporary = (directory / f"{prefix}step_{step}" for prefix in ("", "tmp_"))
    if RELEASE == "main":
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True, exist_ok=True)
    (temporary / "training_info.json").write_text(json.dumps(info))
    (temporary / "config.yaml").write_text(yaml.safe_dump(config))

    iteration = temporary / "policy/weights/iter_0000000"
    iteration.mkdir(parents=True, exist_ok=True)
    weights.write(iteration, state, config["policy"]["model_name"])
    (iteration / "run_config.yaml").write_text(yaml.safe_dump({"model": {"seq_length": 65536}}))
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    optimizer = {"optimizer": {"step": step}} if settings["save_optimizer"] else {}
    torch.save({"iteration": 0, "state": state} | optimizer, iteration / "common.pt")
    (iteration.parent / "latest_checkpointed_iteration.txt").write_text("0")
    weights.write_tokenizer(config["policy"]["tokenizer"]["name"], temporary / "policy/tokenizer")
    halfway()
    for name, loader in loaders.items():
        torch.save(loader, temporary / name)

    old = directory / f"old_step_{step}"
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    _drop(settings, directory)


def state_of(path: Path) -> str:
    """The state of the weights from which a checkpoint goes on."""
    weights.read(path / "policy/weights/iter_0000000")
    return torch.load(path / "policy/weights/iter_0000000/common.pt")["state"]


def chosen(name: str | None, metrics: dict[str, float]) -> dict[str, float]:
    """The metric by which checkpoints are kept; `metrics` bear the prefixes train: and val:; ValueError for a bad one."""
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
