"""The tables metrics.parquet and rollouts.parquet, with columns by columns.yaml."""

from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from scripts.errors import UserError
from scripts.files import AGAIN, open_atomically, read_bytes
from scripts.program import run_command_line
from scripts.records import CheckpointRecord, read_record
from scripts.stage.progress import read_log

COLUMNS = yaml.load(Path(__file__).with_name("columns.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def _schema(name: str) -> pa.Schema:
    others = {"by_name": pa.map_(pa.string(), pa.float64()), "texts": pa.list_(pa.string())}
    return pa.schema(
        pa.field(
            column,
            others[kind] if kind in others else pa.type_for_alias(kind),
            metadata={"about": about} if about else None,
        )
        for column, (kind, about) in COLUMNS[name].items()
    )


METRICS, ROLLOUTS = _schema("metrics"), _schema("rollouts")
ROW = ["split", "line", "prompt"]
"""The columns that tell held-out rows apart."""


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a table that Stagecoach wrote, with nulls for absent columns; UserError where it is damaged."""
    content = read_bytes(path)
    try:
        tables = pq.read_table(pa.BufferReader(content)), schema.empty_table()
        return pa.concat_tables(tables, promote_options="permissive").select(schema.names).cast(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); {AGAIN}") from None


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table atomically."""
    with open_atomically(path) as (file,):
        pq.write_table(table, file)


def write_metrics(log: Path, output: Path, last_step: int, begun: int = 0) -> None:
    """Write a log's steps after `begun` up to `last_step` as metrics.parquet; UserError where a step is missing.

    What was measured before the first step is the row of step `begun`.
    """
    entries = [entry for entry in read_log(log) if begun <= entry["step"] <= last_step]
    missing = sorted(set(range(begun + 1, last_step + 1)) - {entry["step"] for entry in entries})
    if missing:
        raise UserError(f"{log}: no metrics of step {missing[0]} ({len(missing)} of {last_step} steps are missing)")
    rows = [{name: entry.get(name) for name in METRICS.names} for entry in entries]
    write_table(pa.Table.from_pylist(rows, schema=METRICS), output)


def main(
    record: Annotated[Path, "the stage's ckpt/record.json"],
    log: Annotated[Path, "the run directory's metrics.jsonl"],
    output: Annotated[Path, "metrics.parquet"],
) -> None:
    """Write metrics.parquet."""
    checkpoint = read_record(record, CheckpointRecord)
    begun = checkpoint["parents"][0]["step"] if "continues" in checkpoint["facts"] else 0
    last = checkpoint["selected"]["last"] if "selected" in checkpoint else checkpoint["step"]
    write_metrics(log, output, last, begun)


if __name__ == "__main__":
    run_command_line(main)
