"""The curves of a stage over its steps: which there are, and how to read each."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from scripts.chart import COLOURS, Line, line_chart
from scripts.report.records import short_name


@dataclass(frozen=True)
class Panel:
    """One chart of columns of metrics.parquet (with what each line is called), its unit and how to read it."""

    title: str
    unit: str
    columns: dict[str, str]
    caption: str


@dataclass(frozen=True)
class Figure:
    """A drawn chart with its title and caption."""

    title: str
    svg: str
    caption: str


PANELS = (
    Panel(
        "Reward",
        "reward",
        {"reward_mean": "mean, with ± std within a group"},
        "Mean of the step's rollouts. The band is one standard deviation within a group of rollouts of the same "
        "prompt: where it closes, a group teaches nothing.",
    ),
    Panel(
        "Groups without spread",
        "share",
        {"zero_variance_share": ""},
        "Share of prompts whose rollouts all have the same reward, so that they teach nothing; near 1 the prompts are "
        "too easy or too hard.",
    ),
    Panel(
        "Response length",
        "tokens",
        {"response_length_mean": "mean", "response_length_max": "longest"},
        "Growth while the reward stands still is a sign to stop and look.",
    ),
    Panel(
        "Truncated responses",
        "share",
        {"truncation_rate": ""},
        "Share of responses cut at the length limit. A rise means that the limit, not the task, decides the reward.",
    ),
    Panel(
        "KL to the parent",
        "nats a token",
        {"kl": ""},
        "How far the policy has moved from the model that the stage started from; shown only where a reference policy "
        "is loaded.",
    ),
    Panel(
        "Entropy",
        "nats a token",
        {"entropy": ""},
        "Spread of the policy's next-token distribution. A collapse towards 0 means that it has stopped exploring. "
        "Where no KL is measured, it is what tells a policy that runs away.",
    ),
    Panel("Loss", "loss", {"loss": ""}, "The objective that the optimizer lowers; of RL stages it says little."),
    Panel("Gradient norm", "norm", {"grad_norm": ""}, "Before clipping. Spikes come before a run diverges."),
    Panel("Learning rate", "lr", {"lr": ""}, "As scheduled."),
    Panel(
        "Sampler beside trainer",
        "ratio",
        {"token_mult_prob_error": ""},
        "How far the sampler's and the trainer's probabilities of the same tokens differ; 1 is equal.",
    ),
    Panel(
        "KL of trainer to sampler",
        "nats a token",
        {"gen_kl_error": ""},
        "The same difference as a divergence; 0 is equal.",
    ),
    Panel("Samples not masked out", "samples", {"valid_samples": ""}, "How many samples of a step taught anything."),
    Panel("Samples masked out", "share", {"masked_share": ""}, "Share of a step's samples that taught nothing."),
    Panel(
        "Judges' answers without a verdict",
        "share",
        {"judge_unread_share": ""},
        "Share of the judges' answers that could not be read; each counts as no reward.",
    ),
    Panel("Time of a step", "seconds", {"seconds": ""}, "Wall time, generation and update together."),
)
REWARDS = Panel(
    "Reward by environment",
    "reward",
    {"environment_rewards": ""},
    "Mean reward of the step's rollouts of each environment; where a line has no point, the step had none of its "
    "prompts.",
)
PHASES = Panel(
    "Time of a step by phase",
    "seconds",
    {"timing": ""},
    "What a step's time went into, in the backend's own words; phases that run side by side add up to more than the "
    "step.",
)


def figures_of(metrics: pd.DataFrame) -> list[Figure]:
    """A figure for all that was measured, and nothing else; rewards by environment follow the reward."""
    figures = [figure for panel in PANELS if (figure := figure_of(panel, {"": metrics})) is not None]
    at = next((place for place, figure in enumerate(figures, start=1) if figure.title == "Reward"), 0)
    return [*figures[:at], *_by_name(metrics, REWARDS), *figures[at:], *_by_name(metrics, PHASES)]


def figure_of(panel: Panel, runs: dict[str, pd.DataFrame]) -> Figure | None:
    """A panel of one run, or of several over the same steps with a line each; None where none measured it."""
    lines = []
    for run, metrics in runs.items():
        for column, label in list(panel.columns.items())[: None if len(runs) == 1 else 1]:
            if column in metrics:
                lines.append(_line(metrics, column, ": ".join(filter(None, (run, label)))))
    chart = line_chart(panel.title, panel.unit, lines)
    return Figure(panel.title, chart, panel.caption) if chart else None


def _line(metrics: pd.DataFrame, column: str, label: str) -> Line:
    steps, values = metrics["step"].tolist(), metrics[column]
    if column != "reward_mean" or not metrics["reward_std"].notna().any():
        return Line(label, steps, values.tolist())
    low, high = ((values + sign * metrics["reward_std"]).tolist() for sign in (-1, 1))
    return Line(label, steps, values.tolist(), low, high)


def by_name(metrics: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column that maps names to numbers as a table: a row a step, a column for each name that is ever measured."""
    entries = metrics[column] if column in metrics else [None] * len(metrics)
    table = pd.DataFrame([dict([] if entry is None else entry) for entry in entries], index=metrics["step"])
    return table.dropna(axis="columns", how="all").sort_index(axis="columns")


def _by_name(metrics: pd.DataFrame, panel: Panel) -> Iterator[Figure]:
    """The charts of such a column, with a line for each name; more names than a chart has lines fill several charts."""
    ((column, _),) = panel.columns.items()
    table = by_name(metrics, column)
    charts = [list(table)[start : start + len(COLOURS)] for start in range(0, len(table.columns), len(COLOURS))]
    for place, names in enumerate(charts, start=1):
        title = panel.title + (f" ({place} of {len(charts)})" if len(charts) > 1 else "")
        lines = [Line(short_name(name), table.index.tolist(), table[name].tolist()) for name in names]
        yield Figure(title, line_chart(title, panel.unit, lines), panel.caption)
