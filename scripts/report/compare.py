"""Runs side by side on one page: data and settings, scores with intervals of the differences, curves, costs."""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from scripts.errors import UserError
from scripts.report.chain import starts_of
from scripts.report.chart import COLOURS, Figure, figures_of
from scripts.report.page import short_name, write_page
from scripts.report.scores import Score, scores_by_tag, scores_of, scores_side_by_side
from scripts.report.trained_stage import TrainedStage, changes_between, differing_settings
from scripts.stage.bootstrap import Change
from scripts.stage.paths import StagePaths
from scripts.stage.tables import ROW

ASKED = ("metric", "num_fewshot", "version", "chat_template", "samples")
"""What decides, besides the model, a score on a benchmark."""
WEIGHTS = (".safetensors", ".distcp")


class Difference(NamedTuple):
    """A score in each run, with the change from the first run on the same rows; None: unknown."""

    name: str
    scores: list[float | None]
    changes: list[Change | None]


class Run(NamedTuple):
    """The trained stages of a run, parents first, and the messages of unreadable stages."""

    stages: dict[str, TrainedStage]
    damaged: dict[str, str]


@dataclass(frozen=True)
class ComparedStage:
    """A stage in each run with a stage of the name."""

    name: str
    stages: dict[str, TrainedStage]

    @property
    def is_shared(self) -> bool:
        """Tell whether several runs have the stage."""
        return len(self.stages) > 1

    @property
    def run(self) -> str:
        """The first run with the stage."""
        return next(iter(self.stages))

    @cached_property
    def is_identical(self) -> bool:
        """Tell whether several runs published the same weights, and scored them alike."""
        published = [
            {name: file for name, file in stage.record["files"].items() if name.endswith(WEIGHTS)}
            for stage in self.stages.values()
        ]
        return self.is_shared and not self.apart and all(files == published[0] for files in published)

    @cached_property
    def figures(self) -> list[Figure]:
        """Curves on the same axes."""
        return list(figures_of({run: stage.logged for run, stage in self.stages.items()}))

    @cached_property
    def differing(self) -> list[tuple[str, list[Any]]]:
        """The data, evaluation and settings with different values."""
        return differing_settings([stage.facts | stage.settings for stage in self.stages.values()])

    @cached_property
    def apart(self) -> dict[str, str]:
        """The reasons why a run's held-out scores are not comparable with the first run's, by run."""
        found, keys, first = {}, ["environment", *ROW], self.stages[self.run]
        for run, stage in self.stages.items():
            differing = [] if stage.is_asked_like(first) else differing_settings([first.way, stage.way])
            why = [f"{key} {another}, not {one}" for key, (one, another) in differing]
            if first.rollouts is not None and stage.rollouts is not None:
                both = len(first.rollouts[keys].merge(stage.rollouts[keys]))
                most = max(len(first.rollouts), len(stage.rollouts))
                why += [f"{both} of {most} held-out rows are common"] * (both < most)
            found |= {run: "; ".join(why)} if why else {}
        return found

    @cached_property
    def held_out(self) -> list[Difference]:
        """The held-out scores, the mean first."""
        return self._differences(scores_of, [stage.rollouts for stage in self.stages.values()])

    @cached_property
    def by_tag(self) -> list[Difference]:
        """The held-out scores by environment and tag."""
        rollouts = [stage.rollouts for stage in self.stages.values()]
        return self._differences(scores_by_tag, [None if each is None else _of_tags(each) for each in rollouts])

    def _differences(self, scores_in: Callable[..., Any], rollouts: list[pd.DataFrame | None]) -> list[Difference]:
        table = scores_side_by_side([stage.evaluation for stage in self.stages.values()], scores_in)
        (start, first), *others = zip(self.stages.values(), rollouts, strict=True)
        differences = [changes_between(first, rows if stage.is_asked_like(start) else None) for stage, rows in others]
        changes = {name: [None, *(found.get(name) for found in differences)] for name in table}
        after = {name: [score and score.after for score in scores] for name, scores in table.items()}
        return [Difference(name, after[name], changes[name]) for name in sorted(table, key=lambda name: name != "mean")]

    @cached_property
    def benchmarks(self) -> dict[str, list[Score | None]]:
        """The scores on benchmarks by run."""
        return scores_side_by_side([stage.benchmarks for stage in self.stages.values()])

    @cached_property
    def asked_otherwise(self) -> dict[str, str]:
        """How runs were asked a benchmark in different ways, by the benchmark's name."""
        records = [stage.benchmarks["benchmarks"] for stage in self.stages.values() if stage.benchmarks]
        found = {}
        for name in dict.fromkeys(name for record in records for name in record):
            ways = [{key: record[name].get(key) for key in ASKED} for record in records if name in record]
            if differing := differing_settings(ways):
                found[name] = "; ".join(f"{key} {' or '.join(map(str, dict.fromkeys(of)))}" for key, of in differing)
        return found


def _of_tags(rollouts: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each tag, as rows of an environment that the tag names."""
    rows = rollouts.explode("tags").dropna(subset="tags")
    return rows.assign(environment=rows["environment"].map(short_name) + ": " + rows["tags"].astype(str))


def read_run(results: Path) -> Run:
    """Return the trained stages of a folder of results; UserError without a readable stage."""
    found, damaged = {}, {}
    for path in sorted(results.glob("*/ckpt/record.json")):
        stage = TrainedStage(StagePaths(path.parent.parent))
        try:
            found[stage.paths.name] = stage.read("row", "settings", "facts", "benchmarks")
        except UserError as error:
            damaged[stage.paths.name] = str(error)
    if not found:
        nothing = f"{results}: no readable trained stage there; name a folder of results, such as results/tiny"
        raise UserError("\n".join([nothing, *damaged.values()]))
    starts = {name: [start["stage"] for start in starts_of(stage.record)] for name, stage in found.items()}
    return Run({name: found[name] for name in TopologicalSorter(starts).static_order() if name in found}, damaged)


def compare(runs: Mapping[str, Run]) -> list[ComparedStage]:
    """Return a comparison for every stage, in the order of the first run with the stage."""
    names = dict.fromkeys(name for run in runs.values() for name in run.stages)
    return [
        ComparedStage(name, {label: run.stages[name] for label, run in runs.items() if name in run.stages})
        for name in names
    ]


def labels_of(folders: list[Path]) -> list[str]:
    """Return the shortest distinct ends of the folders' paths."""
    paths = [folder.resolve().parts for folder in folders]
    ends = (["/".join(parts[-count:]) for parts in paths] for count in range(1, max(map(len, paths))))
    return next((labels for labels in ends if len({*labels}) == len(labels)), [*map(str, folders)])


def write_comparison(folders: list[Path], output: Path) -> None:
    """Write the page of several runs; changes count from the first run."""
    labels = labels_of(folders)
    if not 2 <= len(set(labels)) == len(labels) <= len(COLOURS):
        raise UserError(f"two to {len(COLOURS)} different folders can be compared, not {', '.join(labels)}")
    runs = {label: read_run(folder) for label, folder in zip(labels, folders, strict=True)}
    for problem in (problem for run in runs.values() for problem in run.damaged.values()):
        print(f"left out: {problem}", file=sys.stderr)
    comparisons, refused = compare(runs), defaultdict(list)
    for stage in comparisons:
        for run, why in stage.apart.items():
            refused[f"{run} beside {stage.run}: {why}"].append(stage.name)
    write_page(output, "compare.html", runs=runs, comparisons=comparisons, refused=refused)
