"""Judge a finished stage by its success criteria; gate.json holds the verdict, criteria.json the measurements.

Logged steps are judged over windows, so that a noisy step decides nothing.
"""

import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from scripts.errors import UserError
from scripts.evaluate.benchmarks import interval_of
from scripts.files import write_json
from scripts.model.shape import BYTE_VOCABULARY
from scripts.program import run_command_line
from scripts.recipe.criteria import BENCHMARKS, STEP_METRICS, WINDOW, Criterion
from scripts.recipe.load import load_recipe
from scripts.recipe.model import MODEL
from scripts.recipe.stage_settings import StageSettings
from scripts.records import Benchmarks, Criteria, Evaluation, Gate, read_if_there, read_record
from scripts.stage.bootstrap import LEAST_ROWS
from scripts.stage.measured import trained_steps
from scripts.stage.paths import StagePaths
from scripts.stage.tables import METRICS, read_table
from scripts.stage.training_folder import TrainingFolder

UNSCORED = "it, or what it is compared with, was not scored by the same task in the same way, or has no standard error"
NO_KL = (
    ": the stage loads no reference model (loss_fn.reference_policy_kl_penalty is 0); bound entropy_ratio, "
    "max_gen_kl_error or max_token_mult_prob_error instead"
)
COLLAPSE, UNIFORM = -0.1, 0.99
GARBAGE = " (sampler and trainer hold different models: traps 24 and 82 of docs/traps.md)"
CHANGES = {"parent": "change", "first": "change_from_first"}
SINCE = {"parent": " since the parent", "first": " since the chain's first scored stage"}


class Result(NamedTuple):
    """A criterion's outcome: pass, warn, stop or not measured."""

    outcome: str
    says: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    environment: str | None = None
    step: int | None = None


class Measurement(NamedTuple):
    """Hold the value of a criterion's metric.

    `value` is NaN, outside every bound, where a step's value is not finite; `over` says in words what it is of. `step`
    ends the first window outside the bound; for final values and ratios, the first window of the last run outside it.
    None: the bound is kept.
    """

    value: float
    window: int
    over: str
    step: int | None


def judge(
    criterion: Criterion,
    steps: list[dict[str, Any]],
    evaluation: dict[str, Any] | None,
    benchmarks: dict[str, Any] | None = None,
) -> Result:
    """Judge a stage's logged steps, eval.json or benchmarks.json (None: missing) by a criterion.

    A score or change breaks a bound when its whole interval lies beyond.
    """
    if criterion.metric not in STEP_METRICS:
        return _judge_scores(criterion, benchmarks if criterion.metric in BENCHMARKS else evaluation)
    found = judge_steps(criterion, steps)
    if found is None:
        advice = NO_KL if STEP_METRICS[criterion.metric].column == "kl" else ""
        return Result("not measured", f"{criterion.metric} was not measured ({bounds_text(criterion)}){advice}")
    value = None if math.isnan(found.value) else found.value
    number = "not finite" if value is None else f"{value:.4g}"
    says = f"{criterion.metric} is {number}, {bounds_text(criterion)} ({found.over})"
    if found.step is None:
        return Result("pass", says, value)
    return Result(criterion.action, f"{says}, first at step {found.step}", value, step=found.step)


