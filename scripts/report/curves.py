"""The curves of a stage over the steps, each with a caption."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.report.chart import COLOURS, Line, Number, is_known, line_chart

Metrics = Mapping[str, Sequence[Any]]  # by the names of scripts.stage.tables, an entry a step


@dataclass(frozen=True)
class Chart:
    """A chart of columns of metrics.parquet, with a label for each line.

    `spread`: the column of the band around the line. `by_name`: the column maps names to numbers, a line a name.
    """

    title: str
    unit: str
    columns: dict[str, str]
    caption: str
    spread: str | None = None
    by_name: bool = False


@dataclass(frozen=True)
class Figure:
    """A drawn chart with its title and caption."""

    title: str
    svg: str
    caption: str


CHARTS = (
    Chart(
        "Reward",
        "reward",
        {"reward_mean": "mean"},
        "Mean of the step's rollouts. The band is one standard deviation within a group of rollouts of the same "
        "prompt: where it closes, a group teaches nothing.",
        spread="reward_std",
    ),
    Chart(
        "Reward by environment",
        "reward",
        {"environment_rewards": ""},
        "Mean reward of the step's rollouts of each environment; where a line has no point, the step had none of its "
        "prompts.",
        by_name=True,
    ),
    Chart(
        "Groups without spread",
        "share",
        {"zero_variance_share": ""},
        "Share of prompts whose rollouts all have the same reward, so that they teach nothing; near 1 the prompts are "
        "too easy or too hard.",
    ),
    Chart(
        "Response length",
        "tokens",
        {"response_length_mean": "mean", "response_length_max": "longest"},
        "Growth while the reward stands still is a sign to stop and look.",
    ),
    Chart(
        "Truncated responses",
        "share",
        {"truncation_rate": ""},
        "Share of responses cut at the length limit. A rise means that the limit, not the task, decides the reward.",
    ),
    Chart(
        "KL to the parent",
        "nats a token",
        {"kl": ""},
        "How far the policy has moved from the model that the stage started from; shown only where a reference policy "
        "is loaded.",
    ),
    Chart(
        "Entropy",
        "nats a token",
        {"entropy": ""},
        "Spread of the policy's next-token distribution. A collapse towards 0 means that it has stopped exploring. "
        "Where no KL is measured, it is what tells a policy that runs away.",
    ),
    Chart("Loss", "loss", {"loss": ""}, "The objective that the optimizer lowers; of RL stages it says little."),
    Chart(
        "Validation loss",
        "nats a token",
        {"validation_loss": ""},
        "Of the held-out rows. Where it rises while the loss falls, rows are learnt by heart.",
    ),
    Chart("Gradient norm", "norm", {"grad_norm": ""}, "Before clipping. Spikes come before a run diverges."),
    Chart("Learning rate", "lr", {"lr": ""}, "As scheduled."),
    Chart(
        "Sampler beside trainer",
        "ratio",
        {"token_mult_prob_error": ""},
        "How far the sampler's and the trainer's probabilities of the same tokens differ; 1 is equal.",
    ),
    Chart(
        "KL of trainer to sampler",
        "nats a token",
        {"gen_kl_error": ""},
        "The same difference as a divergence; 0 is equal.",
    ),
    Chart("Samples not masked out", "samples", {"valid_samples": ""}, "How many samples of a step taught anything."),
    Chart("Samples masked out", "share", {"masked_share": ""}, "Share of a step's samples that taught nothing."),
    Chart(
        "Responses that could not be judged",
        "share",
        {"unjudged_share": ""},
        "Share of a step's responses on which the verifier failed or took too long; each earns 0.",
    ),
    Chart("Calls of tools", "a response", {"tool_call_frequency": ""}, "How often a policy called a tool."),
    Chart("Calls of tools that failed", "share", {"tool_failure_frequency": ""}, "Of a step's calls."),
    Chart("Time of a step", "seconds", {"seconds": ""}, "Wall time, generation and update together."),
    Chart(
        "Time of a step by phase",
        "seconds",
        {"timing": ""},
        "What a step's time went into, in the backend's own words; phases that run side by side add up to more than "
        "the step.",
        by_name=True,
    ),
)


def figures_of(runs: Mapping[str, Metrics]) -> Iterator[Figure]:
    """Yield a figure for every measured chart, of one run (named "") or of several; six lines a figure."""
    for chart in CHARTS:
        lines = list(_lines(chart, runs))
        parts = [lines[start : start + len(COLOURS)] for start in range(0, len(lines), len(COLOURS))]
        for number, part in enumerate(parts, start=1):
            title = chart.title + (f" ({number} of {len(parts)})" if len(parts) > 1 else "")
            if svg := line_chart(title, chart.unit, part):
                yield Figure(title, svg, chart.caption)


def _lines(chart: Chart, runs: Mapping[str, Metrics]) -> Iterator[Line]:
    """Yield a chart's lines; of several runs the first line each."""
    for run, metrics in runs.items():
        for column, label in list(chart.columns.items())[: None if len(runs) == 1 else 1]:
            if column not in metrics or (chart.by_name and len(runs) > 1):
                continue
            steps, values = list(metrics["step"]), list(metrics[column])
            if chart.by_name:
                columns = columns_by_name(values)
                yield from (Line(short_name(name), steps, numbers) for name, numbers in columns.items())
                continue
            spread = list(metrics[chart.spread]) if chart.spread in metrics else []
            band = ", with ± std within a group" if any(map(is_known, spread)) else ""
            yield Line(run or label + band, steps, values, spread)


def columns_by_name(entries: Iterable[Any]) -> dict[str, list[Number]]:
    """Return entries of names and numbers as a column for each measured name."""
    maps = [dict(entry or ()) for entry in entries]
    names = {name for numbers in maps for name, number in numbers.items() if is_known(number)}
    return {name: [numbers.get(name) for numbers in maps] for name in sorted(names)}


def short_name(environment: str) -> str:
    """Return an environment's agent name without the common endings."""
    for ending in ("_single_step_tool_use_with_argument_comparison_agent", "_simple_agent"):
        environment = environment.removesuffix(ending)
    return environment.removesuffix("_with_argument_comparison_agent")
