"""Estimate the rest: of trainings in steps and node-hours, of sampling in GPU-hours."""

import math
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import Manifest, SampledPace, read_if_there, read_record
from scripts.stage.data_to_come import is_sampled_anew
from scripts.stage.progress import step_seconds
from scripts.stage.stage import Stage

MEASURED, EXPECTED = "the steps that {} logged", "the step_seconds of {}"
LIMIT = "one whole allocation (≤) of {}, whose step_seconds are not set"
UNKNOWN = "one allocation (≥) of {}, whose steps follow from rows that are not there yet"
MARKS = {LIMIT: "≤", UNKNOWN: "≥"}


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


def samplings(recipe: Recipe, results: Path, site: Site, remade: Collection[str], unknown: Set[str]) -> list[Sampling]:
    """Return the samplings to come, among them those of blends whose model is to train, or is chosen again.

    `remade` are the blends whose data are made anew, `unknown` the makers whose exports are to come.
    """
    found: list[Sampling] = []
    for name, blend in recipe.generated.items():
        source = blend.source
        is_of_others = not unknown.isdisjoint(maker.name for maker in recipe.graph.rows(name).made_by)
        is_remade = name in remade and is_sampled_anew(recipe, results, name)
        if not is_of_others and not is_remade:
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