def judge_steps(criterion: Criterion, entries: list[dict[str, Any]]) -> Measurement | None:
    """Judge the logged steps, in order, by a criterion; None where its metric was not measured.

    A window has the metric's width, at most half of the measured steps.
    """
    statistic, column, widest = STEP_METRICS[criterion.metric]
    measured = [entry for entry in entries if entry.get(column) is not None]
    is_relative = statistic in ("ratio", "change") and column.startswith("validation_")
    if len(measured) < (2 if is_relative else 1):
        return None
    window = max(1, min(widest, len(measured) // 2))
    over = f"means of {window} steps" if window > 1 else "single steps"
    values = np.array([entry[column] for entry in measured], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
        if statistic == "ratio":
            means = means / means[0]
        elif statistic == "change":
            means = means - means[0]
    means = np.where(np.isfinite(means), means, np.nan)
    value = float({"max": means.max(), "min": means.min()}.get(statistic, means[-1]))
    low, high = limits(criterion)
    if low <= value <= high:
        return Measurement(value, window, over, None)
    kept = (means >= low) & (means <= high)
    last_kept = kept.nonzero()[0].max(initial=-1)
    first = kept.argmin() if statistic in ("max", "min") else last_kept + 1
    return Measurement(value, window, over, measured[first + window - 1]["step"])


def limits(criterion: Criterion) -> tuple[float, float]:
    """Return the least and the largest value that keep a criterion's bounds."""
    return -np.inf if criterion.min is None else criterion.min, np.inf if criterion.max is None else criterion.max


def bounds_text(criterion: Criterion) -> str:
    """Return a criterion's bounds in words."""
    bounds = {"min": criterion.min, "max": criterion.max}
    return ", ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)


def _judge_scores(criterion: Criterion, record: dict[str, Any] | None) -> Result:
    """Judge the environment or benchmark that breaks the bound, or else the lowest upper bound; None names the mean."""
    named, is_score = criterion.environment or criterion.benchmark, criterion.metric == "benchmark_score"
    if record and criterion.metric == "held_out_change" and named is None:
        entries = {None: record["mean"]}
    else:
        every = record["benchmarks" if criterion.metric in BENCHMARKS else "environments"] if record else {}
        entries = {name: entry for name, entry in every.items() if named in (None, name)}
    kind = CHANGES[criterion.against]
    figures = {name: interval_of(entry) if is_score else entry.get(kind) for name, entry in entries.items()}
    measured = {name: figure for name, figure in figures.items() if figure is not None}
    if not measured:
        why = UNSCORED if criterion.metric in BENCHMARKS else _why_unmeasured(criterion, record, entries)
        says = f"{criterion.metric} was not measured ({bounds_text(criterion)}): {why}"
        return Result("not measured", says, environment=named)
    results = [_judge_figure(criterion, name, figure, len(measured)) for name, figure in measured.items()]
    worst = min(results, key=lambda result: (result.outcome == "pass", result.high))
    others = [result.environment for result in results if result.outcome != "pass" and result is not worst]
    return worst._replace(says=f"{worst.says}; also broken by {', '.join(others)}") if others else worst


def _judge_figure(criterion: Criterion, name: str | None, figure: dict[str, float], compared: int) -> Result:
    """Judge a score or change by its interval; the worst of several by the interval for all `compared`."""
    is_worst = criterion.metric.startswith("worst_")
    low, high = (figure.get(f"joint_{end}", figure[end]) if is_worst else figure[end] for end in ("low", "high"))
    least, most = limits(criterion)
    is_score, among = criterion.metric == "benchmark_score", criterion.metric.split("_")[1]
    form = ".3f" if is_score else "+.3f"
    says = (
        f"{criterion.metric}{'' if is_score else SINCE[criterion.against]}{f' of {name}' if name else ''} is "
        f"{figure['value']:{form}}, 95 % interval {low:{form}} to {high:{form}}"
        f"{f' ({compared} {among}s at once)' if is_worst else ''}, {bounds_text(criterion)}"
    )
    is_broken = high < least or low > most
    if not is_broken and (low < least or high > most):
        says += "; undecided, for the interval reaches beyond the bound"
    return Result(criterion.action if is_broken else "pass", says, figure["value"], low, high, name)


def _why_unmeasured(
    criterion: Criterion, record: dict[str, Any] | None, entries: dict[str | None, dict[str, Any]]
) -> str:
    if record is None:
        return "the stage has no held-out scores"
    if not entries:
        return f"no held-out row is of {criterion.environment}"
    if all(entry["before"] is None for entry in entries.values()):
        return "the stage's start was not scored on the same rows"
    if all(entry["change"] is None for entry in entries.values()):
        return f"too few held-out rows for an interval ({LEAST_ROWS} an environment at least)"
    return "no earlier stage of the chain was scored on the same rows"


def _of_sft(steps: int, vocabulary: int) -> list[Criterion]:
    """Return bounds on the loss of enough steps: it fell, and is not a uniform model's."""
    if steps < 2 * WINDOW:
        return []
    uniform = round(UNIFORM * math.log(vocabulary), 3)
    return [Criterion(metric="loss_ratio", max=1, action="warn"), Criterion(metric="final_loss", max=uniform)]


def _of_rewards(steps: int, vocabulary: int) -> list[Criterion]:
    """Return the bound on a reward model's accuracy: a coin's."""
    return [Criterion(metric="final_validation_accuracy", min=0.5)]


def _of_no_loss(steps: int, vocabulary: int) -> list[Criterion]:
    """Return no bounds: the loss of another algorithm says nothing by itself."""
    return []


BY_ALGORITHM = {"sft": _of_sft, "reward": _of_rewards}
"""The default bounds on an algorithm's own figures, by steps and vocabulary."""


def default_criteria(settings: StageSettings, steps: int, vocabulary: int) -> list[Criterion]:
    """Return the criteria of the default gate whose metrics the recipe's gate does not bound.

    A loss of almost the logarithm of the vocabulary is a uniform model's; of few steps a loss tells nothing.
    """
    criteria = [*settings.running_gate[len(settings.gate) :], Criterion(metric="held_out_change", min=COLLAPSE)]
    criteria += BY_ALGORITHM.get(settings.algorithm, _of_no_loss)(steps, vocabulary)
    stated = {criterion.metric for criterion in settings.gate}
    return [criterion for criterion in criteria if criterion.metric not in stated and settings.default_gate]


def criteria_record(stage: str, criteria: list[Criterion], results: list[Result]) -> dict[str, Any]:
    """Return criteria.json: the gravest outcome (unmeasured: a warning) and each criterion's measurement."""
    outcomes = {result.outcome for result in results}
    verdict = "stop" if "stop" in outcomes else "warn" if outcomes & {"warn", "not measured"} else "pass"
    rows = [
        {
            "metric": criterion.metric,
            "environment": result.environment,
            "against": None if criterion.metric in STEP_METRICS else criterion.against,
            **{key: getattr(result, key) for key in ("value", "low", "high")},
            **{key: getattr(criterion, key) for key in ("min", "max", "action")},
            **{key: getattr(result, key) for key in ("outcome", "step", "says")},
            "figure": f"{stage}/stage.html",
        }
        for criterion, result in zip(criteria, results, strict=True)
    ]
    return {"stage": stage, "verdict": verdict, "criteria": rows}


def main(
    recipe: Path,
    stage: str,
    metrics: Annotated[Path, "metrics.parquet"],
    criteria: Annotated[Path, "criteria.json, to be written"],
    output: Annotated[Path, "gate.json"],
    evaluation: Annotated[Path | None, "eval.json, where there is one"] = None,
    benchmarks: Annotated[Path | None, "benchmarks.json, where a criterion is of it"] = None,
) -> None:
    """Judge a stage by the recipe's criteria."""
    settings, model = load_recipe(recipe).graph[stage].settings, StagePaths(output.parent).sibling(MODEL).export
    logged = read_table(metrics, METRICS).to_pylist()
    held_out = read_record(evaluation, Evaluation) if evaluation else None
    tasks = read_record(benchmarks, Benchmarks) if benchmarks else None
    config = read_if_there(model / "config.json", dict[str, Any]) or {}
    more = default_criteria(settings, len(trained_steps(logged)), config.get("vocab_size", BYTE_VOCABULARY))
    judged = [(criterion, judge(criterion, logged, held_out, tasks)) for criterion in settings.gate + more]
    own = len(settings.gate)
    kept = judged[:own] + [each for each in judged[own:] if each[1].outcome != "not measured"]
    record = criteria_record(stage, [criterion for criterion, _ in kept], [result for _, result in kept])
    for row in record["criteria"][own:]:
        row["default"] = True
    for row in record["criteria"]:
        print(f"{stage}: {row['outcome']}: {row['says']}")
    print(f"{stage}: the gate says {record['verdict']}", flush=True)
    write_json(criteria, record)
    write_json(output, {key: record[key] for key in ("stage", "verdict")})


def words_of_stop(paths: StagePaths) -> str | None:
    """Return why a stage's gate says stop, a line a criterion; None where it does not."""
    if read_record(paths.gate, Gate)["verdict"] != "stop":
        return None
    lines = [f"{paths.gate}: the gate of {paths.name} says stop; mend the stage or its gate in the recipe"]
    for criterion in read_record(paths.criteria, Criteria)["criteria"]:
        if criterion["outcome"] == "stop":
            look = paths.rollouts if criterion["low"] is not None else paths.directory.parent / criterion["figure"]
            lines.append(f"{criterion['says']}; look at {look}, which Snakemake makes")
    return "\n    ".join(lines)


def refuse_divergence(stage: str, gate: list[Criterion], training: TrainingFolder, last_step: int) -> None:
    """Raise UserError when a running stage breaks a bound that stops its gate and that later steps cannot mend.

    Only bounds on the largest or smallest window count, once windows have full width, and on the largest step. Steps
    logged after `last_step` are ignored: they train again.
    """
    bounds = [bound for criterion in gate if (bound := _lasting(criterion)) is not None]
    logged = {entry["step"]: entry for entry in training.recent_steps} if bounds else {}
    steps = [logged[step] for step in sorted(logged) if step <= last_step]
    for bound in bounds:
        found = judge_steps(bound, steps)
        if found is None or found.window < STEP_METRICS[bound.metric].window or found.step is None:
            continue
        raise UserError(
            f"{stage}: stopped, as its gate would stop the chain: {bound.metric} is {found.value:.4g}, "
            f"{bounds_text(bound)} ({found.over}), first at step {found.step}; mend the stage or the gate in the recipe"
            f"{GARBAGE if found.over == 'single steps' else ''}. The steps are in {training.log}"
        )


def _lasting(criterion: Criterion) -> Criterion | None:
    """Return the bound of a stopping criterion that no later step can mend once broken, or None."""
    statistic = STEP_METRICS[criterion.metric].statistic if criterion.metric in STEP_METRICS else None
    if criterion.action != "stop" or statistic not in ("max", "min") or getattr(criterion, statistic) is None:
        return None
    return criterion.model_copy(update={"min" if statistic == "max" else "max": None})


if __name__ == "__main__":
    run_command_line(main)
