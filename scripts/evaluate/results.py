"""Write held-out scores, whichever backend took them: each response in rollouts.parquet, the scores in eval.json."""

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from scripts.errors import warn
from scripts.files import sha256_file, write_json
from scripts.records import ExportRecord, read_record
from scripts.rows.thoughts import Told, split_response
from scripts.stage.bootstrap import Change, changes
from scripts.stage.tables import ROLLOUTS, ROW, write_table

KEPT = ("response", "reward", "tokens", "cut", "metrics")
MEAN = None
"""The key of the environments' mean, beside their names."""
METRICS = ("metrics_before", "metrics_after")
BEFORE, AFTER, FIRST = "reward_before", "reward_after", "reward_first"


class Answer(NamedTuple):
    """A policy's response to a held-out row with its reward; of several responses the mean reward, and no text."""

    environment: str
    split: str
    line: int
    prompt: str
    reward: float
    response: str | None = None
    tokens: int | None = None
    cut: bool | None = None
    metrics: dict[str, float] | None = None
    tags: list[str] | None = None


def beside_model(answers: list[Answer], before: list[Answer]) -> pa.Table:
    """Return the table of a stage that starts from a model, whose answers are `before`."""
    return _table(answers, _frame(before, "before").drop(columns=["environment", "tags"]))


def beside_parent(answers: list[Answer], parent: pa.Table | None) -> pa.Table:
    """Return a stage's table with the parent's rewards as those before, null for rows that the parent lacks.

    The parent is the chain's first stage where its table has no reward of a first stage.
    """
    rows = (ROLLOUTS.empty_table() if parent is None else parent).to_pandas()
    rows["reward_first"] = rows["reward_first"].fillna(rows["reward_after"])
    columns = {f"{name}_after": f"{name}_before" for name in KEPT}
    return _table(answers, rows[[*ROW, *columns, "reward_first"]].rename(columns=columns))


def _frame(answers: list[Answer], when: str) -> pd.DataFrame:
    frame = pd.DataFrame(answers, columns=Answer._fields)
    return frame.rename(columns={name: f"{name}_{when}" for name in KEPT})


def _table(answers: list[Answer], before: pd.DataFrame) -> pa.Table:
    rows = _frame(answers, "after").merge(before, "left", ROW).reindex(columns=ROLLOUTS.names)
    return pa.Table.from_pandas(rows, ROLLOUTS, preserve_index=False).replace_schema_metadata()


def evaluation_record(export: dict[str, Any], rollouts: pa.Table, decoding: dict[str, Any]) -> dict[str, Any]:
    """Return eval.json: scores before and after the stage with their change; the mean weighs environments alike.

    `export` is the stage's hf/record.json. A score before, and its change, is None where the stage's start was not
    scored on all rows of the environment; for the mean, of any environment. An environment has the same by `tags`, and
    of its own `metrics`.
    """
    rewards = rollouts.select(["environment", "tags", *METRICS, BEFORE, AFTER, FIRST]).to_pandas()
    scores, mean = _scores(dict(list(rewards.groupby("environment"))))
    for entry, (_, part) in zip(scores.values(), rewards.groupby("environment"), strict=True):
        if tagged := dict(list(part.explode("tags").groupby("tags"))):
            entry["tags"], _ = _scores(tagged)
        if measured := _by_metric(part):
            entry["metrics"], _ = _scores(measured)
    return {
        **{key: export[key] for key in ("stage", "step", "content")},
        "decoding": decoding,
        "environments": scores,
        "mean": mean,
    }


def _by_metric(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows that each of the environment's own metrics measured, with its numbers for rewards."""
    before, after = (pd.DataFrame([dict(each or ()) for each in rows[column]], dtype=float) for column in METRICS)
    tables = {name: {BEFORE: before.get(name, np.nan), AFTER: after[name], FIRST: np.nan} for name in sorted(after)}
    return {name: pd.DataFrame(columns).dropna(subset=AFTER) for name, columns in tables.items()}


def _scores(rows: dict[str, pd.DataFrame]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    figures = {"before": _means(rows, BEFORE), "after": _means(rows, AFTER)}
    figures |= {"change": _changes(rows, BEFORE), "change_from_first": _changes(rows, FIRST)}
    scores = {name: {key: values[name] for key, values in figures.items()} for name in (*rows, MEAN)}
    return {name: {"rows": len(part)} | scores[name] for name, part in rows.items()}, scores[MEAN]


def unfinished_thoughts(rollouts: pa.Table, told: Told = None) -> dict[str, Any] | None:
    """Count the export's responses whose thoughts do not end, with the place of the first; None: all end.

    `told` marks the model's thoughts.
    """
    answered = rollouts.select(["split", "line", "response_after"]).to_pylist()
    unfinished = [row for row in answered if split_response(row["response_after"] or "", told).is_unfinished]
    if not unfinished:
        return None
    first = unfinished[0]
    return {
        "responses": len(unfinished),
        "share": round(len(unfinished) / len(answered), 6),
        "first": f"{first['split']}, row {first['line']}",
    }


def write_results(
    export: Path,
    table: pa.Table,
    decoding: dict[str, Any],
    rollouts: Path,
    output: Path,
    told: Told = None,
    **more: Any,
) -> None:
    """Write rollouts.parquet and eval.json, with `more` keys, and print the mean; `export` is hf/record.json.

    Responses whose thoughts, which `told` marks, do not end are counted, with a warning.
    """
    write_table(table, rollouts)
    record = evaluation_record(read_record(export, ExportRecord), table, decoding)
    unfinished = unfinished_thoughts(table, told)
    if unfinished:
        more["unfinished_thoughts"] = unfinished
        warn(
            f"{record['stage']}: the thoughts of {unfinished['responses']} of {table.num_rows} responses do not end, "
            f"which earns 0; the first, to {unfinished['first']}; raise evaluation.max_new_tokens where they are cut"
        )
    write_json(output, record | more | {"rollouts": sha256_file(rollouts)})
    print(f"{record['stage']}: {format_mean(record['mean'])}", flush=True)


def format_mean(mean: dict[str, Any]) -> str:
    """Return the mean of eval.json in words."""
    before, change = mean["before"], mean["change"]
    start = "not measured" if before is None else f"{before:.3f}"
    interval = f" ({change['value']:+.3f}, 95 % {change['low']:+.3f} to {change['high']:+.3f})" if change else ""
    return f"held-out mean {start} -> {mean['after']:.3f}{interval}"


def _changes(rows: dict[str, pd.DataFrame], since: str) -> dict[str | None, Change | None]:
    differences = {name: (part[AFTER] - part[since]).to_numpy() for name, part in rows.items()}
    known = {name: values for name, values in differences.items() if not np.isnan(values).any()}
    found, mean = changes(known)
    return dict.fromkeys(rows) | found | {MEAN: mean if len(known) == len(rows) else None}


def _means(rows: dict[str, pd.DataFrame], column: str) -> dict[str | None, float | None]:
    rewards = {name: part[column] for name, part in rows.items()}
    means = {name: None if each.isna().any() else round(float(each.mean()), 6) for name, each in rewards.items()}
    return means | {MEAN: None if None in means.values() else round(fmean(means.values()), 6)}
