"""The files that a trained stage leaves, written by hand for tests of the report."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from scripts.files import write_json
from scripts.stage.tables import METRICS
from scripts.stage.training_folder import TrainingFolder
from tests.stages import checkpoint_record

MATH, MCQA = "math_with_judge_simple_agent", "mcqa_simple_agent"


def step(number: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "step": number,
        "reward_mean": 0.1 * number,
        "reward_std": 0.2,
        "zero_variance_share": 0.1,
        "response_length_mean": 10.0,
        "response_length_max": 12.0,
        "truncation_rate": 0.1,
        "entropy": 0.5,
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "seconds": 36.0,
        "environment_rewards": {MATH: 0.5, MCQA: 0.25},
        "timing": {"generation": 24.0, "rewards": 2.0, "update": 10.0},
    } | values


def evaluation(stage: str, before: float | None = 0.25, after: float = 0.5, spread: float = 0.125) -> dict[str, Any]:
    """An eval.json of two environments whose change has an interval of ± spread."""
    change = None if before is None else after - before
    interval = None if change is None else {"value": change, "low": change - spread, "high": change + spread}
    entry = {"before": before, "after": after, "change": interval}
    return {"stage": stage, "environments": {MATH: {"rows": 8} | entry, MCQA: {"rows": 8} | entry}, "mean": entry}


def rollout(line: int, before: float = 0.0, after: float = 1.0, **values: Any) -> dict[str, Any]:
    """A row of rollouts.parquet."""
    return {
        "environment": MATH,
        "split": "validation",
        "line": line,
        "prompt": "2 + 2?",
        "response_before": "5",
        "response_after": "4",
        "reward_before": before,
        "reward_after": after,
        "tokens_before": 1,
        "tokens_after": 1,
        "cut_before": False,
        "cut_after": False,
    } | values


def write_metrics(path: Path, entries: list[dict[str, Any]]) -> None:
    """Write metrics.parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{name: entry.get(name) for name in METRICS.names} for entry in entries]
    pq.write_table(pa.Table.from_pylist(rows, schema=METRICS), path)


def write_rollouts(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Write rollouts.parquet of a stage."""
    pq.write_table(pa.Table.from_pylist(rows), directory / "rollouts.parquet")


def write_stage(results: Path, stage: str, parent: str | None = None, steps: int = 10, **config: Any) -> Path:
    """A trained and judged stage on four GPUs; its directory. `config`: settings of its config.yaml."""
    directory = results / stage
    write_metrics(directory / "metrics.parquet", [step(number) for number in range(1, steps + 1)])
    (directory / "config.yaml").write_text(yaml.safe_dump({"algorithm": "grpo", "backend": "trl", "seed": 1} | config))
    parents = [{"stage": parent, "step": 1, "identity": f"id-{parent}", "content": "0"}] if parent else []
    record = checkpoint_record(stage, steps, identity=f"id-{stage}", parents=parents)
    write_json(directory / "ckpt/record.json", record)
    write_json(directory / "preflight.json", {"stage": stage, "epochs": 1})
    write_json(directory / "eval.json", evaluation(stage, 0.25 if parent else None))
    write_json(directory / "gate.json", {"stage": stage, "verdict": "warn"})
    criterion = {"metric": "held_out_change", "environment": None, "value": 0.25, "low": 0.125, "high": 0.375}
    criterion |= {"min": 0.5, "max": None, "action": "warn", "outcome": "warn", "step": None}
    criterion |= {"says": "held_out_change is 0.25, at least 0.5 was wanted", "figure": None}
    write_json(directory / "criteria.json", {"stage": stage, "verdict": "warn", "criteria": [criterion]})
    pq.write_table(pa.Table.from_pylist([rollout(line) for line in range(8)]), directory / "rollouts.parquet")
    (directory / "run").mkdir()
    TrainingFolder(directory / "run").begin_attempt(0, gpus=4)
    TrainingFolder(directory / "run").end_attempt(steps, "finished")
    set_times(directory / "run", 0.0, 720.0)
    return directory


def write_manifest(results: Path, blend: str = "rlvr1") -> Path:
    """manifest.json of a blend with two environments."""
    split = {"rows": 4, "sha256": "0", "environments": {MATH: 3, MCQA: 1}}
    path = results / "data" / blend / "manifest.json"
    source = {"name": "synthetic", "revision": "synthetic-0"}
    write_json(path, {"blend": blend, "source": source, "train": split, "validation": split})
    return path


def set_times(run: Path, *times: float) -> None:
    """Give the lines of attempts.jsonl these times."""
    path = run / "attempts.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps(entry | {"time": time}) + "\n" for entry, time in zip(entries, times, strict=True))
    )
