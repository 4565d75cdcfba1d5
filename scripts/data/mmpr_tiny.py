"""Lay OpenGVLab/MMPR-Tiny out as NeMo-RL's loader reads it, and check that every row's image is there.

The loader joins its cache folder and the path of a row's first image, skips no row, and validates on the first rows:
the holdout, or a tenth. With ``.mmpr_ready`` there, nothing is fetched.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

from scripts.data.index import Output, Record, Source, Threads, extract_folder, start_blend, write_index
from scripts.data.published import PublishedFile
from scripts.data.source_record import files_below
from scripts.errors import UserError
from scripts.files import filled_by_program, sha256_file, write_text
from scripts.program import run_command_line
from scripts.rows.jsonl import listed

TABLE = "mmpr_tiny.parquet"
IMAGES = "MMPR-Tiny/images"
READY = ".mmpr_ready"
COLUMNS = ["prompt", "reward_model", "images"]
SHOWN = 10


def prepare_mmpr_tiny(
    source: Source,
    source_record: Record,
    output: Output,
    holdout: Annotated[int, "rows for validation, as the stage's data.val_size"],
    threads: Threads = 1,
) -> None:
    """Write images, table, the loader's mark and the index of the splits below `output`.

    UserError, and neither mark nor manifest, for a row that would stop the loader.
    """
    start_blend(source, "mmpr_tiny", output, READY, TABLE)
    images = extract_folder(source / "images.zip", "images", output / IMAGES, threads)
    rows, several = _check_rows(source / TABLE, output)
    validation = min(holdout, rows // 10)
    if validation == 0:
        raise UserError(f"{source / TABLE}: {rows} rows are too few to hold any out; is it all of MMPR-Tiny?")
    with filled_by_program(output / TABLE) as fresh:
        shutil.copyfile(source / TABLE, fresh)
    write_text(output / READY, "ready\n")
    checked = {"format": "mmpr_tiny", "rows": rows, "kept": rows, "several_images": several}
    table = {"table": TABLE, "rows": rows, "sha256": sha256_file(output / TABLE)}
    write_index(output, source_record, images, checked, [table], {"first_rows": validation}, validation)


def _check_rows(table: Path, base: Path) -> tuple[int, int]:
    """Return the number of rows, and of rows with several images; the loader takes the first image."""
    known = {f"{IMAGES}/{path}" for path in files_below(base / IMAGES)}
    rows = several = 0
    problems = []
    try:
        for batch in PublishedFile(table, str(table)).batches(COLUMNS):
            batch.require(COLUMNS)
            for row in batch.rows:
                if problem := _problem(row, base, known):
                    problems.append(f"row {rows}: {problem}")
                else:
                    several += len(row["images"]) > 1
                rows += 1
    except UserError as error:
        raise UserError(f"{error}; damaged, or not MMPR-Tiny's table; delete the file and fetch again") from None
    if problems:
        shown = "\n".join(listed(problems[:SHOWN], len(problems)))
        raise UserError(
            f"{table}: the loader would stop at {len(problems)} of {rows} rows; fetch the table and images.zip at one "
            f"revision\n{shown}"
        )
    return rows, several


def _problem(row: dict[str, Any], base: Path, known: set[str]) -> str | None:
    images, prompt, reward = (row[column] for column in ("images", "prompt", "reward_model"))
    image = images[0].get("path") if images and isinstance(images[0], dict) else None
    if not isinstance(image, str):
        return "images names no path"
    if image not in known and not (base / image).is_file():
        return f"image {image} is not in images.zip"
    question = next((message["content"] for message in prompt or () if message.get("role") == "user"), None)
    if not isinstance(question, str) or not question:
        return "prompt has no text of the user"
    answer = reward.get("ground_truth") if isinstance(reward, dict) else None
    return None if isinstance(answer, str) and answer else "reward_model has no text ground_truth"


if __name__ == "__main__":
    run_command_line(prepare_mmpr_tiny)
