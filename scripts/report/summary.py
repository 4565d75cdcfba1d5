"""summary.csv and its page for the report: one row a stage."""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import run_program
from scripts.files import open_atomically, read_json, write_text


def summarise_stage(directory: Path) -> dict[str, Any]:
    """A stage's row, from the records in its directory; empty cells are what its algorithm does not measure."""
    record = read_json(directory / "ckpt/record.json")
    metrics = pd.read_parquet(directory / "metrics.parquet")
    first, last = metrics.iloc[0], metrics.iloc[-1]
    return {
        "stage": record["stage"],
        "parent": ", ".join(parent["stage"] for parent in record["parents"]),
        "steps": record["step"],
        "identity": record["identity"],
        "training_seconds": round(metrics["seconds"].sum(), 1),
        "reward_first": first["reward_mean"],
        "reward_last": last["reward_mean"],
        "kl_last": last["kl"],
        "entropy_last": last["entropy"],
        "response_length_last": last["response_length_mean"],
        "truncation_last": last["truncation_rate"],
        "loss_last": last["loss"],
        **_held_out(directory / "eval.json"),
        "gate": read_json(directory / "gate.json")["verdict"],
    }


def _held_out(path: Path) -> dict[str, Any]:
    """The cells that a stage's held-out scores fill; empty where a recipe takes none or has none to compare."""
    if not path.exists():
        return dict.fromkeys(("held_out_before", "held_out_after", "worst_environment", "worst_change"))
    evaluation = read_json(path)
    changes = {
        name: entry["after"] - entry["before"]
        for name, entry in evaluation["environments"].items()
        if entry["before"] is not None
    }
    return {
        "held_out_before": evaluation["mean"]["before"],
        "held_out_after": evaluation["mean"]["after"],
        "worst_environment": min(changes, key=lambda name: changes[name], default=None),
        "worst_change": min(changes.values(), default=None),
    }


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Summary of the stages</title>
<style>
body {{ font: 14px sans-serif; margin: 1em; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.3em 0.7em; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: #fff; }}
</style>
</head>
<body>
{table}
</body>
</html>
"""


def summary_page(table: pd.DataFrame) -> str:
    """The table as an HTML page; names are escaped and empty cells stay empty."""
    return PAGE.format(table=table.to_html(index=False, border=0, na_rep="", float_format="{:.3g}".format))


def main() -> None:
    """Command line of the summary."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.summary", description=__doc__)
    parser.add_argument("--stages", type=Path, nargs="+", required=True, help="stage directories, in the chain's order")
    parser.add_argument("--output", type=Path, required=True, help="summary.csv")
    parser.add_argument("--page", type=Path, required=True, help="summary.html")
    arguments = parser.parse_args()
    table = pd.DataFrame([summarise_stage(directory) for directory in arguments.stages])
    with open_atomically(arguments.output) as (file,):
        table.to_csv(file, index=False, float_format="%.6g")
    write_text(arguments.page, summary_page(table))


if __name__ == "__main__":
    run_program(main)
