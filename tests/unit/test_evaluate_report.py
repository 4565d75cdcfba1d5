"""Figures and tables say what the records say."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.files import write_json
from scripts.report.environments import plot_scores, scores_by_stage
from scripts.report.stage import plot_stage, short_name
from scripts.report.summary import summarise_stage, summary_page
from scripts.train.metrics import SCHEMA

METRICS = pd.DataFrame(
    {
        "step": range(1, 11),
        "reward_mean": np.linspace(0, 1, 10),
        "reward_std": 0.2,
        "zero_variance_share": 0.1,
        "kl": [None] * 10,
        "response_length_mean": 10.0,
        "response_length_max": 12.0,
        "truncation_rate": [0.9] * 5 + [0.1] * 5,
        "entropy": 0.5,
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "seconds": 0.5,
        "environment_rewards": [[("a_simple_agent", 0.5)]] * 10,
    }
)
EVALUATION = {
    "stage": "rlvr1",
    "environments": {
        "a_simple_agent": {"rows": 5, "before": 0.2, "after": 0.9},
        "b_simple_agent": {"rows": 5, "before": 0.5, "after": 0.4},
    },
    "mean": {"before": 0.35, "after": 0.65},
}


def test_the_figure_shows_how_far_sampler_and_trainer_differ_where_that_is_known(tmp_path):
    plot_stage(
        "rlvr1", METRICS.assign(token_mult_prob_error=1.02, gen_kl_error=1e-4, valid_samples=40.0), tmp_path / "s.svg"
    )
    text = (tmp_path / "s.svg").read_text()
    assert "sampler beside trainer" in text and "KL of trainer to sampler" in text and "samples not masked out" in text


def test_the_stage_figure_shows_what_was_measured_and_nothing_else(tmp_path):
    plot_stage("rlvr1", METRICS, tmp_path / "one.svg")
    plot_stage("rlvr1", METRICS, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "reward by environment" in text and "KL to the parent" not in text


def test_the_heat_map_has_a_number_in_every_cell(tmp_path):
    table = scores_by_stage([EVALUATION])
    assert table.loc["mean", "rlvr1"] == 0.65
    plot_scores(table, tmp_path / "map.svg")
    text = (tmp_path / "map.svg").read_text()
    for number in ("0.90", "0.40", "0.65"):
        assert number in text


def test_names_are_shortened_to_what_tells_them_apart():
    assert short_name("math_with_judge_simple_agent") == "math_with_judge"
    assert short_name("single_step_tool_use_with_argument_comparison_agent") == "single_step_tool_use"
    assert short_name("swe_pivot_single_step_tool_use_with_argument_comparison_agent") == "swe_pivot"


def test_the_summary_has_a_row_a_stage_from_its_records(tmp_path):
    rows = [{name: row.get(name) for name in SCHEMA.names} for row in METRICS.to_dict("records")]
    (tmp_path / "ckpt").mkdir()
    write_json(
        tmp_path / "ckpt/record.json", {"stage": "rlvr1", "step": 10, "identity": "i", "parents": [{"stage": "sft"}]}
    )
    write_json(tmp_path / "eval.json", EVALUATION)
    write_json(tmp_path / "gate.json", {"stage": "rlvr1", "verdict": "warn"})
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "metrics.parquet")
    row = summarise_stage(tmp_path)
    assert (row["stage"], row["parent"], row["steps"], row["gate"]) == ("rlvr1", "sft", 10, "warn")
    assert row["training_seconds"] == 5.0 and row["worst_environment"] == "b_simple_agent"
    assert row["kl_last"] is None or pd.isna(row["kl_last"])
    page = summary_page(pd.DataFrame([row | {"stage": "<b>"}]))
    assert "<td>&lt;b&gt;</td>" in page and "NaN" not in page and "None" not in page
