"""metrics.parquet: one row a training step, the same columns whatever the backend and algorithm."""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.errors import UserError, run_program
from scripts.files import open_atomically
from scripts.records import CheckpointRecord, read_record
from scripts.stage.progress import read_log

ABOUT = {
    "step": "optimizer step, from 1",
    "reward_mean": "mean reward of the step's rollouts",
    "reward_std": "standard deviation of the rewards within a group, mean; NeMo-RL's synchronous loop: of all",
    "zero_variance_share": "share of groups whose rewards are all equal",
    "kl": "KL to the parent, k3 estimate, nats a token; null: not measured",
    "response_length_mean": "tokens",
    "response_length_max": "tokens",
    "truncation_rate": "share of responses cut at the length limit",
    "entropy": "of the policy's next-token distribution, nats",
    "loss": "",
    "validation_loss": "mean over the held-out rows' learnt tokens, nats; null: not measured at this step",
    "grad_norm": "",
    "lr": "",
    "seconds": "wall time of the step",
    "gen_kl_error": "KL of the trainer to the sampler, nats a token",
    "token_mult_prob_error": "sampler's and trainer's probabilities; 1: equal",
    "sampling_importance_ratio": "trainer over sampler, mean; 1: equal",
    "valid_samples": "samples that were not masked out",
    "masked_share": "share of the samples that were masked out",
    "judge_unread_share": "share of the judges' answers without a verdict",
    "unjudged_share": "share of responses that could not be judged, which earn 0; null: not measured",
    "tool_call_frequency": "calls of tools a response; null: no environment has tools",
    "tool_failure_frequency": "share of these calls that failed",
    "environment_rewards": "mean by environment",
    "tokens": "of the step's rows, prompts and responses; null: not counted",
    "timing": "seconds by phase, in the backend's words",
}
BY_NAME = pa.map_(pa.string(), pa.float64())
TYPES = {"step": pa.int64(), "environment_rewards": BY_NAME, "timing": BY_NAME}
SCHEMA = pa.schema(
    pa.field(name, TYPES.get(name, pa.float64()), metadata={"about": about} if about else None)
    for name, about in ABOUT.items()
)


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
    write_metrics(arguments.log, arguments.output, read_record(arguments.record, CheckpointRecord)["step"])


if __name__ == "__main__":
    run_program(main)
