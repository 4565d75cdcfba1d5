"""Checkpoints that NeMo-RL wrote: which are whole, and our list of their files beside them.

NeMo-RL publishes ``step_N`` by a rename once all of it is written. A list of files with sizes is added here; contents
are not hashed, being terabytes, but for small files and one large shard, by which two checkpoints can be told apart.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from scripts.errors import UserError
from scripts.files import sha256_file, write_json
from scripts.train.rundir import FILES, Checkpoint, checkpoints, step_of

SMALL_BYTES = 1 << 20
WEIGHTS = "policy/weights/"
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
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    hashed = largest_shard(sizes)
    return {
        name: {
            "bytes": size,
            "sha256": sha256_file(directory / name) if size <= SMALL_BYTES or name == hashed else None,
        }
        for name, size in sizes.items()
    }


def largest_shard(sizes: dict[str, int]) -> str | None:
    """The name of the weights' largest shard, which all but surely differs from step to step; small ones need not."""
    shards = [name for name in sizes if name.startswith(WEIGHTS) and name.endswith((".distcp", ".safetensors"))]
    return max(shards, key=lambda name: sizes[name], default=None)


def refuse_repeated_weights(run: Path) -> None:
    """UserError when the two newest checkpoints hold the very same weights, as asynchronous saving has been seen to do.

    Upstream's issue 3312: every later checkpoint repeats the tensors of the first.
    """
    last = checkpoints(run)[-2:]
    if len(last) < 2:
        return
    try:
        before, after = (json.loads((one.path / FILES).read_text(encoding="utf-8")) for one in last)
    except FileNotFoundError:  # NeMo-RL has just removed the older one
        return
    shard = largest_shard({name: file["bytes"] for name, file in after.items()})
    if shard is not None and before.get(shard) == after[shard]:
        raise UserError(
            f"{last[1].path}: {shard} is byte for byte that of {last[0].path.name}, so saving repeats old weights "
            "(NeMo-RL issue 3312); set policy.megatron_cfg.checkpoint.async_save to false, delete both and train on"
        )


def pass_over_newer(run: Path, resume_from: Path | None) -> None:
    """Take what is no whole checkpoint, or a damaged one, out of NeMo-RL's way: it resumes from the highest number."""
    newest = step_of(resume_from) if resume_from else 0
    for path in (run / "checkpoints").glob("step_*"):
        if step_of(path) > newest:
            times = len(list(path.parent.glob(f"passed_over_{path.name}.*")))
            path.rename(path.with_name(f"passed_over_{path.name}.{times + 1}"))
