"""metrics.parquet: one row a training step, the same columns whatever the backend and algorithm."""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.errors import UserError, run_program
from scripts.files import open_atomically

SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), metadata={"about": "optimizer step, from 1"}),
        pa.field("reward_mean", pa.float64(), metadata={"about": "mean reward of the step's rollouts"}),
        pa.field(
            "reward_std",
            pa.float64(),
            metadata={
                "about": "standard deviation of the rewards within a group, mean; NeMo-RL's synchronous loop: of all"
            },
        ),
        pa.field(
            "zero_variance_share", pa.float64(), metadata={"about": "share of groups whose rewards are all equal"}
        ),
        pa.field(
            "kl", pa.float64(), metadata={"about": "KL to the parent, k3 estimate, nats a token; null: not measured"}
        ),
        pa.field("response_length_mean", pa.float64(), metadata={"about": "tokens"}),
        pa.field("response_length_max", pa.float64(), metadata={"about": "tokens"}),
        pa.field("truncation_rate", pa.float64(), metadata={"about": "share of responses cut at the length limit"}),
        pa.field("entropy", pa.float64(), metadata={"about": "of the policy's next-token distribution, nats"}),
        pa.field("loss", pa.float64()),
        pa.field("grad_norm", pa.float64()),
        pa.field("lr", pa.float64()),
        pa.field("seconds", pa.float64(), metadata={"about": "wall time of the step"}),
        pa.field("gen_kl_error", pa.float64(), metadata={"about": "KL of the trainer to the sampler, nats a token"}),
        pa.field(
            "token_mult_prob_error", pa.float64(), metadata={"about": "sampler's and trainer's probabilities; 1: equal"}
        ),
        pa.field("sampling_importance_ratio", pa.float64(), metadata={"about": "trainer over sampler, mean; 1: equal"}),
        pa.field("valid_samples", pa.float64(), metadata={"about": "samples that were not masked out"}),
        pa.field("masked_share", pa.float64(), metadata={"about": "share of the samples that were masked out"}),
        pa.field(
            "judge_unread_share", pa.float64(), metadata={"about": "share of the judges' answers without a verdict"}
        ),
        pa.field("environment_rewards", pa.map_(pa.string(), pa.float64()), metadata={"about": "mean by environment"}),
        pa.field(
            "timing", pa.map_(pa.string(), pa.float64()), metadata={"about": "seconds by phase, in the backend's words"}
        ),
    ]
)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The logged steps of a run directory in order; of a step logged again after a resume, the later line.

    A last line cut by a kill is passed over: its step is logged again by the attempt that resumes.
    """
    steps: dict[int, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            continue
        steps[entry["step"]] = entry
    return [steps[step] for step in sorted(steps)]


def write_metrics(log: Path, output: Path, last_step: int) -> None:
    """Write the steps 1..last_step of a log as parquet; UserError when one is missing."""
    entries = [entry for entry in read_log(log) if entry["step"] <= last_step]
    missing = sorted(set(range(1, last_step + 1)) - {entry["step"] for entry in entries})
    if missing:
        raise UserError(f"{log}: no metrics of step {missing[0]} ({len(missing)} of {last_step} steps are missing)")
    table = pa.Table.from_pylist([{name: entry.get(name) for name in SCHEMA.names} for entry in entries], schema=SCHEMA)
    with open_atomically(output) as (file,):
        pq.write_table(table, file)


def main() -> None:
    """Command line of the metrics writer."""
    parser = argparse.ArgumentParser(prog="python -m scripts.stage.metrics", description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=Path, required=True, help="the stage's ckpt/record.json")
    parser.add_argument("--log", type=Path, required=True, help="the run directory's metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="metrics.parquet")
    arguments = parser.parse_args()
    write_metrics(arguments.log, arguments.output, json.loads(arguments.record.read_text())["step"])


if __name__ == "__main__":
    run_program(main)
