"""Write the page of a sweep: its variants by score, and the curves of the best."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.records import Choice, read_if_there
from scripts.report.chart import COLOURS, figures_of
from scripts.report.cost import total
from scripts.report.page import write_page
from scripts.report.scores import Score, scores_of
from scripts.report.selection import selection_sentences
from scripts.report.trained_stage import AS_OF, TrainedStage, is_trained
from scripts.stage.paths import StagePaths


@dataclass
class Variant:
    """A variant of a sweep: the values that differ, its published files if any, and the choices' words about it."""

    name: str
    varied: dict[str, Any]
    trained: TrainedStage | None = None
    is_chosen: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def mean(self) -> Score | None:
        """The mean held-out score."""
        scores = scores_of(self.trained and self.trained.evaluation)
        return scores[-1] if scores else None


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
            if name not in found:
                continue
            if candidate["name"] in record["chosen"]:
                found[name].is_chosen = True
                found[name].notes.append(f"chosen by {record['by']}{at}")
            elif candidate["left_out"] or candidate["tied"]:
                why = f"left out{at}: {candidate['left_out']}" if candidate["left_out"] else f"tied with the chosen{at}"
                found[name].notes.append(why)
    return sorted(found.values(), key=lambda each: (-(each.mean.after if each.mean else -1.0), each.name))


def write_sweep_page(
    results: Path, sweep: str, varied: Mapping[str, dict[str, Any]], choices: list[str], output: Path
) -> None:
    """Write the page of a sweep; `varied` holds each variant's values by key, `choices` the choices' names."""
    variants = read_variants(results, varied, choices)
    trained = {variant.name: variant.trained for variant in variants if variant.trained}
    chosen = next((variant.name for variant in variants if variant.is_chosen), variants[0].name)
    write_page(
        output,
        "sweep.html",
        sweep=sweep,
        parameters=list(dict.fromkeys(key for values in varied.values() for key in values)),
        variants=variants,
        figures=list(figures_of({name: stage.metrics for name, stage in [*trained.items()][: len(COLOURS)]})),
        cost=total([stage.cost for stage in trained.values()]),
        trained=len(trained),
        steps=sum(stage.record["step"] for stage in trained.values()),
        selection=selection_sentences(results, [chosen]),
    )
