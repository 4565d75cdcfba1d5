"""benchmarks.json: an export's scores on benchmarks beside those of what its stage started from.

What a benchmark asked and what came back lies, a file for each export and question, in a store that all runs of a
results folder share; so nothing is scored twice, and no score can be taken for another model's.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.files import open_atomically, write_json
from scripts.records import Benchmark, Benchmarks, ExportRecord, read_record
from scripts.stage.bootstrap import Change, changes
from scripts.stage.tables import read_table

NORMAL_95 = 1.959964
SAME = 1e-6
SCORES = b"scores"
DOCUMENTS = pa.schema(
    [
        pa.field("benchmark", pa.string()),
        pa.field("task", pa.string(), metadata={"about": "the one of a group's that asks the document"}),
        pa.field("document", pa.int64(), metadata={"about": "its place in the task's split, from 0"}),
        pa.field("score", pa.float64(), metadata={"about": "null: the metric is no number a document"}),
        pa.field("prompt", pa.string()),
        pa.field("response", pa.string()),
    ]
)


class Kept(NamedTuple):
    """What the store holds of an export and a key: the entries by benchmark, and their documents."""

    scores: dict[str, Benchmark]
    documents: pa.Table


def path_in(store: Path, content: str, key: str) -> Path:
    """Where the store keeps what an export answered to the question of this key."""
    return store / content / f"{key}.parquet"


def keep(path: Path, scores: dict[str, Benchmark], documents: list[dict[str, Any]]) -> None:
    """Put scores and documents into the store, as one file that is whole or not there."""
    table = pa.Table.from_pylist(documents, schema=DOCUMENTS)
    with open_atomically(path) as (file,):
        pq.write_table(table.replace_schema_metadata({SCORES: json.dumps(scores)}), file)


def read_kept(path: Path) -> Kept:
    """What the store keeps there; UserError where it is damaged."""
    table = read_table(path, DOCUMENTS)
    return Kept(json.loads(pq.read_metadata(path).metadata[SCORES]), table)


def write_benchmarks(export: Path, scores: dict[str, Benchmark], output: Path, **more: Any) -> None:
    """Write benchmarks.json, with `more` keys; `export` is hf/record.json."""
    record = read_record(export, ExportRecord)
    known = {key: record[key] for key in ("stage", "step", "content")}
    write_json(output, {**known, **more, "benchmarks": scores})


def beside_parent(
    scores: dict[str, Benchmark], content: str, parent: Benchmarks | None, store: Path
) -> dict[str, Benchmark]:
    """The scores with those before, and the changes with their intervals.

    Only what the parent's export was asked by the same key is compared. `first` is the content of the first export of
    the chain that was.
    """
    befores = {
        name: before
        for name, entry in scores.items()
        if parent and (before := parent["benchmarks"].get(name)) and before.get("key") == entry["key"]
    }
    firsts = {name: before.get("first") or parent["content"] for name, before in befores.items()}
    from_parent = _changes(scores, content, dict.fromkeys(befores, parent and parent["content"]), store)
    from_first = _changes(scores, content, firsts, store)
    return {
        name: {
            **entry,
            "before": befores[name]["score"] if name in befores else None,
            "change": from_parent.get(name),
            "change_from_first": from_first.get(name),
            "first": firsts.get(name),
        }
        for name, entry in scores.items()
    }


def _changes(
    scores: dict[str, Benchmark], content: str, since: dict[str, str], store: Path
) -> dict[str, Change | None]:
    """The changes since other exports, by their content: paired by document where the score is the documents' mean."""
    paired, unpaired = {}, {}
    for name, other in since.items():
        path = path_in(store, other, scores[name]["key"])
        if not path.exists():
            continue
        before, after = read_kept(path), read_kept(path_in(store, content, scores[name]["key"]))
        values = [document_scores(kept, name) for kept in (before, after)]
        if values[0] is not None and values[1] is not None and len(values[0]) == len(values[1]):
            paired[name] = values[1] - values[0]
        else:
            unpaired[name] = unpaired_change(before.scores[name], after.scores[name])
    return unpaired | changes(paired)[0]


def document_scores(kept: Kept, name: str) -> np.ndarray | None:
    """The scores of a benchmark's documents, in their order; None where its score is not their mean."""
    rows = kept.documents.sort_by([("task", "ascending"), ("document", "ascending")]).to_pandas()
    values = rows.loc[rows["benchmark"] == name, "score"].to_numpy(float)
    is_mean = len(values) and abs(values.mean() - kept.scores[name]["score"]) < SAME
    return values if is_mean else None


def unpaired_change(before: Benchmark, after: Benchmark, spread: float = NORMAL_95) -> Change | None:
    """The change of two independent scores by their standard errors, which overstate it where the documents are one.

    The interval reaches `spread` standard errors of the change to either side; None where a score has none.
    """
    errors = [entry.get("stderr") for entry in (before, after)]
    if None in errors:
        return None
    value, half = after["score"] - before["score"], spread * math.hypot(*errors)
    return {key: round(bound, 6) for key, bound in (("value", value), ("low", value - half), ("high", value + half))}


def interval_of(entry: Benchmark) -> Change | None:
    """A score with its 95 % interval by the standard error; None where there is none."""
    error = entry.get("stderr")
    if error is None:
        return None
    half = NORMAL_95 * error
    return {"value": entry["score"], "low": entry["score"] - half, "high": entry["score"] + half}
