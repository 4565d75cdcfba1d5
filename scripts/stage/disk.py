"""Whether a stage's checkpoints will fit on the disk, and what room they take."""

import math
import os
import shutil
from collections import Counter
from pathlib import Path

from scripts.files import amount, read_json
from scripts.model.hugging_face import tensors_of
from scripts.model.shape import fresh_parameters
from scripts.recipe.model import RandomModel
from scripts.recipe.stage import Checkpointing
from scripts.records import CheckpointRecord, Manifest, RunIdentity, read_if_there, read_record
from scripts.stage.rundir import checkpoints
from scripts.stage.stage import Stage


def checkpoint_bytes(stage: Stage) -> int:
    """Bytes of one checkpoint: the parent's; else the model's parameters in float32 with AdamW's two moments.

    For a pretrained model of NeMo-RL 14 bytes a parameter: 2 of the weights in bfloat16, 12 of the optimizer. 0: nobody
    knows, as of adapters.
    """
    if getattr(getattr(stage.config, "policy", None), "lora", None) is not None:
        return 0
    if stage.parent is not None:
        return sum(
            entry["bytes"] for entry in read_record(stage.parent.paths.record, CheckpointRecord)["files"].values()
        )
    if stage.parent_export is not None:
        return 3 * 4 * sum(math.prod(shape) for _, shape in tensors_of(stage.parent_export).values())
    model = stage.recipe.model
    if isinstance(model, RandomModel):
        return 3 * 4 * fresh_parameters(model)
    index = Path(model.name, "model.safetensors.index.json")
    return 7 * read_json(index)["metadata"]["total_size"] if index.is_file() else 0


def checkpoints_at_once(checkpointing: Checkpointing, planned: int) -> int:
    """The most checkpoints that lie on the disk at one moment: those that are kept, and one being saved."""
    taken = math.ceil(planned / checkpointing.save_period)
    if checkpointing.keep_last_k is None:
        return taken
    return min(taken, checkpointing.keep_last_k + checkpointing.keep_top_k + len(checkpointing.keep_steps) + 1)


def shortage(stage: Stage) -> str | None:
    """Why the stage would not fit on the disk of its run directory, with the sizes; None when it fits.

    Checkpoints that the run directory already holds of this very config and data need no room any more.
    """
    run = stage.paths.run
    each, most = checkpoint_bytes(stage), checkpoints_at_once(stage.settings.checkpointing, stage.planned)
    needed = each * max(0, most - _held(stage))
    free = shutil.disk_usage(next(folder for folder in run.parents if folder.exists())).free
    if needed <= free:
        return None
    return (
        f"{run}: {most} checkpoints of {amount(each)} need {amount(needed)}, but {amount(free)} are free; "
        "make room, or keep fewer (checkpointing.keep_last_k, save_period)"
    )


def _held(stage: Stage) -> int:
    """The checkpoints of this very config and data that the run directory holds; the parent may not be exported yet."""
    run = stage.paths.run
    held, splits = read_if_there(run / "identity.json", RunIdentity), read_record(stage.manifest, Manifest)
    now = stage.config.content, splits["train"]["sha256"]
    return len(checkpoints(run)) if held and (held["config"], held["train_split"]) == now else 0


def tree_bytes(directory: Path) -> int:
    """Bytes that are free once a directory tree is removed; a file that has a name elsewhere stays."""
    names_seen: Counter[tuple[int, int]] = Counter()
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(Path(folder, name))
            names_seen[status.st_dev, status.st_ino] += 1
            if names_seen[status.st_dev, status.st_ino] == status.st_nlink:
                size += status.st_blocks * 512
    return size
