"""Checkpoints that NeMo-RL wrote: which are whole, and our list of their files beside them.

NeMo-RL publishes ``step_N`` by a rename once all of it is written. A list of files with sizes is added here; contents
are not hashed, being terabytes, but for small files and one large shard, by which two checkpoints can be told apart.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from scripts.errors import UserError
from scripts.files import sha256_file, write_json
from scripts.train.rundir import FILES, Checkpoint, checkpoints, step_of

SMALL_BYTES = 1 << 20
MEGATRON = Path("policy/weights/iter_0000000")


def reason_unfinished(path: Path) -> str | None:
    """Why a step's directory is no whole checkpoint; None: it is one."""
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
    if (path / "policy/weights/latest_checkpointed_iteration.txt").exists() or (path / MEGATRON).exists():
        wanting = [name for name in ("run_config.yaml", "metadata.json") if not (path / MEGATRON / name).is_file()]
        return f"{MEGATRON}/{wanting[0]} is missing" if wanting else None
    return None if any((path / "policy/weights").rglob("*")) else "policy/weights is empty"


def seal_finished(run: Path) -> list[Checkpoint]:
    """List the files of every whole checkpoint that has no list yet; the checkpoints that were sealed by this call."""
    sealed = []
    for path in sorted((run / "checkpoints").glob("step_*"), key=step_of):
        if step_of(path) >= 0 and not (path / FILES).exists() and reason_unfinished(path) is None:
            write_json(path / FILES, _describe(path))
            sealed.append(Checkpoint(step_of(path), path))
    return sealed


def _describe(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    shards = [path for path in files if path.suffix in (".distcp", ".safetensors")]
    hashed = {max(shards, key=lambda path: path.stat().st_size)} if shards else set()
    described: dict[str, dict[str, Any]] = {}
    for path in files:
        size = path.stat().st_size
        content = sha256_file(path) if size <= SMALL_BYTES or path in hashed else None
        described[str(path.relative_to(directory))] = {"bytes": size, "sha256": content}
    return described


def refuse_repeated_weights(run: Path) -> None:
    """UserError when a checkpoint holds the very same weights as the one before; asynchronous saving was seen to do so.

    Upstream's issue 3312: every later checkpoint repeats the tensors of the first. Such a checkpoint is moved out of
    the way, so that nothing resumes from it or publishes it.
    """
    for before, after in pairwise(checkpoints(run)):
        if same := _same_shard(before.path, after.path):
            aside = _set_aside(after.path, "repeated")
            raise UserError(
                f"{aside}: {same} is byte for byte that of {before.path.name}, so saving repeats old weights (NeMo-RL "
                "issue 3312); set policy.megatron_cfg.checkpoint.async_save to false and train on"
            )


def _same_shard(before: Path, after: Path) -> str | None:
    """A shard of weights that two checkpoints share, byte for byte, of those that were hashed."""
    old, new = (json.loads((path / FILES).read_text(encoding="utf-8")) for path in (before, after))
    shards = [name for name in new if Path(name).suffix in (".distcp", ".safetensors")]
    return next((name for name in shards if new[name]["sha256"] and old.get(name) == new[name]), None)


def _set_aside(path: Path, why: str) -> Path:
    """Give a checkpoint a name that says why nothing resumes from it."""
    times = len(list(path.parent.glob(f"{why}_{path.name}.*")))
    return path.rename(path.with_name(f"{why}_{path.name}.{times + 1}"))


def pass_over_newer(run: Path, resume_from: Path | None) -> None:
    """Take what is no whole checkpoint, or a damaged one, out of NeMo-RL's way: it resumes from the highest number."""
    newest = step_of(resume_from) if resume_from else 0
    for path in (run / "checkpoints").glob("step_*"):
        if step_of(path) > newest:
            _set_aside(path, "passed_over")
