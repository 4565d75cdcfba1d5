"""NeMo-RL's checkpoints: whole or not, sealed by a list of files.

NeMo-RL publishes ``step_N`` by a rename once written. The list has sizes, and hashes of small files and of the largest
shard, enough to tell two checkpoints apart; terabytes are not hashed.

A stage that goes on with its parent's optimizer has the parent's checkpoint as the first of its own run. NeMo-RL
resumes from the newest ``step_N`` of its folder, and leaves the data loader's position aside where the saved config
names another data set (``nemo_rl/data/utils.py``, since v0.7.0). So the checkpoint laid in names a data set that no
config has, and the rows begin with the first.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.training import NemoRlConfig
from scripts.errors import UserError
from scripts.files import describe_files, link_or_copy, read_json, replace_directory, write_json, write_text
from scripts.records import Files, read_record
from scripts.stage.rundir import FILES, Checkpoint, checkpoints, step_of

SMALL_BYTES = 1 << 20
WEIGHTS = "policy/weights/"
MEGATRON = Path("policy/weights/iter_0000000")
TRACKER = "latest_checkpointed_iteration.txt"
BEFORE = "before-continuing"
"""The data set that a checkpoint names where the rows begin anew."""
LEFT = (FILES, "replay_buffer.pt", "training_info.json", "config.yaml")
WITHIN_EPOCH = ("current_epoch", "epoch", "step")


def missing_file(iteration: Path) -> str | None:
    """Return the name of a file that a half-written iteration of Megatron Bridge lacks; None for a whole one."""
    return next((name for name in ("run_config.yaml", "metadata.json") if not (iteration / name).is_file()), None)


def reason_unfinished(path: Path) -> str | None:
    """Return why a step's directory is no whole checkpoint; None for a whole one."""
    for prefix in ("tmp_", "old_"):
        if path.with_name(f"{prefix}{path.name}").exists():
            return f"{prefix}{path.name} stands beside it"
    try:
        json.loads((path / "training_info.json").read_text(encoding="utf-8"))
        yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        return f"training_info.json or config.yaml cannot be read ({error})"
    if not any(path.glob("train_dataloader*.pt")):
        return "train_dataloader.pt is missing"
    if (path / WEIGHTS / TRACKER).exists() or (path / MEGATRON).exists():
        missing = missing_file(path / MEGATRON)
        return f"{MEGATRON}/{missing} is missing" if missing else None
    return None if any((path / WEIGHTS).rglob("*")) else "policy/weights is empty"


def seal_finished(run: Path) -> list[Checkpoint]:
    """List the files of every whole checkpoint without a list; return the checkpoints sealed now."""
    sealed = []
    for path in sorted((run / "checkpoints").glob("step_*"), key=step_of):
        if step_of(path) >= 0 and not (path / FILES).exists() and reason_unfinished(path) is None:
            write_json(path / FILES, _describe(path))
            sealed.append(Checkpoint(step_of(path), path))
    return sealed


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    hashed = largest_shard(sizes)
    large = [name for name, size in sizes.items() if size > SMALL_BYTES and name != hashed]
    return describe_files(directory, {name: {"bytes": sizes[name], "sha256": None} for name in large})


def largest_shard(sizes: dict[str, int]) -> str | None:
    """Return the name of the weights' largest shard; small shards may be alike from step to step."""
    shards = [name for name in sizes if name.startswith(WEIGHTS) and name.endswith((".distcp", ".safetensors"))]
    return max(shards, key=lambda name: sizes[name], default=None)


def refuse_repeated_weights(run: Path) -> None:
    """UserError when a checkpoint repeats the weights before, as asynchronous saving did (NeMo-RL issue 3312).

    The checkpoint is renamed, so that nothing resumes from there or publishes the weights.
    """
    for before, after in pairwise(checkpoints(run)):
        if same := _same_shard(before.path, after.path):
            aside = _set_aside(after.path, "repeated")
            raise UserError(
                f"{aside}: {same} is byte for byte that of {before.path.name}, so saving repeats old weights (NeMo-RL "
                "issue 3312); set policy.megatron_cfg.checkpoint.async_save to false and train on"
            )


def _same_shard(before: Path, after: Path) -> str | None:
    """Return the name of the largest shard where both checkpoints have the same; None where not."""
    try:
        old, new = (read_record(path / FILES, Files) for path in (before, after))
    except UserError:  # NeMo-RL has just removed a checkpoint
        return None
    shard = largest_shard({name: file["bytes"] for name, file in new.items()})
    return shard if shard is not None and old.get(shard) == new[shard] else None


def _set_aside(path: Path, why: str) -> Path:
    times = len(list(path.parent.glob(f"{why}_{path.name}.*")))
    return path.rename(path.with_name(f"{why}_{path.name}.{times + 1}"))


def pass_over_newer(run: Path, resume_from: Path | None) -> None:
    """Rename checkpoints above the resumed step, since NeMo-RL resumes from the highest number."""
    newest = step_of(resume_from) if resume_from else 0
    for path in (run / "checkpoints").glob("step_*"):
        if step_of(path) > newest:
            _set_aside(path, "passed_over")


def lay_in(run: Path, parent: Checkpoint, config: NemoRlConfig) -> Checkpoint:
    """Make the parent's checkpoint one of this run, by hard links; return it.

    `current_step` counts an epoch's steps, or all steps where training is asynchronous.
    """
    path = run / "checkpoints" / parent.path.name
    if not (path / FILES).exists():
        with replace_directory(path) as fresh:
            ignored = shutil.ignore_patterns(*LEFT)
            shutil.copytree(parent.path, fresh, copy_function=link_or_copy, ignore=ignored, dirs_exist_ok=True)
            within = WITHIN_EPOCH if config.is_asynchronous else (*WITHIN_EPOCH, "current_step")
            info = read_json(parent.path / "training_info.json")
            write_json(fresh / "training_info.json", info | dict.fromkeys(info.keys() & within, 0))
            saved = yaml.safe_load((parent.path / "config.yaml").read_text(encoding="utf-8"))
            saved["data"]["train"] = {"dataset_name": BEFORE}
            write_text(fresh / "config.yaml", yaml.safe_dump(saved))
        seal_finished(run)
    return Checkpoint(parent.step, path)


def begins_anew(config: dict[str, Any]) -> bool:
    """Whether the rows after a checkpoint with this config begin with the first."""
    train = config.get("data", {}).get("train")
    return isinstance(train, dict) and train.get("dataset_name") == BEFORE
