"""Tell whether a stage's checkpoints fit on the disk."""

import math
import shutil
from pathlib import Path

from scripts.files import amount, read_json
from scripts.model.hugging_face import tensors_of
from scripts.model.shape import fresh_parameters
from scripts.recipe.model import RandomModel
from scripts.recipe.stage_settings import Checkpointing
from scripts.records import CheckpointRecord, Manifest, RunIdentity, read_if_there, read_record
from scripts.stage.rundir import checkpoints
from scripts.stage.stage import Stage


def checkpoint_bytes(stage: Stage) -> int:
    """Return the bytes of one checkpoint: as the parent's, or the parameters and AdamW's two moments in float32.

    A pretrained model of NeMo-RL takes 14 bytes a parameter: 2 for weights in bfloat16, 12 for the optimizer. 0: not
    known, as for adapters.
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
    """Return the most checkpoints on the disk at one moment: the kept, and one being saved."""
    taken = math.ceil(planned / checkpointing.save_period)
    if checkpointing.keep_last_k is None:
        return taken
    return min(taken, checkpointing.keep_last_k + checkpointing.keep_top_k + len(checkpointing.keep_steps) + 1)


def shortage(stage: Stage) -> str | None:
    """Say with sizes why a stage's checkpoints do not fit on the store's disk; None where they fit.

    Checkpoints of the same config and data are there already and need no room.
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
    """Count the checkpoints of the stage's config and data; its parent may not be exported yet."""
    run = stage.paths.run
    held, splits = read_if_there(run / "identity.json", RunIdentity), read_if_there(stage.manifest, Manifest)
    now = stage.config.content, splits["train"]["sha256"] if splits else None
    return len(checkpoints(run)) if held and (held["config"], held["train_split"]) == now else 0
