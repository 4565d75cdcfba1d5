"""Estimate the rest: of trainings in steps and node-hours, of sampling in GPU-hours, of held-out scorings in seconds.

A line of ``eval.sampled.jsonl`` is a batch of a scoring under way; ``logs/scoring.json`` has the pace of the last one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import Manifest, Pace, SampledPace, read_if_there, read_lines, read_record
from scripts.stage.paths import StagePaths
from scripts.stage.progress import step_seconds
from scripts.stage.rule_settings import data_to_be_made
from scripts.stage.stage import Stage
from scripts.stage.state import StageState

MEASURED, EXPECTED = "the steps that {} logged", "the step_seconds of {}"
LIMIT = "one whole allocation (≤) of {}, whose step_seconds are not set"
UNKNOWN = "one allocation (≥) of {}, whose steps follow from rows that are not there yet"
MARKS = {LIMIT: "≤", UNKNOWN: "≥"}
Batch = dict[str, Any]
"""`answers` by the rows' places (reward, reason of no verdict, text, tokens, cut), the policy's key `of`, `seconds`."""
SAMPLED = ".sampled.jsonl"


@dataclass(frozen=True)
class Estimate:
    """Hold the steps left, allocations, hours, nodes, GPUs of all, and the basis in words, with {} for the stages.

    Unknown steps (None) or seconds count as a whole allocation.
    """

    steps: int | None
    allocations: int
    hours: float
    nodes: int
    gpus: int
    basis: str
    node_hours: float
    gpu_hours: float

    @property
    def bound(self) -> str:
        """Mark hours counted as a whole allocation: at most (≤) with known steps, at least (≥) with unknown steps."""
        return "" if self.steps == 0 else MARKS.get(self.basis, "")


def estimate(site: Site, stage: Stage, steps: int | None) -> Estimate:
    """Estimate `steps` more steps of a stage (None: unknown), by logged or else by the recipe's seconds a step."""
    slurm, resources, training = site.slurm, site.resources_of(stage.name, stage.settings), stage.last_training
    gpus = slurm.gpus_per_node if slurm else 0
    seconds, basis = resources.step_seconds, EXPECTED if resources.step_seconds else LIMIT
    if steps is None:
        seconds, basis = None, UNKNOWN
    elif steps and (logged := step_seconds(training.recent_steps)):
        seconds, basis, samples = logged, MEASURED, stage.config.samples_per_step
        with suppress(UserError):  # steps of another number of samples, where their config can be read
            seconds = logged * samples / training.config.samples_per_step
    if steps == 0:
        allocations, hours = 0, 0.0
    elif seconds is None:
        allocations, hours = 1, resources.runtime / 60
    else:
        usable = max(resources.runtime * 60 - (slurm.margin if slurm else 0) - seconds, seconds)
        allocations, hours = math.ceil(steps * seconds / usable), steps * seconds / 3600
    nodes = resources.nodes + stage.settings.nodes_beside
    return Estimate(steps, allocations, hours, nodes, nodes * gpus, basis, hours * nodes, hours * nodes * gpus)


def bound_of(estimates: Iterable[Estimate]) -> str:
    """Return the mark of a sum: ≥ with any unknown steps, ≤ with any time limit."""
    bounds = {each.bound for each in estimates}
    return next((mark for mark in "≥≤" if mark in bounds), "")


def hours_text(hours: float, bound: str = "") -> str:
    """Return hours as text, of at most three digits, behind their bound (≤ or ≥)."""
    text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 or not hours else "<0.01"
    return f"{bound} {text}" if bound else text


@dataclass(frozen=True)
class Sampling:
    """The sampling of a blend to come: the hours of all GPUs together, and a line that describes it."""

    blend: str
    gpu_hours: float
    line: str


