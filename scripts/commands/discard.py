"""Remove run directories that were set aside. Nothing else ever removes them."""

import argparse
import re
import shutil
from pathlib import Path

from scripts.errors import UserError
from scripts.files import amount
from scripts.stage.disk import tree_bytes
from scripts.stage.owner import describe, is_alive, read_owner


def discard(path: Path) -> int:
    """Remove one set-aside run directory; the bytes that this frees. UserError for anything that is not one."""
    if not re.fullmatch(r"run\.[0-9a-f]{16}", path.name) or not (path / "identity.json").is_file():
        raise UserError(
            f"{path}: not a run directory that was set aside (run.<identity>); stagecoach status lists them"
        )
    owner = path.with_name("owner.json")
    if is_alive(owner):
        raise UserError(f"{path}: {describe(read_owner(owner))} trains this stage; wait for it or stop it first")
    size = tree_bytes(path)
    doomed = path.with_name(f".{path.name}.removing")
    path.rename(doomed)
    shutil.rmtree(doomed)
    return size


def run(arguments: argparse.Namespace) -> None:
    """Remove what was named."""
    for path in arguments.paths:
        print(f"{path}: removed, {amount(discard(path))} freed")
