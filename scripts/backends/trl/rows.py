"""A stage's training rows: tokenized once for all attempts, memory-mapped, in file order; the order of training.

The file is ``<stage>/tokens/<key>/rows.arrow``. The key hashes split, number of rows, tokenizer or processor with its
chat template, settings, code and libraries. A stage keeps the rows of its last training.
"""

import inspect
import math
import shutil
import time
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset

from scripts import files
from scripts.backends.protocol import TrainingJob
from scripts.backends.trl import tokenization
from scripts.backends.trl.collectives import as_rank_0_says, rank
from scripts.backends.trl.tokenization import lines_of
from scripts.errors import UserError
from scripts.records import Manifest, read_record
from scripts.rows import examples, kinds, messages, prompts
from scripts.rows.chat_format import PinnedClock
from scripts.rows.random_order import random_order

BATCH = 128
PROGRESS_SECONDS = 20.0
CODE = (__file__, tokenization.__file__, examples.__file__, kinds.__file__, messages.__file__, prompts.__file__)
LIBRARIES = ("tokenizers", "transformers", "jinja2")


def epochs_in_random_order(rows: int, count: int, seed: int) -> list[int]:
    """Return the places of `count` rows to train on, of a split of `rows`: epoch after epoch, the last one cut short.

    Each epoch has every row once. Its order follows from the seed and the epoch's number alone, so it is the same for
    any number of processes and after any resume.
    """
    places: list[int] = []
    for epoch in range(math.ceil(count / rows)):
        places += random_order(rows, f"order of rows, seed {seed}, epoch {epoch}").tolist()
    return places[:count]


def training_rows(job: TrainingJob, count: int | None, schema: pa.Schema, prepare: partial) -> Dataset:
    """Return the first `count` rows of the training split, or all of fewer or of None, as columns on disk.

    `prepare` makes rows of the schema from lines, by keyword arguments alone: `processor`, settings. Later rows
    replace rows that `prepare` leaves out.
    """
    split = read_record(job.train_split.with_name("manifest.json"), Manifest)["train"]
    count = split["rows"] if count is None else min(count, split["rows"])
    folder = job.stage_directory / "tokens"
    file = folder / as_rank_0_says(_key(split["sha256"], count, prepare) if rank() == 0 else "") / "rows.arrow"
    if rank() == 0:
        for other in folder.glob("*"):
            if other != file.parent:
                shutil.rmtree(other, ignore_errors=True)
        if not file.exists():
            _write(file, job, count, schema, prepare)
    while not file.exists():  # the ranks are ended together when rank 0 fails
        time.sleep(0.1)
    return Dataset.from_file(str(file))


def _key(split: str, count: int, prepare: partial) -> str:
    settings = dict(prepare.keywords)
    template = settings["processor"].chat_template
    with files.scratch_folder() as folder:
        settings.pop("processor").save_pretrained(folder)
        facts = {
            "split": split,
            "rows": count,
            "settings": settings,
            "processor": files.describe_files(folder),
            "code": [files.sha256_file(Path(file)) for file in (inspect.getfile(prepare.func), *CODE)],
            "libraries": [version(name) for name in LIBRARIES],
            **({"day": str(PinnedClock.day)} if "strftime_now" in str(template) else {}),
        }
    return files.sha256_text(files.canonical_json(facts))[:16]


def _write(file: Path, job: TrainingJob, count: int, schema: pa.Schema, prepare: partial) -> None:
    lines, done, cut, said = lines_of(job.train_split), 0, 0, time.monotonic()
    with (
        files.explain_write_errors(file.parent),
        files.replace_directory(file.parent) as fresh,
        (fresh / file.name).open("wb") as output,
        pa.ipc.new_stream(output, schema) as writer,
    ):
        while batch := list(islice(lines, min(BATCH, count - done))):
            rows = prepare(batch)
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
            done += len(rows)
            cut += sum(row.get("is_cut", False) for row in rows)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                print(f"{job.stage}: tokenized {done:,} of {count:,} rows", flush=True)
        if not done:
            raise UserError(f"{job.train_split}: every row is left out; raise data.max_input_seq_length")
        if cut:
            found = f"{cut} of {done} rows ({cut / done:.1%}) are cut at policy.max_total_sequence_length"
            if cut / done > job.settings.max_truncated_share and job.resume_from is None:
                raise UserError(f"{job.train_split}: {found}; raise that, or max_truncated_share of stages.{job.stage}")
            print(f"{job.stage}: {found}", flush=True)
