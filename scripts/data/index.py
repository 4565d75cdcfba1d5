"""Split files of a blend of images, which a loader of NeMo-RL splits: lines that identify the rows.

A change of a row, or of the loader's split, changes these files and so their SHA-256 in the manifest.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from scripts.data.archives import Extracted
from scripts.data.source_record import origin_of
from scripts.errors import UserError
from scripts.files import open_atomically, write_json
from scripts.recipe.blend import IMAGE_FILES
from scripts.records import SourceRecord, read_record

FILES = ("train-split.jsonl", "val-split.jsonl", "check.json", "manifest.json")

Line = dict[str, Any]
Source = Annotated[Path, "folder of the published files"]
Record = Annotated[Path, "the source's record.json"]
Output = Annotated[Path, "the blend's folder"]
Threads = Annotated[int, "reads and writes at once"]


def start_blend(source: Path, form: str, output: Path, *marks: str) -> None:
    """Remove every file by which the output looks complete; UserError if the source lacks a file of the form."""
    if missing := [name for name in IMAGE_FILES[form] if not (source / name).is_file()]:
        raise UserError(f"{source}: has no {', '.join(missing)}; fetch the blend again, or put it there")
    for name in (*FILES, *marks):
        (output / name).unlink(missing_ok=True)


def write_index(
    output: Path, record: Path, images: Extracted, checked: Line, train: list[Line], loader: Line, held_out: int
) -> None:
    """Write both splits, ``check.json`` and, last, ``manifest.json``, without environments.

    `checked` counts the rows for ``check.json``; of the rows kept, the loader holds out `held_out`.
    """
    checked = {**checked, "images": images.files}
    print(f"{output}: {json.dumps(checked)}", flush=True)
    origin = origin_of(read_record(record, SourceRecord), output.name)
    splits = {
        "train": (checked["kept"] - held_out, [*train, {"images": asdict(images)}]),
        "validation": (held_out, [{"loader": checked["format"], **loader}]),
    }
    sides = {}
    with open_atomically(output / "train-split.jsonl", output / "val-split.jsonl") as files:
        for file, (name, (count, lines)) in zip(files, splits.items(), strict=True):
            content = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
            file.write(content)
            sha256 = hashlib.sha256(content).hexdigest()
            sides[name] = {"rows": count, "bytes": len(content), "sha256": sha256, "environments": {}}
    write_json(output / "check.json", {"blend": output.name, **checked})
    write_json(output / "manifest.json", {"blend": output.name, "source": origin, **sides})
