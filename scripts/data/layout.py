"""A blend's splits in the layout of Nemotron's data preparation: links ``train/``, ``val/`` and ``test/data.jsonl``.

``manifest.json`` has the keys that Nemotron's trainers read by ``data.manifest_path``: absolute paths, empty for a
split that the blend lacks.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from scripts.errors import run_program
from scripts.files import canonical_json, replace_directory, sha256_text, write_json
from scripts.records import Manifest, read_record

SIDES = {"train": "train", "val": "validation", "test": "test"}


def lay_out(manifest: Path, output: Path) -> dict[str, Any]:
    """Link the splits beside `manifest` below `output`; write and return the manifest of the layout."""
    known = read_record(manifest, Manifest)
    sides = {name: known[side] for name, side in SIDES.items() if known.get(side, {}).get("rows")}
    described = {
        **{name: str(output.absolute() / name / "data.jsonl") if name in sides else "" for name in SIDES},
        "mode": "local_split",
        "source": f"{known['source']['name']}@{known['source']['revision']}",
        "run_hash": sha256_text(canonical_json({name: side["sha256"] for name, side in sides.items()}))[:16],
        **{f"{name}_rows": side["rows"] for name, side in sides.items()},
    }
    with replace_directory(output) as fresh:
        for name in sides:
            (fresh / name).mkdir()
            split = manifest.absolute().with_name(f"{name}-split.jsonl")
            (fresh / name / "data.jsonl").symlink_to(os.path.relpath(split, fresh.absolute() / name))
        write_json(fresh / "manifest.json", described)
    return described


def main() -> None:
    """Command line of the layout."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.layout", description=__doc__.split("\n")[0])
    parser.add_argument("--manifest", type=Path, required=True, help="the blend's manifest.json, splits beside it")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args()
    lay_out(arguments.manifest, arguments.output)


if __name__ == "__main__":
    run_program(main)
