"""Curves of one stage over its steps, as SVG."""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from scripts.errors import run_program
from scripts.report.style import BLUE, GREEN, ORANGE, save_figure

Panel = tuple[str, str, Callable[[Axes, pd.DataFrame], None]]


def plot_stage(stage: str, metrics: pd.DataFrame, output: Path) -> None:
    """Draw a panel for each thing that was measured: rewards with their spread where the stage has any."""
    panels = [panel for panel in PANELS if panel[0] in metrics and metrics[panel[0]].notna().any()]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(3.6 * columns, 2.5 * lines), squeeze=False)
    for axis, (_, title, draw) in zip(axes.flat, panels, strict=False):
        draw(axis, metrics)
        axis.set_title(title)
        axis.set_xlabel("step")
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.suptitle(stage)
    figure.tight_layout()
    save_figure(figure, output)
    plt.close(figure)


def _reward(axis: Axes, metrics: pd.DataFrame) -> None:
    low, high = (metrics["reward_mean"] + sign * metrics["reward_std"] for sign in (-1, 1))
    axis.fill_between(metrics["step"], low, high, color=BLUE, alpha=0.2, label="± std within a group")
    axis.plot(metrics["step"], metrics["reward_mean"], color=BLUE, label="mean")
    axis.legend(fontsize="small")


def _environments(axis: Axes, metrics: pd.DataFrame) -> None:
    rewards = pd.DataFrame([dict(entry) for entry in metrics["environment_rewards"]], index=metrics["step"])
    for name, style in zip(sorted(rewards), ("-", "--", "-.", ":") * len(rewards.columns), strict=False):
        axis.plot(rewards.index, rewards[name], style, label=short_name(name))
    axis.legend(fontsize="x-small")


def _lengths(axis: Axes, metrics: pd.DataFrame) -> None:
    axis.plot(metrics["step"], metrics["response_length_mean"], color=BLUE, label="mean")
    axis.plot(metrics["step"], metrics["response_length_max"], "--", color=ORANGE, label="longest")
    axis.legend(fontsize="small")


def _line(column: str, color: str = BLUE) -> Callable[[Axes, pd.DataFrame], None]:
    return lambda axis, metrics: axis.plot(metrics["step"], metrics[column], color=color)


def short_name(environment: str) -> str:
    """An environment's agent name without the endings that every agent shares."""
    for ending in ("_single_step_tool_use_with_argument_comparison_agent", "_simple_agent"):
        environment = environment.removesuffix(ending)
    return environment.removesuffix("_with_argument_comparison_agent")


PANELS: tuple[Panel, ...] = (
    ("reward_mean", "reward", _reward),
    ("reward_mean", "reward by environment", _environments),
    ("response_length_mean", "response length (tokens)", _lengths),
    ("truncation_rate", "truncated responses (share)", _line("truncation_rate", ORANGE)),
    ("zero_variance_share", "groups without spread (share)", _line("zero_variance_share", ORANGE)),
    ("kl", "KL to the parent (nats a token)", _line("kl", GREEN)),
    ("entropy", "entropy (nats a token)", _line("entropy", GREEN)),
    ("loss", "loss", _line("loss")),
    ("grad_norm", "gradient norm", _line("grad_norm")),
    ("lr", "learning rate", _line("lr")),
    ("token_mult_prob_error", "sampler beside trainer (1: equal)", _line("token_mult_prob_error", GREEN)),
    ("gen_kl_error", "KL of trainer to sampler (nats a token)", _line("gen_kl_error", GREEN)),
    ("valid_samples", "samples not masked out", _line("valid_samples", ORANGE)),
    ("masked_share", "samples masked out (share)", _line("masked_share", ORANGE)),
    ("judge_unread_share", "judges' answers without a verdict (share)", _line("judge_unread_share", ORANGE)),
    ("seconds", "seconds a step", _line("seconds", ORANGE)),
)


def main() -> None:
    """Command line of the stage figure."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.stage", description=__doc__)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--metrics", type=Path, required=True, help="metrics.parquet")
    parser.add_argument("--output", type=Path, required=True, help="SVG")
    arguments = parser.parse_args()
    plot_stage(arguments.stage, pd.read_parquet(arguments.metrics), arguments.output)


if __name__ == "__main__":
    run_program(main)
