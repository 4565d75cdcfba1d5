"""rollouts.parquet: a stage's response to every held-out row, beside that of the policy it started from."""

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.files import open_atomically

SCHEMA = pa.schema(
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
KEPT = ("response", "reward", "tokens", "cut")


class Answer(NamedTuple):
    """A held-out row with a policy's response to it and what that earned; None: not kept.

    Where several responses to the row were scored, the reward is their mean and no response is kept.
    """

    environment: str
    split: str
    line: int
    prompt: str
    reward: float
    response: str | None = None
    tokens: int | None = None
    cut: bool | None = None


def beside_fresh_model(answers: list[Answer], before: list[Answer]) -> pa.Table:
    """The table of a stage that starts from a fresh model, whose answers are `before`."""
    return _table(answers, {(it.split, it.line): (it.prompt, _kept(it, "before")) for it in before})


def beside_parent(answers: list[Answer], parent: pa.Table | None) -> pa.Table:
    """The table of a stage whose parent's is `parent`; of rows that this has not, the columns of before are null.

    A parent that says nothing of a first stage is that itself.
    """
    before = {}
    for row in parent.to_pylist() if parent is not None else ():
        first = row["reward_after"] if row["reward_first"] is None else row["reward_first"]
        columns = {f"{name}_before": row[f"{name}_after"] for name in KEPT} | {"reward_first": first}
        before[row["split"], row["line"]] = row["prompt"], columns
    return _table(answers, before)


def _table(answers: list[Answer], before: dict[tuple[str, int], tuple[str, dict[str, Any]]]) -> pa.Table:
    rows = []
    for answer in answers:
        prompt, columns = before.get((answer.split, answer.line), (None, {}))
        row = answer._asdict() | _kept(answer, "after") | (columns if prompt == answer.prompt else {})
        rows.append({name: row.get(name) for name in SCHEMA.names})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _kept(answer: Answer, when: str) -> dict[str, Any]:
    return {f"{name}_{when}": getattr(answer, name) for name in KEPT}


def write_rollouts(table: pa.Table, path: Path) -> None:
    """Write the table atomically."""
    with open_atomically(path) as (file,):
        pq.write_table(table, file)
