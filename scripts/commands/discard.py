"""Remove trainings that no run links to. Nothing else ever removes them."""

import argparse
import os
import shutil
from pathlib import Path

from scripts.errors import UserError
from scripts.files import amount
from scripts.recipe.load import load_config
from scripts.stage.owner import hold
from scripts.stage.paths import owner_of
from scripts.stage.store import tree_bytes, unlinked


def discard(folder: Path, root: Path) -> int:
    """Remove a folder of the store and return the bytes freed; UserError where a run links to it or trains in it."""
    if os.path.realpath(folder) not in map(os.path.realpath, unlinked(root)):
        raise UserError(
            f"{folder}: no training below {root} that nothing links to; stagecoach discard --dry-run lists them"
        )
    with hold(owner_of(folder)):
        size = tree_bytes(folder)
        doomed = folder.with_name(f".{folder.name}.removing")
        folder.rename(doomed)
        shutil.rmtree(doomed)
    return size


def run(arguments: argparse.Namespace) -> None:
    """Remove the named trainings, or all that no run links to."""
    root = Path(load_config(arguments.config, {}).results)
    freed = 0
    for folder in arguments.paths or unlinked(root):
        size = tree_bytes(folder) if arguments.dry_run else discard(folder, root)
        print(f"{folder}: {amount(size)}{'' if arguments.dry_run else ' freed'}")
        freed += size
    print(f"{amount(freed)} {'would be freed' if arguments.dry_run else 'freed'}")
