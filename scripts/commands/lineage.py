"""Print a checkpoint's ancestors and verify them."""

import argparse
import json
import sys
from typing import Any

from scripts.records import Parent
from scripts.report.chain import Link, chain_text, read_chain
from scripts.report.verify import Verification, verify


def chain_json(chain: list[Link], found: Verification | None) -> dict[str, Any]:
    """Return the chain as JSON values: stages, parents first, and `problems` (null: not verified)."""
    stages = []
    for link in chain:
        record = {key: value for key, value in link.record.items() if key not in ("files", "parents")}
        parents = [_named(parent) for parent in link.record.get("parents", ())]
        if roles := link.record.get("roles"):
            record["roles"] = {role: _named(start) for role, start in roles.items()}
        place = {"directory": str(link.paths.directory), "on_disk": link.on_disk}
        stages.append(record | {"content": link.content, "parents": parents, **place})
    return {"stages": stages, "problems": None if found is None else found.problems}


def _named(start: Parent) -> dict[str, str]:
    return {key: start[key] for key in ("stage", "identity", "content")}


def run(arguments: argparse.Namespace) -> int:
    """Print and verify the chain; exit status 1: a problem was found."""
    chain = read_chain(arguments.checkpoint)
    if not arguments.json:
        print(chain_text(chain), flush=True)
    found = None if arguments.no_verify else verify(chain)
    if arguments.json:
        print(json.dumps(chain_json(chain, found), indent=2, ensure_ascii=False))
    if found is None:
        return 0
    for line in found.problems:
        print(line, file=sys.stderr)
    if not found.problems and not arguments.json:
        print(f"{found.files} files are as recorded ({found.bytes / 1e6:.1f} MB read)")
    return 1 if found.problems else 0
