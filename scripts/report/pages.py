"""Write the pages of a whole run: overview, environments, sweeps, and summary.csv."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd

from scripts.errors import UserError
from scripts.files import write_text
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe
from scripts.recipe.model import MODEL
from scripts.records import Benchmarks, Choice, Evaluation, read_if_there
from scripts.report.chain import readable
from scripts.report.chart import COLOURS, figures_of
from scripts.report.overview import Lineage, write_overview
from scripts.report.page import write_page
from scripts.report.scores import (
    Score,
    sampling_sentences,
    scores_by_tag,
    scores_of,
    scores_side_by_side,
    selection_sentences,
)
from scripts.report.trained_stage import AS_OF, TrainedStage, is_trained, total
from scripts.stage.paths import StagePaths
from scripts.stage.seeds import exports_alike

Rows = Sequence[Any]  # of Evaluation, Benchmarks, or the summary
# From low to high: safe for every colour vision, ordered in grey.
CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


@dataclass
class Variant:
    """A variant of a sweep: the values that differ, its published files if any, and the choices' words about it."""

    name: str
    varied: dict[str, Any]
    trained: TrainedStage | None = None
    is_chosen: bool = False
    notes: list[str] = field(default_factory=list)
    twins: list[str] = field(default_factory=list)
    """Other variants with the same weights."""

    @property
    def mean(self) -> Score | None:
        """The mean held-out score."""
        scores = scores_of(self.trained and self.trained.evaluation)
        return scores[-1] if scores else None

    @property
    def loss(self) -> float | None:
        """The loss on held-out rows of written answers after the stage."""
        validation = self.trained.validation if self.trained else None
        return validation["loss"]["after"] if validation else None


def main(recipe: Path, results: Annotated[Path, "the run's folder of results"]) -> None:
    """Write the pages of a run; damaged records are printed and left out."""
    loaded = load_recipe(recipe)
    stages = loaded.graph.stage_names
    sweep_of = {variant: sweep for sweep, variants in loaded.sweeps.items() for variant in variants}
    paths = {name: StagePaths(results / name) for name in (MODEL, *stages, *loaded.choices)}
    read = ((name, readable(paths[name].choice, Choice, tells=True)) for name in loaded.choices)
    choices = {name: choice for name, choice in read if choice}
    parents = {name: loaded.stages[name].parent or "" for name in stages}
    roles = {name: loaded.stages[name].roles for name in stages}
    write_overview(results, Lineage(parents, sweep_of, choices, roles), results / "overview.html")
    rows = list(rows_of(paths[name] for name in stages))
    write_text(results / "summary.csv", pd.DataFrame(rows).to_csv(index=False, float_format="%.6g"))
    measured = [readable(paths[name].evaluation, Evaluation, tells=True) for name in stages]
    evaluations = [evaluation for evaluation in measured if scores_of(evaluation)]
    benchmarks = [readable(paths[name].benchmarks, Benchmarks, tells=True) for name in (MODEL, *stages)]
    if evaluations or any(benchmarks):
        page = results / "environments.html"
        write_environments_page(evaluations, page, [*filter(None, benchmarks)], rows)
    for sweep, varied in loaded.sweeps.items():
        among = [name for name, choice in loaded.choices.items() if choice.stage == sweep]
        write_sweep_page(results, sweep, varied, among, results / sweep / "sweep.html")


def rows_of(stages: Iterable[StagePaths]) -> Iterator[dict[str, Any]]:
    """Yield a row of summary.csv a stage; print damaged records and mark the row."""
    for stage in stages:
        try:
            says = " ".join(selection_sentences(stage.directory.parent, [stage.name]))
            yield TrainedStage(stage).row | ({"selection": says} if says else {})
        except UserError as error:
            print(error, file=sys.stderr)
            yield {"stage": stage.name, "gate": "damaged"}


