"""Read exports' scores on tasks from the results.json and samples of lm-eval, and pair their changes.

An export's answers to a task lie in ``<store>/<content>/<key>/`` as lm-eval wrote them. `content` names the export and
`key` the question; all runs of a results folder share the store, so nothing is scored twice.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from scripts.errors import UserError
from scripts.files import read_json, sha256_text
from scripts.records import Benchmark, Benchmarks
from scripts.stage.bootstrap import Change, changes
from scripts.stage.tables import read_table

NORMAL_95 = 1.959964
SAME = 1e-6
FULL = 0.98
LENGTHS, LENGTH = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), 256
"""lm-eval's keys of the most tokens of an answer, the first counts, and its number without any."""
DATASET = {"path": "dataset_path", "name": "dataset_name", "split": "test_split"}
"""Facts of a task's data set, and lm-eval's words for them."""
Documents = dict[tuple[str, int, str], float]
"""The score of each document by task, place in the task's split and hash."""
EARLIER = pa.schema(
    {
        "benchmark": pa.string(),
        "task": pa.string(),
        "document": pa.int64(),
        "score": pa.float64(),
        "prompt": pa.string(),
    }
)


def read_scores(folder: Path, task: str, metric: str | None, key: str) -> dict[str, Benchmark]:
    """Read the entry of a task from lm-eval's results.json; of a tag or unscored group, an entry a task.

    `metric` is the counting metric, with or without its filter; None: the task's first.
    """
    (path,) = folder.rglob("results_*.json")
    found = read_json(path)
    results, configs = found["results"], found["configs"]
    entries: dict[str, Benchmark] = {}
    for name in [task] if _numbers(results.get(task, {})) else configs:
        metrics, config = _numbers(results[name]), configs.get(name) or next(iter(configs.values()))
        wanted = next((each for each in metrics if metric in (None, each, each.split(",")[0])), None)
        if wanted is None:
            raise UserError(f"evaluation.tasks: {name} has no metric {metric or 'at all'}; it has {', '.join(metrics)}")
        entries[name] = {
            **metrics[wanted],
            "samples": results[name]["sample_len"],
            "metric": wanted,
            "metrics": metrics,
            "num_fewshot": found["n-shot"].get(name, 0),
            "version": str(found["versions"].get(name)),
            "chat_template": found["chat_template"] is not None,
            "dataset": {fact: config.get(word) for fact, word in DATASET.items()},
            "key": key,
        }
        asked = configs.get(name, config)  # of a group: as its first task
        if generation := asked.get("generation_kwargs"):
            entries[name]["generation"] = generation
    return entries


def _numbers(result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return score and standard error of each numeric metric by lm-eval's name: metric,filter."""
    found = {}
    for name, value in result.items():
        if "," in name and "_stderr," not in name and _is_number(value):
            error = result.get(name.replace(",", "_stderr,", 1))
            found[name] = {"score": round(value, 6), "stderr": round(error, 6) if _is_number(error) else None}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def read_documents(
    folder: Path, name: str, metric: str, score: float | None = None, told_by: str = "doc_hash"
) -> Documents | None:
    """Read the scores of a benchmark's documents; None where `score` is not their mean, or without documents.

    An earlier version kept a Parquet file in place of the folder; its documents are told apart by `prompt_hash`.
    """
    found, (number, _, answers) = {}, metric.partition(",")
    if (earlier := folder.with_suffix(".parquet")).exists():
        for row in read_table(earlier, EARLIER).to_pylist():
            if row["benchmark"] == name and row["score"] is not None:
                found[row["task"], row["document"], sha256_text(row["prompt"])] = row["score"]
    files = {path.stem.removeprefix("samples_").rsplit("_", 1)[0]: path for path in folder.rglob("samples_*.jsonl")}
    for task in [name] if name in files else files:
        for line in files[task].read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["filter"] == answers and _is_number(row.get(number)):
                found[task, row["doc_id"], row[told_by]] = float(row[number])
    is_mean = found and (score is None or abs(np.mean([*found.values()]) - score) < SAME)
    return dict(sorted(found.items())) if is_mean else None


def share_cut(folder: Path, name: str, count: Callable[[str], int]) -> float | None:
    """Return the share of a task's answers that fill their length, as cut ones do; None where a task generates none.

    `count` counts a text's tokens; a text made of tokens may be read as a few less.
    """
    are_cut = []
    for path in folder.rglob(f"samples_{name}_*.jsonl"):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            settings = row.get("arguments", {}).get("gen_args_0", {}).get("arg_1")
            if isinstance(settings, dict):
                most = next((settings[key] for key in LENGTHS if settings.get(key)), LENGTH)
                are_cut += [count(text) >= FULL * most for texts in row["resps"] for text in texts]
    return round(fmean(are_cut), 4) if are_cut else None


def beside_parent(record: Benchmarks, parent: Benchmarks | None, store: Path) -> dict[str, Benchmark]:
    """Return the record's scores with the parent's, and with the changes since the parent and the chain's first export.

    Only answers to the same question count. `first` is the content of the chain's first export with an answer.
    """
    scores = record["benchmarks"]
    befores = {
        name: before
        for name, entry in scores.items()
        if parent and (before := parent["benchmarks"].get(name)) and _is_same(before, entry, parent, record, store)
    }
    parents = {name: (parent["content"], before["key"]) for name, before in befores.items()}
    firsts = {name: (before.get("first") or parent["content"], before["key"]) for name, before in befores.items()}
    from_parent, from_first = _changes(record, parents, store), _changes(record, firsts, store)
    return {
        name: {
            **entry,
            "before": befores[name]["score"] if name in befores else None,
            "change": from_parent.get(name),
            "change_from_first": from_first.get(name),
            "first": firsts[name][0] if name in firsts else None,
        }
        for name, entry in scores.items()
    }


def _is_same(before: Benchmark, entry: Benchmark, parent: Benchmarks, record: Benchmarks, store: Path) -> bool:
    """Whether two entries answer one question: of equal keys, or an earlier version's answer with equal facts."""
    keys = ("key", "metric")
    if (store / parent["content"] / before.get("key", "")).with_suffix(".parquet").exists():
        keys = ("metric", "samples", "num_fewshot", "version", "chat_template", "dataset")
    return parent.get("by") == record.get("by") and all(before.get(key) == entry.get(key) for key in keys)


def _changes(record: Benchmarks, since: dict[str, tuple[str, str]], store: Path) -> dict[str, Change | None]:
    """Return the changes since other exports, by content and key, paired by document; none where a score is no mean."""
    differences = {}
    for name, (content, key) in since.items():
        entry = record["benchmarks"][name]
        told_by = "doc_hash" if key == entry["key"] else "prompt_hash"
        before = read_documents(store / content / key, name, entry["metric"])
        folder = store / record["content"] / entry["key"]
        now = read_documents(folder, name, entry["metric"], entry["score"], told_by)
        if before and now and before.keys() == now.keys():
            differences[name] = np.array([*now.values()]) - np.array([*before.values()])
    return changes(differences)[0]


def interval_of(entry: Benchmark) -> Change | None:
    """Return a score with its 95 % interval by the standard error; None without an error."""
    if entry.get("stderr") is None:
        return None
    score, half = entry["score"], NORMAL_95 * entry["stderr"]
    return {"value": score, "low": score - half, "high": score + half}
