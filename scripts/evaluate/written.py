"""Write eval.json of a stage without held-out prompts: what its held-out rows of written answers gave."""

from pathlib import Path
from typing import Annotated

from scripts.files import write_json
from scripts.program import run_command_line
from scripts.records import ExportRecord, HeldOutLoss, read_record
from scripts.stage.measured import held_out_loss
from scripts.stage.tables import METRICS, read_table


def words_of_change(found: HeldOutLoss | None) -> str:
    """Return the loss before and after a stage in words."""
    if found is None:
        return "no held-out rows were measured"
    loss = found["loss"]
    before, after = (_number(loss[when]) for when in ("before", "after"))
    return f"validation loss {before} -> {after} ({found['rows']} held-out rows)"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def main(
    export: Annotated[Path, "the stage's hf/record.json"],
    metrics: Annotated[Path, "metrics.parquet"],
    output: Annotated[Path, "eval.json"],
) -> None:
    """Write eval.json."""
    exported = read_record(export, ExportRecord)
    found = held_out_loss(read_table(metrics, METRICS).to_pylist(), exported["step"])
    record = {key: exported[key] for key in ("stage", "step", "content")}
    if found is not None:
        record["validation"] = found
    write_json(output, record)
    print(f"{exported['stage']}: {words_of_change(found)}", flush=True)


if __name__ == "__main__":
    run_command_line(main)
