"""Tables in Parquet: the columns of rollouts.parquet, and how a table is read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.errors import UserError
from scripts.records import AGAIN, read_bytes

ROLLOUTS = pa.schema(
    [
        pa.field("environment", pa.string()),
        pa.field("split", pa.string(), metadata={"about": "the blend whose validation split holds the row"}),
        pa.field("line", pa.int64(), metadata={"about": "of the row in that split, from 1"}),
        pa.field("prompt", pa.string(), metadata={"about": "its last user message, for reading"}),
        pa.field("response_before", pa.string(), metadata={"about": "of what the stage started from; null: not kept"}),
        pa.field("response_after", pa.string(), metadata={"about": "of the stage's export; null: not kept"}),
        pa.field("reward_before", pa.float64(), metadata={"about": "0 to 1; null: it was not scored on this row"}),
        pa.field("reward_after", pa.float64()),
        pa.field("reward_first", pa.float64(), metadata={"about": "of the first stage of the chain that was scored"}),
        pa.field("tokens_before", pa.int64()),
        pa.field("tokens_after", pa.int64()),
        pa.field("cut_before", pa.bool_(), metadata={"about": "whether the response is cut at the length limit"}),
        pa.field("cut_after", pa.bool_()),
    ]
)


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """A table that Stagecoach wrote, with nulls for columns that it has not; UserError where it is damaged."""
    try:
        table = pq.read_table(pa.BufferReader(read_bytes(path)))
        missing = [field for field in schema if field.name not in table.column_names]
        for field in missing:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return table.select(schema.names).cast(schema)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; ask Snakemake for it: snakemake {path}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); {AGAIN}") from None