def colour(share: float) -> tuple[str, str]:
    """Return the background and text colour of a cell at a share (0 to 1) of the scale."""
    shares = np.linspace(0, 1, len(CIVIDIS))
    mixed = [round(np.interp(share, shares, channel)) for channel in zip(*CIVIDIS, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed), "#000" if share >= 0.5 else "#fff"


def write_environments_page(evaluations: Rows, output: Path, benchmarks: Rows = (), summary: Rows = ()) -> None:
    """Write the heat maps; the scale goes from 0 to 1, or to a higher best score. `summary`: the stages' costs."""
    write_page(
        output,
        "environments.html",
        environments=_heat_map(evaluations) if evaluations else None,
        tags=_heat_map(evaluations, scores_by_tag) if any(map(scores_by_tag, evaluations)) else None,
        benchmarks=_heat_map(benchmarks) if benchmarks else None,
        sampling=_by_stages(evaluations),
        scale=[colour(share / 10) for share in range(11)],
        costs={row["stage"]: row for row in summary},
    )


def _by_stages(evaluations: Rows) -> list[str]:
    """Return each way in which held-out responses were sampled, with the stages where they differ."""
    ways: dict[str, list[str]] = {}
    for record in evaluations:
        for sentence in sampling_sentences(record):
            ways.setdefault(sentence, []).append(record["stage"])
    shared = len(evaluations)
    return [way if len(stages) == shared else f"{', '.join(stages)}: {way}" for way, stages in ways.items()]


def _heat_map(records: Rows, scores: Callable[..., list[Score]] = scores_of) -> Any:
    table = scores_side_by_side([*records], scores)
    top = max([1.0, *(score.after for row in table.values() for score in row if score)])
    return {
        "stages": [record["stage"] for record in records],
        "table": table,
        "top": top,
        "colour_of": lambda score: colour(score.after / top),
    }


def read_variants(results: Path, varied: Mapping[str, dict[str, Any]], choices: Iterable[str]) -> list[Variant]:
    """Read a sweep's variants, the highest score first, with the words of the choices among them."""
    found = {name: Variant(name, values) for name, values in varied.items()}
    for variant in found.values():
        paths = StagePaths(results / variant.name)
        try:
            variant.trained = TrainedStage(paths).read("row") if is_trained(paths) else None
            variant.notes += [] if variant.trained else ["not trained yet"]
        except UserError as error:
            variant.notes.append(str(error))
            print(error, file=sys.stderr)
    for record in filter(None, (read_if_there(StagePaths(results / choice).choice, Choice) for choice in choices)):
        for candidate in record["candidates"]:
            name, _, step = candidate["name"].partition(AS_OF)
            at = f" at step {step}" if step else ""
            if (variant := found.get(name)) and candidate["name"] in record["chosen"]:
                variant.is_chosen = True
                variant.notes.append(f"chosen by {record['by']}{at}")
            elif variant and candidate["left_out"]:
                variant.notes.append(f"left out{at}: {candidate['left_out']}")
            elif variant and candidate["tied"]:
                variant.notes.append(f"tied with the chosen{at}")
    return sorted(found.values(), key=_order)


def _order(variant: Variant) -> tuple[float, float, str]:
    """Return by what variants are sorted: the highest score first, or the lowest loss on held-out rows."""
    score = variant.mean.after if variant.mean else -1.0
    loss = math.inf if variant.loss is None else variant.loss
    return -score, loss, variant.name


def merged(variants: list[Variant], results: Path) -> list[Variant]:
    """Return the variants, those with equal exports as one: the chosen, or else the first of them."""
    by_name = {variant.name: variant for variant in variants}
    shown = dict(by_name)
    for names in exports_alike(results, by_name):
        kept = next((name for name in names if by_name[name].is_chosen), names[0])
        twins = [by_name[name] for name in names if name != kept]
        one = by_name[kept]
        one.twins = [twin.name for twin in twins]
        one.notes.append("the same weights, so one result and not several that agree")
        for key in one.varied:
            values = [one.varied[key], *(twin.varied[key] for twin in twins)]
            different = list(dict.fromkeys(map(str, values)))
            if len(different) > 1:
                one.varied = one.varied | {key: ", ".join(different)}
        for twin in twins:
            del shown[twin.name]
    return list(shown.values())


def write_sweep_page(
    results: Path, sweep: str, varied: Mapping[str, dict[str, Any]], choices: list[str], output: Path
) -> None:
    """Write the page of a sweep; `varied` holds each variant's values by key, `choices` the choices' names."""
    variants = read_variants(results, varied, choices)
    trained = {variant.name: variant.trained for variant in variants if variant.trained}
    chosen = next((variant.name for variant in variants if variant.is_chosen), variants[0].name)
    shown = merged(variants, results)
    drawn = {variant.name: variant.trained for variant in shown if variant.trained}
    write_page(
        output,
        "sweep.html",
        sweep=sweep,
        parameters=list(dict.fromkeys(key for values in varied.values() for key in values)),
        variants=shown,
        in_all=len(variants),
        figures=list(figures_of({name: stage.logged for name, stage in [*drawn.items()][: len(COLOURS)]})),
        cost=total([stage.cost for stage in trained.values()]),
        trained=len(trained),
        steps=sum(stage.record["step"] for stage in trained.values()),
        selection=selection_sentences(results, [chosen]),
    )


if __name__ == "__main__":
    run_command_line(main)
