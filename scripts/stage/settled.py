"""What a stage is and how far that is trained, by its own files and those of the stages before it, for rules to ask."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from scripts.errors import UserError
from scripts.recipe.resolve import read_config
from scripts.records import Choice, read_if_there
from scripts.stage.identity import identity_of, stage_facts
from scripts.stage.reach import last_step
from scripts.stage.rundir import newest_step, run_of
from scripts.stage.stage import Stage
from scripts.stage.twin import twin_checkpoints

Published = Callable[[str], str | None]


def steps_left(stage: Stage) -> int | None:
    """The steps from the newest checkpoint of exactly what the stage is now to its last one; None: nobody knows.

    All of them where something is missing to tell, and when a stage it descends from will train first.
    """
    start, last = _progress(stage)
    return None if last is None else max(0, last - start)


def is_trained(stage: Stage) -> bool:
    """Whether a training job would only publish what exactly the stage is now already trained."""
    start, last = _progress(stage)
    return last is not None and 0 < start >= last


def _progress(stage: Stage) -> tuple[int, int | None]:
    """The newest step of exactly what the stage is now, and its last one; None: nobody knows."""
    identity, planned = settled_identity(stage), stage.planned
    if identity is None or planned is None:
        return 0, planned
    run = run_of(stage.paths.run, identity)
    start = newest_step(run)
    if start < last_step(run, start, planned) and (twins := twin_checkpoints(stage, identity, start)):
        start, run = twins[0][0].step, twins[0][1]
    return start, last_step(run, start, planned)


def settled_identity(stage: Stage) -> str | None:
    """A stage's identity by its files; None where one is missing, or a stage before it will train first.

    Of a choice, that of what it chose.
    """
    if stage.name in stage.recipe.choices:
        return chosen_identity(stage, lambda name: _published_identity(replace(stage, name=name)))
    read = [stage.paths.config, stage.manifest, *([stage.parent_export_record] if stage.parent_export_record else [])]
    identity = _identity(*read, versions=tuple(map(_version, read)))
    parent = stage.parent
    if identity is None or parent is None:
        return identity
    return identity if _published_identity(parent) else None


def _published_identity(stage: Stage) -> str | None:
    """The identity of a stage's export, where that is what the stage is now."""
    identity = settled_identity(stage)
    return identity if stage.exported_identity == identity else None


@cache
def _identity(
    config: Path, manifest: Path, export: Path | None = None, *, versions: tuple[tuple[int, int] | None, ...]
) -> str | None:
    """The identity that the files tell; `versions` is another where one was written again."""
    if None in versions:
        return None
    try:
        return identity_of(stage_facts(read_config(config), manifest, export))
    except UserError:
        return None


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a record is written again; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def chosen_identity(stage: Stage, published: Published) -> str | None:
    """The identity of what a choice chose; None where it is not made, or was of other candidates than there are now."""
    choice, record = stage.recipe.choices[stage.name], read_if_there(stage.paths.choice, Choice)
    if record is None or record["by"] != choice.by:
        return None
    chosen_from = {candidate["name"]: candidate["identity"] for candidate in record["candidates"]}
    if chosen_from.keys() != {*choice.among} or any(published(name) != chosen_from[name] for name in choice.among):
        return None
    return chosen_from[record["chosen"][0]]
