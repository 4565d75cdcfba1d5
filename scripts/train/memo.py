"""Whether a training job would only publish again what its run directory already holds."""

from functools import cache
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.resolve import planned_step, read_config
from scripts.train.identity import identity_of, stage_facts
from scripts.train.rundir import FILES, identity_in


def holds_planned_step(config: Path, manifest: Path, parent_export: Path | None, run: Path) -> bool:
    """Whether the planned step of exactly this identity lies in the run directory, or in the one set aside for it.

    False when something is missing to tell. Files are not hashed here: the job itself does that, and trains on where
    one is damaged.
    """
    read = [config, manifest, run / "identity.json", *([parent_export] if parent_export else [])]
    place = _planned_checkpoint(config, manifest, parent_export, run, tuple(_version(path) for path in read))
    return place is not None and (place / FILES).is_file()


@cache
def _planned_checkpoint(
    config: Path, manifest: Path, parent_export: Path | None, run: Path, _: tuple[tuple[int, int] | None, ...]
) -> Path | None:
    """Where the planned step of this identity would lie."""
    try:
        settings = read_config(config)
        identity = identity_of(stage_facts(settings, manifest, parent_export))
        planned = planned_step(settings)
        if identity_in(run) != identity:
            run = run.with_name(f"{run.name}.{identity}")
    except (UserError, KeyError, TypeError):
        return None
    return run / "checkpoints" / f"step_{planned}"


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a record is written again."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
