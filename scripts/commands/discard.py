"""Remove unused trainings. Nothing else ever removes a training."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from scripts.errors import UserError, user_name, warn
from scripts.files import amount
from scripts.recipe.load import load_config
from scripts.stage.removal import (
    Discarded,
    discard_all,
    finish_discards,
    line_of,
    reason_to_stay,
    trainings,
    tree_bytes,
)
from scripts.stage.uses import find_uses


def named(paths: list[Path], root: Path) -> list[Path]:
    """Return the trainings at the ends of paths and links; UserError for a path of anything else."""
    known = {os.path.realpath(folder): folder for folder in trainings(root)}
    for path in paths:
        if os.path.realpath(path) not in known:
            raise UserError(f"{path}: no training below {root}; stagecoach discard --dry-run lists them")
    return [known[os.path.realpath(path)] for path in paths]


def discarded(root: Path, paths: list[Path], is_dry: bool) -> Iterator[Discarded]:
    """Remove trainings, or with `is_dry` only look, and yield the outcome for each.

    Without `paths` all unused trainings are removed, but for trainings of further users.
    """
    asked = named(paths, root) if paths else trainings(root)
    uses = find_uses(root)
    going = []
    for folder in asked:
        try:
            owner = folder.stat().st_uid
        except FileNotFoundError:  # another process discards, too
            yield Discarded(folder, stays="it is gone already")
            continue
        reason = reason_to_stay(folder, uses)
        if reason:
            yield reason
        elif not paths and owner != os.geteuid():
            yield Discarded(folder, stays=f"nothing leads to it, but it is {user_name(owner)}'s; name it to remove it")
        else:
            going.append(folder)
    if is_dry:
        for folder in going:
            yield Discarded(folder, freed=tree_bytes(folder))
    else:
        yield from discard_all(going, root)


def run(arguments: argparse.Namespace) -> int:
    """Remove the named trainings, or all unused ones.

    Return 1 where a named training stays, or an unused one.
    """
    root = Path(load_config(arguments.config, {}).results)
    freed, status, is_dry = 0, 0, arguments.dry_run
    for place, why in find_uses(root).unknown.items():
        warn(f"{place}: {why}; while that is so, nothing is removed")
    if not is_dry:
        for each in finish_discards(root):
            print(f"{each.folder}: goes on from a removal that was cut off: {line_of(each)}", flush=True)
            freed += each.freed
    for each in discarded(root, arguments.paths, is_dry):
        print(f"{each.folder}: {line_of(each, is_dry)}", flush=True)
        freed += each.freed
        if each.stays and (arguments.paths or each.is_trouble):
            status = 1
    print(f"{amount(freed)} {'would be freed' if is_dry else 'freed'}")
    return status
