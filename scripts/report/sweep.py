"""The page of a sweep: its variants by score, their curves over each other, and the effect of each parameter."""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import UserError, run_program
from scripts.files import canonical_json
from scripts.records import Choice, read_if_there
from scripts.report.chart import COLOURS
from scripts.report.compare import ROW, TrainedStage
from scripts.report.cost import total
from scripts.report.curves import figures_of_groups
from scripts.report.page import write_page
from scripts.report.records import AS_OF, Score, furthest, is_trained, scores_of
from scripts.report.selection import selection_sentences
from scripts.stage.bootstrap import Change, changes
from scripts.stage.paths import StagePaths

RUNG = ".rung-"


@dataclass
class Variant:
    """A variant of a sweep: what it varies, what it left when it was last published, and what became of it.

    `dropped`: the step after which halving trained it no further; `notes`: what the choices say of it.
    """

    name: str
    varied: dict[str, Any]
    trained: TrainedStage | None = None
    problem: str | None = None
    dropped: int | None = None
    is_chosen: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The step that it reached; 0 where nothing of it is published."""
        return self.trained.record["step"] if self.trained else 0

    @cached_property
    def mean(self) -> Score | None:
        """Its mean held-out score."""
        return next(
            (score for score in scores_of(self.trained and self.trained.evaluation) if score.name == "mean"), None
        )

    @cached_property
    def bounds(self) -> Change | None:
        """The mean held-out score with the interval that its rows' scatter gives it."""
        if self.trained is None or self.trained.rewards is None:
            return None
        parts = self.trained.rewards.groupby("environment")["reward_after"]
        return changes({name: part.to_numpy() for name, part in parts})[1]


@dataclass(frozen=True)
class Effect:
    """A value of a parameter: the mean score of the variants that have it, and the difference from the first value.

    `pairs`: of how many pairs of variants, which differ in this parameter alone, the difference is the mean.
    """

    value: Any
    variants: int
    mean: float
    change: Change | None
    pairs: int


def read_variants(results: Path, varied: Mapping[str, dict[str, Any]], choices: Iterable[str]) -> list[Variant]:
    """The variants, those trained furthest first and of them the highest score; and what the choices made of them."""
    found = {name: Variant(name, values) for name, values in varied.items()}
    for choice in choices:
        record = read_if_there(StagePaths(results / choice).choice, Choice)
        if record is not None and not any(choice.startswith(f"{name}.") for name in varied):  # of one's checkpoints
            _note(found, choice, record)
    for variant in found.values():
        stage = furthest(StagePaths(results / variant.name))
        try:
            variant.trained = TrainedStage.read(stage) if is_trained(stage) else None
            variant.notes += [variant.trained.cost.adopted] if variant.trained and variant.trained.cost.adopted else []
        except UserError as error:
            variant.problem = str(error)
            print(error, file=sys.stderr)
    return sorted(found.values(), key=lambda each: (-each.step, -(each.mean.after if each.mean else -1.0), each.name))


def _note(variants: Mapping[str, Variant], choice: str, record: Choice) -> None:
    """Write down what a choice says of the variants; of halving's, which it trained no further."""
    for candidate in record["candidates"]:
        variant = variants.get(candidate["name"]) or variants.get(candidate["name"].rpartition(AS_OF)[0])
        if variant is None:
            continue
        at = f" at step {candidate['step']}" if candidate["name"] != variant.name else ""
        if RUNG in choice:
            if candidate["name"] not in record["chosen"]:
                variant.dropped = candidate["step"]
        elif candidate["name"] in record["chosen"]:
            variant.is_chosen = True
            variant.notes.append(f"chosen by {record['by']}{at}")
        elif candidate["left_out"]:
            variant.notes.append(f"left out{at}: {candidate['left_out']}")
        elif candidate["tied"]:
            variant.notes.append(f"tied with the chosen{at}")


