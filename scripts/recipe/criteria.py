"""The success criteria of a finished stage."""

from typing import Literal, NamedTuple

from pydantic import Field

from scripts.recipe.strict import Strict, Text, invalid

HELD_OUT = ("held_out_change", "worst_environment_change")
WINDOW = 5
BENCHMARKS = ("benchmark_score", "benchmark_change", "worst_benchmark_change")


class StepMetric(NamedTuple):
    """A statistic of a column of metrics.parquet, over means of windows of at most so many measured steps.

    final: the last window; ratio: the last over the first; change: the last less the first; max, min: the largest and
    the smallest of all; peak: the largest step.
    """

    statistic: Literal["final", "ratio", "change", "max", "min"]
    column: str
    window: int


_STATISTICS = {
    "loss": ["final", "ratio"],
    "kl": ["max"],
    "gen_kl_error": ["max", "peak"],
    "token_mult_prob_error": ["max"],
    "validation_loss": ["final", "ratio", "change"],
    "validation_accuracy": ["final", "change"],
    "validation_margin": ["final", "change"],
    "accuracy": ["final"],
    "margin": ["final"],
    "grad_norm": ["max"],
    "reward_std": ["final", "min"],
    "zero_variance_share": ["final", "max"],
    "response_length_mean": ["ratio"],
    "truncation_rate": ["final", "max"],
    "entropy": ["final", "ratio"],
    "masked_share": ["final", "max"],
    "mismatch_share": ["max", "peak"],
    "failed_share": ["final", "max"],
    "unjudged_share": ["final", "max"],
    "unfinished_thoughts_share": ["final", "max"],
    "generating_share": ["final"],
    "waiting_share": ["final"],
    "training_share": ["final"],
    "weights_share": ["final"],
    "tool_call_frequency": ["final"],
    "tool_failure_frequency": ["final", "max"],
}
STEP_METRICS = {
    f"{column.removesuffix('_mean')}_{statistic}"
    if statistic in ("ratio", "change")
    else f"{statistic}_{column}": StepMetric(
        "max" if statistic == "peak" else statistic,
        column,
        1 if statistic == "peak" or column.startswith("validation_") else WINDOW,
    )
    for column, statistics in _STATISTICS.items()
    for statistic in statistics
}


class Criterion(Strict):
    """A bound on a finished stage; docs/gates.md defines the metrics."""

    metric: Literal[*HELD_OUT, *BENCHMARKS, *STEP_METRICS]
    environment: Text | None = None
    """Of held_out_change: the environment; none: the mean, with equal weights of environments."""
    benchmark: Text | None = Field(None, exclude_if=lambda name: name is None)
    """Of benchmark_score and benchmark_change: a task or benchmark of the evaluation."""
    against: Literal["parent", "first"] = "parent"
    """Of changes of scores: since the stage's parent, or since the chain's first scored stage."""
    min: float | None = None
    max: float | None = None
    action: Literal["stop", "warn"] = "stop"

    def _refuse_misfits(self) -> None:
        if self.min is None and self.max is None:
            raise invalid("a criterion needs min or max")
        if self.metric.endswith(("_share", "_rate", "_failure_frequency", "_accuracy")):
            for bound in {self.min, self.max} - {None}:
                if not 0 <= bound <= 1:
                    raise invalid(f"a bound of {bound:g} says nothing: {self.metric} lies between 0 and 1")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise invalid(f"no value is both at least {self.min:g} and at most {self.max:g}")
        if self.environment is not None and self.metric != "held_out_change":
            raise invalid("environment is for held_out_change; leave it out")
        if self.against != "parent" and (self.metric in STEP_METRICS or self.metric == "benchmark_score"):
            raise invalid("against is for changes of scores; leave it out")
        wants_one = self.metric in ("benchmark_score", "benchmark_change")
        if wants_one != (self.benchmark is not None):
            raise invalid(f"{self.metric} needs a benchmark" if wants_one else f"benchmark is not for {self.metric}")


ROLLOUTS = [
    Criterion(metric="peak_gen_kl_error", max=0.5),
    Criterion(metric="peak_mismatch_share", max=0.9),
    Criterion(metric="max_failed_share", max=0.1, action="warn"),
    Criterion(metric="max_unjudged_share", max=0.1, action="warn"),
]
"""The default bounds on rollouts; docs/gates.md has the reasons."""
