"""A stage that goes on with its parent's optimizer: the parent's checkpoint as the first of the stage's own run.

NeMo-RL resumes from the newest ``step_N`` of its folder, and leaves the data loader's position aside where the saved
config names another data set (``nemo_rl/data/utils.py``, since v0.7.0). So the checkpoint laid in names a data set that
no config has, and the rows begin with the first.
"""

import shutil
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.checkpoints import seal_finished
from scripts.files import link_or_copy, read_json, replace_directory, write_json, write_text
from scripts.stage.rundir import FILES, Checkpoint

BEFORE = "before-continuing"
"""The data set that a checkpoint names where the rows begin anew."""
LEFT = (FILES, "replay_buffer.pt", "training_info.json", "config.yaml")
WITHIN_EPOCH = ("current_epoch", "epoch", "step")


def lay_in(run: Path, parent: Checkpoint, is_asynchronous: bool) -> Checkpoint:
    """Make the parent's checkpoint one of this run, by hard links; return it.

    `current_step` counts an epoch's steps, or all steps where training is asynchronous.
    """
    path = run / "checkpoints" / parent.path.name
    if not (path / FILES).exists():
        with replace_directory(path) as fresh:
            ignored = shutil.ignore_patterns(*LEFT)
            shutil.copytree(parent.path, fresh, copy_function=link_or_copy, ignore=ignored, dirs_exist_ok=True)
            within = WITHIN_EPOCH if is_asynchronous else (*WITHIN_EPOCH, "current_step")
            info = read_json(parent.path / "training_info.json")
            write_json(fresh / "training_info.json", info | dict.fromkeys(info.keys() & within, 0))
            config = yaml.safe_load((parent.path / "config.yaml").read_text(encoding="utf-8"))
            config["data"]["train"] = {"dataset_name": BEFORE}
            write_text(fresh / "config.yaml", yaml.safe_dump(config))
        seal_finished(run)
    return Checkpoint(parent.step, path)


def begins_anew(config: dict[str, Any]) -> bool:
    """Whether the rows after a checkpoint with this config begin with the first."""
    train = config.get("data", {}).get("train")
    return isinstance(train, dict) and train.get("dataset_name") == BEFORE
