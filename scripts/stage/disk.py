"""Whether a stage's checkpoints will fit on the disk."""

import math
import shutil
from pathlib import Path
from typing import Any

from scripts.files import amount, canonical_json, read_json, sha256_text
from scripts.recipe.resolve import planned_step, rows_of_manifest
from scripts.recipe.stage import Checkpointing
from scripts.stage.rundir import checkpoints


def checkpoint_bytes(config: dict[str, Any], parent_record: Path | None) -> int:
    """Bytes of one checkpoint: the parent's; for a fresh model, its parameters in float32 with AdamW's two moments.

    For a pretrained model 14 bytes a parameter: 2 of the weights in bfloat16, 12 of the optimizer. 0: nobody knows.
    """
    if parent_record is not None:
        return sum(entry["bytes"] for entry in read_json(parent_record)["files"].values())
    if config["backend"] == "trl":
        return 3 * 4 * parameters(config["model"])
    index = Path(config["model"]["name"], "model.safetensors.index.json")
    return 7 * read_json(index)["metadata"]["total_size"] if index.is_file() else 0


def parameters(shape: dict[str, Any], vocabulary: int = 261) -> int:
    """Parameters of a Llama-shaped decoder with tied embeddings: attention, gated MLP and norms of each layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    key_values = hidden // heads * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * key_values + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    return vocabulary * hidden + shape["num_hidden_layers"] * layer + hidden


def checkpoints_at_once(checkpointing: Checkpointing, planned: int) -> int:
    """The most checkpoints that lie on the disk at one moment: those that are kept, and one being saved."""
    taken = math.ceil(planned / checkpointing.save_period)
    if checkpointing.keep_last_k is None:
        return taken
    return min(taken, checkpointing.keep_last_k + checkpointing.keep_top_k + 1)


def shortage(
    config: dict[str, Any], manifest: Path, run: Path, checkpointing: Checkpointing, parent_record: Path | None
) -> str | None:
    """Why the stage would not fit on the disk of its run directory, with the sizes; None when it fits.

    Checkpoints that the run directory already holds of this very config and data need no room any more.
    """
    planned = planned_step(config, rows_of_manifest(manifest))
    each, most = checkpoint_bytes(config, parent_record), checkpoints_at_once(checkpointing, planned)
    needed = each * max(0, most - _held(config, manifest, run))
    free = shutil.disk_usage(next(folder for folder in run.parents if folder.exists())).free
    if needed <= free:
        return None
    return (
        f"{run}: {most} checkpoints of {amount(each)} need {amount(needed)}, but {amount(free)} are free; "
        "make room, or keep fewer (checkpointing.keep_last_k, save_period)"
    )


def _held(config: dict[str, Any], manifest: Path, run: Path) -> int:
    if not (run / "identity.json").exists():
        return 0
    facts = read_json(run / "identity.json")
    same_config = facts["config"] == sha256_text(canonical_json(config))
    return (
        len(checkpoints(run)) if same_config and facts["train_split"] == read_json(manifest)["train"]["sha256"] else 0
    )
