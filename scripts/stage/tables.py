"""Tables in Parquet: columns of metrics.parquet (a row a training step, for every backend) and of rollouts.parquet."""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.errors import UserError, run_program
from scripts.files import open_atomically
from scripts.records import AGAIN, CheckpointRecord, read_bytes, read_record
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
    "unjudged_share": "share of responses that could not be judged, which earn 0; null: not measured",
    "tool_call_frequency": "calls of tools a response; null: no environment has tools",
    "tool_failure_frequency": "share of these calls that failed",
    "environment_rewards": "mean by environment",
    "tokens": "of the step's rows, prompts and responses; null: not counted",
    "timing": "seconds by phase, in the backend's words",
}
BY_NAME = pa.map_(pa.string(), pa.float64())
TYPES = {"step": pa.int64(), "environment_rewards": BY_NAME, "timing": BY_NAME}
METRICS = pa.schema(
    pa.field(name, TYPES.get(name, pa.float64()), metadata={"about": about} if about else None)
    for name, about in ABOUT.items()
)
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
    """Read a table that Stagecoach wrote, with nulls for absent columns; UserError where it is damaged."""
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


def write_metrics(log: Path, output: Path, last_step: int) -> None:
    """Write steps 1 to `last_step` of a log as metrics.parquet; UserError where a step is missing."""
    entries = [entry for entry in read_log(log) if entry["step"] <= last_step]
    missing = sorted(set(range(1, last_step + 1)) - {entry["step"] for entry in entries})
    if missing:
        raise UserError(f"{log}: no metrics of step {missing[0]} ({len(missing)} of {last_step} steps are missing)")
    table = pa.Table.from_pylist(
        [{name: entry.get(name) for name in METRICS.names} for entry in entries], schema=METRICS
    )
    with open_atomically(output) as (file,):
        pq.write_table(table, file)


def main() -> None:
    """Write metrics.parquet from the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.stage.tables", description="Write metrics.parquet.")
    parser.add_argument("--record", type=Path, required=True, help="the stage's ckpt/record.json")
    parser.add_argument("--log", type=Path, required=True, help="the run directory's metrics.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="metrics.parquet")
    arguments = parser.parse_args()
    write_metrics(arguments.log, arguments.output, read_record(arguments.record, CheckpointRecord)["step"])


if __name__ == "__main__":
    run_program(main)
