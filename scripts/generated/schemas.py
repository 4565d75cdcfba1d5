"""The tables of a generated blend: sampled responses, and judged ones."""

import pyarrow as pa

RESPONSES = pa.schema(
    {
        "model": pa.int64(),  # its place in the source's `by`
        "line": pa.int64(),  # of the prompt in its training split, from 1
        "sample": pa.int64(),  # from 0
        "response": pa.string(),
        "tokens": pa.int64(),  # before the end token
        "cut": pa.bool_(),  # by the length limit
    }
)
JUDGED = pa.schema(
    [
        *RESPONSES,
        pa.field("environment", pa.string()),  # null: the prompt names none
        pa.field("reward", pa.float64()),  # null: no environment, or not judged
        pa.field("why", pa.string()),  # why it could not be judged
        pa.field("score", pa.float64()),  # by select.rank's reward model; null: there is none
    ]
)
