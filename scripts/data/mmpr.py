"""Lay OpenGVLab/MMPR out as NeMo-RL's MPO loader reads it, and check every row by the loader's rules.

The loader resolves paths from the folder above the meta file's, hence ``meta/`` beside ``MMPR/images`` and
``MMPR/annotations``. It skips a row with several images or a missing one, shuffles with seed 42, and holds out 2000
rows or a tenth.
"""

import hashlib
import posixpath
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from scripts.data.index import Output, Record, Source, Threads, extract_folder, start_blend, write_index
from scripts.data.source_record import files_below
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.program import run_command_line
from scripts.recipe.blend import MMPR_HOLDOUT
from scripts.rows.jsonl import parse_row

META, IMAGES = "meta/meta_public.json", "MMPR/images"
SEED = 42
SHOWN = 10
TOTALS = ("rows", "several_images", "missing_images", "kept")


@dataclass
class Subset:
    """A subset of the meta file, and the loader's use of its rows."""

    subset: str
    root: str
    annotation: str
    rows: int = 0
    kept: int = 0
    several_images: int = 0
    missing_images: int = 0
    sha256: str = ""


def prepare_mmpr(
    source: Source,
    source_record: Record,
    output: Output,
    threads: Threads = 1,
    missing_images: Annotated[float, "share of rows that may lack their image"] = 0.0,
) -> None:
    """Write images, annotations, meta file and the index of the splits below `output`.

    `missing_images` is the share of rows that may lack their image. UserError, and no manifest, for incomplete data.
    """
    start_blend(source, "mmpr", output, META)
    meta = _rewritten(source / "meta.json")
    extract_folder(source / "annotations.zip", "annotations", output / "MMPR/annotations", threads)
    if lost := [entry["annotation"] for entry in meta.values() if not (output / entry["annotation"]).is_file()]:
        raise UserError(
            f"{source}/annotations.zip: has no annotations for {len(lost)} of {len(meta)} subsets of meta.json: "
            f"{_listed(lost)}; fetch both files at one revision"
        )
    images = extract_folder(source / "images.zip", "images", output / IMAGES, threads)
    known = files_below(output / IMAGES)
    subsets = [
        _check_subset(output, Subset(name, entry["root"], entry["annotation"]), known) for name, entry in meta.items()
    ]
    totals = {key: sum(getattr(subset, key) for subset in subsets) for key in TOTALS}
    rows, _, lost, kept = totals.values()
    if lost > missing_images * rows:
        where = [f"{part.subset} ({part.missing_images} of {part.rows})" for part in subsets if part.missing_images]
        raise UserError(
            f"{source}/images.zip: lacks the images of {lost} of {rows} rows, which the loader would skip: "
            f"{_listed(where)}; fetch both archives at one revision, or let it pass (missing_images of the blend)"
        )
    if not (validation := min(MMPR_HOLDOUT, kept // 10)):
        raise UserError(
            f"{source}: of {rows} rows the loader keeps {kept}, too few to hold any out; is it all of MMPR?"
        )
    for subset in subsets:
        if (length := meta[subset.subset].get("length", subset.rows)) != subset.rows:
            print(f"{subset.annotation}: {subset.rows} rows, but meta.json says {length}", flush=True)
    write_json(output / META, meta)
    checked, loader = {"format": "mmpr", "subsets": len(subsets), **totals}, {"seed": SEED, "rows": validation}
    write_index(output, source_record, images, checked, [*map(asdict, subsets)], loader, validation)


def _rewritten(path: Path) -> dict[str, dict[str, Any]]:
    meta = read_json(path)
    if not isinstance(meta, dict) or not meta:
        raise UserError(f"{path}: must be an object of subsets; fetch it again")
    rewritten = {}
    for name, entry in meta.items():
        entry = entry if isinstance(entry, dict) else {}  # noqa: PLW2901
        root, annotation = _below(entry.get("root"), "images"), _below(entry.get("annotation"), "annotations")
        if root is None or annotation is None:
            raise UserError(f"{path}: subset {name} needs a root in images/ and an annotation in annotations/")
        rewritten[name] = entry | {"root": root, "annotation": annotation}
    return rewritten


def _below(path: Any, folder: str) -> str | None:
    """Return the tail of a published path, often absolute on the authors' disks, from MMPR's `folder` on."""
    parts = PurePosixPath(path.replace("\\", "/")).parts if isinstance(path, str) else ()
    indices = [index for index, part in enumerate(parts) if part == folder]
    if not indices or ".." in parts:
        return None
    start = next((index for index in indices if parts[index - 1].startswith("MMPR")), indices[0])
    return "/".join(("MMPR", *parts[start:]))


def _check_subset(base: Path, subset: Subset, known: set[str]) -> Subset:
    annotation, digest = base / subset.annotation, hashlib.sha256()
    for number, line, images in _rows(annotation):
        digest.update(line)
        subset.rows += 1
        if len(images) != 1:
            subset.several_images += 1
        elif posixpath.normpath(f"{subset.root}/{images[0]}").removeprefix(f"{IMAGES}/") in known:
            subset.kept += 1
        elif (base / subset.root / images[0]).exists():
            raise UserError(
                f"{annotation}:{number}: image {images[0]!r} is a folder, which the loader takes for an image"
            )
        else:
            subset.missing_images += 1
    subset.sha256 = digest.hexdigest()
    return subset


def _rows(annotation: Path) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield the annotations' lines with their images; UserError for a row that would stop the loader."""
    with annotation.open("rb") as file:
        for number, line in enumerate(file, start=1):
            row = parse_row(line.rstrip(b"\r\n"), annotation, number)
            image = row.get("image")
            images = image if isinstance(image, list) else [image]
            texts = [row.get(key) for key in ("question", "chosen", "rejected")]
            if not all(isinstance(text, str) for text in (*texts, *images)):
                raise UserError(
                    f"{annotation}:{number}: needs the texts image (one or a list), question, chosen and rejected; the "
                    "loader would stop here; is it another version of MMPR?"
                )
            yield number, line, images


def _listed(items: list[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


if __name__ == "__main__":
    run_command_line(prepare_mmpr)
