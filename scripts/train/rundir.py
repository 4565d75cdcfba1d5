"""Run directories: where a stage trains. They bear the identity of what they train and outlive every failure.

::

    run/identity.json           identity and facts, written before the first step
    run/checkpoints/step_N/     whole checkpoints; files.json in each lists its files with sizes and hashes
    run/saving/                 a checkpoint while it is written
    run/metrics.jsonl           one line a step, as logged; a resumed step is logged again
    run.<identity>/             a run directory set aside because the stage now trains something else
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import describe_files, fsync_directory, read_json, replace_directory, sync_tree, write_json

_STEP = re.compile(r"step_(\d+)")
FILES = "files.json"


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint in a run directory."""

    step: int
    path: Path


def open_run_directory(run: Path, identity: str, facts: dict[str, Any]) -> None:
    """Make `run` the run directory of this identity.

    A directory of another identity is set aside under its own name, and one of this identity that was set aside
    before comes back, so nothing trained is lost or resumed by mistake.
    """
    owner = _identity_in(run)
    if owner == identity:
        return
    if run.exists():
        if owner is None and any(run.iterdir()):
            raise UserError(f"{run}: holds files but no identity.json, so nobody knows what it trained; move it away")
        if owner is None:
            run.rmdir()
        else:
            run.rename(_aside(run, owner))
    if _aside(run, identity).exists():
        _aside(run, identity).rename(run)
    else:
        with replace_directory(run) as fresh:
            (fresh / "checkpoints").mkdir()
            write_json(fresh / "identity.json", {"identity": identity, **facts})
    fsync_directory(run.parent)


def _identity_in(run: Path) -> str | None:
    record = run / "identity.json"
    return read_json(record)["identity"] if record.exists() else None


def _aside(run: Path, identity: str) -> Path:
    return run.with_name(f"{run.name}.{identity}")


def seal_checkpoint(saved: Path, run: Path, step: int) -> Checkpoint:
    """Publish a saved checkpoint under its step: list its files, sync, rename."""
    write_json(saved / FILES, describe_files(saved))
    sync_tree(saved)
    path = run / "checkpoints" / f"step_{step}"
    path.parent.mkdir(exist_ok=True)
    saved.rename(path)
    fsync_directory(path.parent)
    return Checkpoint(step, path)


def checkpoints(run: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run directory, oldest first: every listed file is there with its size."""
    found = []
    for path in (run / "checkpoints").glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and _is_whole(path):
            found.append(Checkpoint(int(match[1]), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The whole checkpoint with the highest step, or None."""
    return max(checkpoints(run), key=lambda checkpoint: checkpoint.step, default=None)


def _is_whole(path: Path) -> bool:
    if not (path / FILES).is_file():
        return False
    listed = read_json(path / FILES)
    return all((path / name).is_file() and (path / name).stat().st_size == it["bytes"] for name, it in listed.items())