def samplings(
    recipe: Recipe, results: Path, site: Site, states_of: Callable[[], Mapping[str, StageState]]
) -> list[Sampling]:
    """Return the samplings to come, among them those of blends whose model is to train, by the states of all stages."""
    found: list[Sampling] = []
    if not any(blend.generated for blend in recipe.blends.values()):
        return found
    try:
        remade = data_to_be_made(recipe, results)
    except UserError:  # a damaged record, of which the stages' states tell
        return found
    states = states_of()
    for name in recipe.blends:
        before = {stage for maker in recipe.graph.rows(name).made_by for stage in maker.trained}
        is_to_come = name in remade or any(states[stage].left != 0 for stage in before)
        if (source := recipe.blends[name].generated) is None or not is_to_come:
            continue
        manifest = read_if_there(results / "data" / source.prompts / "manifest.json", Manifest)
        rows = manifest["train"].get("rows") if manifest and source.prompts not in remade else None
        prompts = None if rows is None else rows // source.share[1]
        paces = list(_paces_in(results / "data" / name / "generated/samples"))
        pace, slurm = fmean(paces) if paces else source.responses_per_second, site.slurm
        hours, bound = (source.runtime or slurm.light.runtime) / 60 if slurm else 0.0, "≤"
        if pace and prompts is not None:
            hours, bound = prompts * source.samples * len(source.models) / source.shards / pace / 3600, ""
        is_on_gpus = site.accelerator != "cpu" or any(stage.is_converted for stage in recipe.stages.values())
        gpu_hours = hours * source.shards * (slurm.gpus_per_node if slurm and is_on_gpus else 0)
        asked = "prompts that are not there yet" if prompts is None else f"{prompts:,} prompts"
        jobs = "1 job" if source.shards == 1 else f"{source.shards} jobs"
        jobs += f", {hours_text(hours, bound)} h each" if hours else ""
        jobs += f", {hours_text(gpu_hours, bound)} GPU-hours" if gpu_hours else ""
        line = f"blend {name}: {source.samples} responses of {', '.join(source.models)} to {asked}, in {jobs}"
        found.append(Sampling(name, gpu_hours, line))
    return found


def _paces_in(samples: Path) -> Iterator[float]:
    """Yield the responses a second of the shards that were sampled; a damaged file has no pace."""
    for path in samples.glob("*.json"):
        with suppress(UserError):
            shard = read_record(path, SampledPace)
            if shard.get("responses") and shard.get("seconds"):
                yield shard["responses"] / shard["seconds"]


def seconds_to_score(recipe: Recipe, results: Path, states: Mapping[str, StageState]) -> dict[str, float]:
    """Return the expected seconds of the scorings to come by stage, where any scoring of the run has a pace.

    A stage that is to train is scored again. Damaged records give no estimate; their readers tell of the damage.
    """
    with suppress(UserError):
        to_come, measured = {}, {}
        records = {blend: results / "data" / blend / "manifest.json" for blend in recipe.blends}
        manifests = {blend: read for blend, path in records.items() if (read := read_if_there(path, Manifest))}
        graph = recipe.graph
        for stage in graph.starts_of(recipe.stages if recipe.evaluation else ()):
            name = stage.name
            paths = StagePaths(results / stage.name)
            of_test = {rows.name for rows in graph.tested_rows if stage in graph.ends}
            of_scores = {rows.name for rows in graph.scored_rows if stage.is_scored}
            sampled = 1 if stage.scored_before else 2  # the start is sampled too where it has no scores
            parts = (paths.evaluation, "validation", of_scores, sampled), (paths.test, "test", of_test, 2)
            batches = [batch for path, *_ in parts for batch in read_lines(path.with_suffix(SAMPLED), Batch)]
            done = sum(len(batch["answers"]) for batch in batches)
            pace = {"responses": done, "seconds": sum(batch["seconds"] for batch in batches)}
            if pace := pace if done else read_if_there(paths.logs / "scoring.json", Pace):
                measured[name] = pace["seconds"] / max(1, pace["responses"])
            to_come[name] = -done + sum(
                policies * manifests[blend][split].get("rows", 0)
                for path, split, blends, policies in parts
                for blend in manifests.keys() & blends
                if states[name].left != 0 or not path.exists()
            )
        pace = median(measured.values()) if measured else 0.0
        return {name: measured.get(name, pace) * rows for name, rows in to_come.items() if measured and rows > 0}
    return {}
