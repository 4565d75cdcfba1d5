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
    """UserError when the two newest checkpoints hold the very same weights, as asynchronous saving has been seen to do.

    Upstream's issue 3312: every later checkpoint repeats the tensors of the first.
    """
    last = checkpoints(run)[-2:]
    if len(last) < 2:
        return
    before, after = (json.loads((one.path / FILES).read_text(encoding="utf-8")) for one in last)
    same = [
        name
        for name, file in after.items()
        if Path(name).suffix in (".distcp", ".safetensors") and file["sha256"] and before.get(name) == file
    ]
    if same:
        raise UserError(
            f"{last[1].path}: {same[0]} is byte for byte that of {last[0].path.name}, so saving repeats old weights "
            "(NeMo-RL issue 3312); set policy.megatron_cfg.checkpoint.async_save to false, delete both and train on"
        )


def pass_over_newer(run: Path, resume_from: Path | None) -> None:
    """Take what is no whole checkpoint, or a damaged one, out of NeMo-RL's way: it resumes from the highest number."""
    newest = step_of(resume_from) if resume_from else 0
    for path in (run / "checkpoints").glob("step_*"):
        if step_of(path) > newest:
            times = len(list(path.parent.glob(f"passed_over_{path.name}.*")))
            path.rename(path.with_name(f"passed_over_{path.name}.{times + 1}"))