def effects(variants: list[Variant], scored: Mapping[str, TrainedStage]) -> dict[str, list[Effect]]:
    """The effect of each value of each parameter, by parameter.

    The rows count that all variants answered. Over the pairs (a, b) of variants that differ in the parameter alone, a
    with its first value and b with the other, a row's difference is the mean of b's reward less a's; of these
    differences the interval is taken as of any change (scripts.stage.bootstrap).
    """
    rewards = {name: stage.rewards for name, stage in scored.items() if stage.rewards is not None}
    if not rewards:
        return {}
    columns = [
        table.drop_duplicates(ROW).set_index(ROW)["reward_after"].rename(name) for name, table in rewards.items()
    ]
    rows = pd.concat(columns, axis="columns", join="inner")
    means = rows.groupby("environment").mean().mean()
    points = {variant.name: variant.varied for variant in variants if variant.name in rewards}
    found: dict[str, list[Effect]] = {}
    for parameter in dict.fromkeys(key for point in points.values() for key in point):
        groups: dict[str, list[str]] = {}
        for name, value in sorted(((name, point.get(parameter)) for name, point in points.items()), key=_by_value):
            groups.setdefault(canonical_json(value), []).append(name)
        first, *_ = groups.values()
        for names in groups.values():
            pairs = [
                (a, b)
                for a, b in product(first, names)
                if a != b and _without(points[a], parameter) == _without(points[b], parameter)
            ]
            change = None
            if pairs:
                difference = sum(rows[b] - rows[a] for a, b in pairs) / len(pairs)
                change = changes({name: part.to_numpy() for name, part in difference.groupby("environment")})[1]
            effect = Effect(points[names[0]].get(parameter), len(names), means[names].mean(), change, len(pairs))
            found.setdefault(parameter, []).append(effect)
    return found


def _by_value(entry: tuple[str, Any]) -> tuple[bool, float]:
    """Numbers in their order, before all else in the order of the sweep."""
    value = entry[1]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (not is_number, value if is_number else 0.0)


def _without(point: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    return {key: value for key, value in point.items() if key != parameter}


def comparable(results: Path, variants: list[Variant]) -> tuple[dict[str, TrainedStage], int | None]:
    """The variants at one step, for the effects, and that step: the first rung where halving dropped some."""
    if any(variant.dropped for variant in variants):
        step = min(variant.dropped for variant in variants if variant.dropped)
        folders = {variant.name: StagePaths(results / f"{variant.name}{AS_OF}{step}") for variant in variants}
        return {name: TrainedStage.read(paths) for name, paths in folders.items() if is_trained(paths)}, step
    return {variant.name: variant.trained for variant in variants if variant.trained}, None


def groups_of(variants: list[Variant], parameter: str) -> dict[str, dict[str, pd.DataFrame]]:
    """The metrics of the trained variants in at most six groups, by the values of a parameter."""
    points = sorted(((each, each.varied.get(parameter)) for each in variants if each.trained), key=_by_value)
    values = list(dict.fromkeys(value_text(value) for _, value in points))
    size = -(-len(values) // len(COLOURS)) or 1
    groups: dict[str, dict[str, pd.DataFrame]] = {}
    for variant, value in points:
        place = values.index(value_text(value)) // size * size
        ends = dict.fromkeys((values[place], values[min(place + size, len(values)) - 1]))
        groups.setdefault(f"{parameter} {' to '.join(ends)}", {})[variant.name] = variant.trained.metrics
    return groups


def value_text(value: Any) -> str:
    """A parameter's value for people."""
    if value is None:
        return "not set"
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def write_sweep_page(
    results: Path, sweep: str, varied: Mapping[str, dict[str, Any]], choices: list[str], output: Path
) -> None:
    """Write the page of a sweep; `varied`: of each variant its values by key, `choices`: the names of choices."""
    variants = read_variants(results, varied, choices)
    parameters = list(dict.fromkeys(key for values in varied.values() for key in values))
    scored, step = comparable(results, variants)
    chosen = next((variant.name for variant in variants if variant.is_chosen), variants[0].name)
    costs = [variant.trained.cost for variant in variants if variant.trained]
    write_page(
        output,
        "sweep.html",
        sweep=sweep,
        parameters=parameters,
        variants=variants,
        figures=list(figures_of_groups(groups_of(variants, parameters[0]), chosen)),
        chosen=chosen,
        effects=effects(variants, scored),
        effects_at=step,
        cost=total(costs),
        trained_steps=sum(variant.step for variant in variants),
        grid_steps=variants[0].step * len(variants),
        selection=selection_sentences(results, [chosen]),
        text=value_text,
    )


def main() -> None:
    """Command line of the sweep's page."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.sweep", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="the folder with the variants' directories")
    parser.add_argument("--sweep", required=True, help="the stage that is swept")
    parser.add_argument("--variants", type=json.loads, required=True, help="JSON: of each variant what it varies")
    parser.add_argument("--choices", nargs="*", default=[], help="the choices among its variants, in order")
    parser.add_argument("--output", type=Path, required=True, help="HTML")
    arguments = parser.parse_args()
    write_sweep_page(arguments.results, arguments.sweep, arguments.variants, arguments.choices, arguments.output)


if __name__ == "__main__":
    run_program(main)
