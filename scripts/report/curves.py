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
    Panel(
        "Judges' answers without a verdict",
        "share",
        {"judge_unread_share": ""},
        "Share of the judges' answers that could not be read; each counts as no reward.",
    ),
    Panel("Time of a step", "seconds", {"seconds": ""}, "Wall time, generation and update together."),
)


def figures_of(metrics: pd.DataFrame) -> list[Figure]:
    """A figure for all that was measured, and nothing else; those of the environments follow the reward."""
    figures = [figure for panel in PANELS if (figure := figure_of(panel, {"": metrics})) is not None]
    has_reward = bool(figures) and figures[0].title == PANELS[0].title
    return [*figures[:has_reward], *_environment_figures(metrics), *figures[has_reward:]]


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


def _environment_figures(metrics: pd.DataFrame) -> Iterator[Figure]:
    """Mean reward by environment; more environments than a chart has lines are spread over several charts."""
    rewards = pd.DataFrame([dict(entry or ()) for entry in metrics["environment_rewards"]], index=metrics["step"])
    names = sorted(name for name in rewards if rewards[name].notna().any())
    charts = [names[start : start + len(COLOURS)] for start in range(0, len(names), len(COLOURS))]
    for place, chart in enumerate(charts, start=1):
        title = "Reward by environment" + (f" ({place} of {len(charts)})" if len(charts) > 1 else "")
        lines = [Line(short_name(name), rewards.index.tolist(), rewards[name].tolist()) for name in chart]
        caption = "Mean reward of the step's rollouts of each environment; a gap: the step had none of its prompts."
        yield Figure(title, line_chart(title, "reward", lines), caption)
