"""A blend's splits in the layout of Nemotron's data preparation: links ``train/``, ``val/`` and ``test/data.jsonl``.

``manifest.json`` has the keys that Nemotron's trainers read by ``data.manifest_path``: absolute paths, empty for a
split that the blend lacks.
"""

import os
from pathlib import Path
from typing import Annotated

from scripts.files import canonical_json, replace_directory, sha256_text, write_json
from scripts.program import run_command_line
from scripts.records import Manifest, read_record

SIDES = {"train": "train", "val": "validation", "test": "test"}


def lay_out(
    manifest: Annotated[Path, "the blend's manifest.json, splits beside it"], output: Annotated[Path, "folder to make"]
) -> None:
    """Link the splits beside `manifest` below `output`, and write the manifest of the layout."""
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


if __name__ == "__main__":
    run_command_line(lay_out)
