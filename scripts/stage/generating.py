"""Estimate the sampling of generated blends in responses, jobs and GPU-hours, for plans."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import Manifest, read_if_there
from scripts.stage.estimate import hours_text
from scripts.stage.rule_settings import data_to_be_made
from scripts.stage.state import StageState


@dataclass(frozen=True)
class Sampling:
    """The sampling of a blend: prompts (None: not there yet), responses a prompt, shards, hours of one, GPUs of one."""

    blend: str
    by: list[str]
    prompts: int | None
    samples: int
    shards: int
    hours: float
    bound: str
    gpus: int

    @property
    def gpu_hours(self) -> float:
        """Return the hours of all GPUs together."""
        return self.hours * self.shards * self.gpus

    def __str__(self) -> str:
        """Describe the sampling in a line."""
        prompts = "prompts that are not there yet" if self.prompts is None else f"{self.prompts:,} prompts"
        jobs = "1 job" if self.shards == 1 else f"{self.shards} jobs"
        hours = f", {hours_text(self.hours, self.bound)} h each" if self.hours else ""
        cost = f", {hours_text(self.gpu_hours, self.bound)} GPU-hours" if self.gpus and self.hours else ""
        return (
            f"blend {self.blend}: {self.samples} responses of {', '.join(self.by)} to {prompts}, in {jobs}{hours}{cost}"
        )


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
        before = {stage for maker in recipe.makers_of(name) for stage in recipe.trained_for(maker)}
        is_to_come = name in remade or any(states[stage].left != 0 for stage in before)
        if (source := recipe.blends[name].generated) is None or not is_to_come:
            continue
        manifest = read_if_there(results / "data" / source.prompts / "manifest.json", Manifest)
        rows = manifest["train"].get("rows") if manifest and source.prompts not in remade else None
        prompts = None if rows is None else rows // source.share[1]
        counts = map(read_json, (results / "data" / name / "generated/samples").glob("*.json"))
        paces = [each["responses"] / each["seconds"] for each in counts if each.get("seconds")]
        pace, slurm = fmean(paces) if paces else source.responses_per_second, site.slurm
        hours, bound = (source.runtime or slurm.light.runtime) / 60 if slurm else 0.0, "≤"
        if pace and prompts is not None:
            hours, bound = prompts * source.samples * len(source.models) / source.shards / pace / 3600, ""
        is_on_gpus = site.accelerator != "cpu" or any(stage.is_converted for stage in recipe.stages.values())
        gpus = slurm.gpus_per_node if slurm and is_on_gpus else 0
        found.append(Sampling(name, source.models, prompts, source.samples, source.shards, hours, bound, gpus))
    return found
