"""The splits of a blend whose rows a loader of NeMo-RL reads and splits by itself: lines that pin what it reads.

Whatever changes one of the loader's rows, or how it splits them, changes these files, and so their SHA-256 in the
manifest, by which a stage knows its data.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.data.source_record import origin_of
from scripts.errors import UserError
from scripts.files import open_atomically, read_json, write_json

FILES = ("train-split.jsonl", "val-split.jsonl", "check.json", "manifest.json")

Line = dict[str, Any]


def require_files(source: Path, names: Iterable[str]) -> None:
    """UserError when a published file is not in the folder."""
    if missing := [name for name in names if not (source / name).is_file()]:
        raise UserError(f"{source}: has no {', '.join(missing)}; fetch the blend again, or put it there")


def remove_files(output: Path, names: Iterable[str]) -> None:
    """Remove what earlier work left, so that nothing looks complete before it is."""
    for name in (*FILES, *names):
        (output / name).unlink(missing_ok=True)


def rows_to_read(train: int, most: int) -> int:
    """How many rows a loader must read to train on `train` of them, when it holds out a tenth, but `most` at most."""
    return train + min(most, -(-train // 9))


def write_index(
    output: Path, record: Path, train: list[Line], validation: list[Line], rows: tuple[int, int], checked: Line
) -> None:
    """Write both splits, ``check.json`` and, last, ``manifest.json``.

    `rows` are those that the loader takes for training and for validation; `checked` is what ``check.json`` tells. No
    environment of Gym rewards such rows, so the manifest names none.
    """
    origin = origin_of(read_json(record), output.name)
    sides = {}
    with open_atomically(output / "train-split.jsonl", output / "val-split.jsonl") as files:
        for name, file, lines, count in zip(("train", "validation"), files, (train, validation), rows, strict=True):
            content = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)
            file.write(content)
            sha256 = hashlib.sha256(content).hexdigest()
            sides[name] = {"rows": count, "bytes": len(content), "sha256": sha256, "environments": {}}
    write_json(output / "check.json", {"blend": output.name, **checked})
    write_json(output / "manifest.json", {"blend": output.name, "source": origin, **sides})
