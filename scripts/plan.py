"""What would train if the workflow ran now: from which step, why, on how many nodes and for how long.

Reads records only, so it works while the cluster is down. What is set aside is listed with its size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.table import ROWS, side_by_side
from scripts.errors import UserError, run_program
from scripts.files import amount
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.stage.estimate import EXPECTED, LIMIT, MEASURED, UNKNOWN, Estimate, estimate
from scripts.stage.memo import steps_left
from scripts.stage.standing import Standing, tree_bytes
from scripts.status import Project, aligned, duration, project_of_arguments

WORDS = {"new": "trains", "stale": "trains again", "waiting": "trains", "fresh": "fresh"}
LARGEST = 3


@dataclass(frozen=True)
class Planned:
    """A stage's standing, what is left of it, and the time limit of one allocation in minutes."""

    standing: Standing
    estimate: Estimate
    runtime: int

    @property
    def what(self) -> str:
        """What would happen to the stage, in words."""
        one = self.standing
        if one.publishes_again:
            return "published again"
        if one.state == "training":
            return f"training, from step {one.start}"
        return f"resumes at step {one.start}" if one.start and one.left != 0 else WORDS.get(one.state, "trains")

    @property
    def steps(self) -> str:
        """How many steps would be trained, of how many; nothing when none, a question mark when nobody knows."""
        steps = self.estimate.steps
        return "" if steps == 0 else "?" if steps is None else f"{steps} of {self.standing.planned}"

    @property
    def why(self) -> str:
        """Why, in words."""
        one = self.standing
        reasons = [*one.changed, *(words for words in (one.note, one.skipped) if words)]
        return ", ".join(reasons) or ("never trained" if one.state == "new" else "")


def planned_stages(project: Project) -> list[Planned]:
    """The plan of every stage, parents first."""
    recipe, site, results = project.recipe, project.site, project.results
    plan = []
    for name, standing in project.standings().items():
        resources = site.resources_of(name, recipe.stages[name])
        plan.append(Planned(standing, estimate(site, resources, results / name, standing.left), resources.runtime))
    return plan


def plan_text(project: Project) -> str:
    """The plan as a table with its totals, what its hours rest on, and what is set aside."""
    plan = planned_stages(project)
    table = _cluster_table(plan) if project.site.slurm else _local_table(plan)
    to_train = {one.standing.stage: one.estimate for one in plan if one.estimate.steps != 0}
    lines = [*table, *_basis(to_train, project.site), *_warning(project, to_train), *_aside(plan)]
    return "\n".join([*lines, *_parameters(project.recipe)])


def _cluster_table(plan: list[Planned]) -> list[str]:
    head = ["stage", "what", "steps", "nodes", "GPUs", "limit", "allocations", "node-hours", "GPU-hours", "why"]
    rows = []
    for one in plan:
        it = one.estimate
        asks = [str(it.nodes), str(it.nodes * it.gpus_per_node), f"{one.runtime} min", str(it.allocations)]
        hours = [hours_text(it.node_hours, it.bound), hours_text(it.gpu_hours, it.bound)]
        rows.append(
            [one.standing.stage, one.what, one.steps, *([*asks, *hours] if it.steps != 0 else [""] * 6), one.why]
        )
    estimates = [one.estimate for one in plan]
    bound = _bound(estimates)
    sums = [str(sum(it.allocations for it in estimates))]
    sums += [hours_text(sum(getattr(it, name) for it in estimates), bound) for name in ("node_hours", "gpu_hours")]
    rows.append(["in all", _counts(plan), _steps(estimates), "", "", "", *sums, ""])
    return aligned([head, *rows], left={0, 1, len(head) - 1})


def _local_table(plan: list[Planned]) -> list[str]:
    head, rows = ["stage", "what", "steps", "time", "why"], []
    for one in plan:
        it = one.estimate
        rows.append([one.standing.stage, one.what, one.steps, _time([it]), one.why])
    estimates = [one.estimate for one in plan]
    rows.append(["in all", _counts(plan), _steps(estimates), _time(estimates), ""])
    return aligned([head, *rows], left={0, 1, len(head) - 1})


def _steps(estimates: list[Estimate]) -> str:
    """The steps of all, as far as they are known."""
    more = "≥ " if any(it.steps is None for it in estimates) else ""
    return f"{more}{sum(it.steps or 0 for it in estimates)}"


def _time(estimates: list[Estimate]) -> str:
    """How long they take one after the other on this machine, as far as anybody knows."""
    known = [it.hours * 3600 for it in estimates if it.steps and not it.bound]
    more = "≥ " if any(it.bound for it in estimates) else ""
    return f"{more}{duration(sum(known))}" if known else ""


def _counts(plan: list[Planned]) -> str:
    again = sum(one.standing.publishes_again for one in plan)
    fresh = sum(one.standing.state == "fresh" for one in plan)
    counts = {"to train": len(plan) - again - fresh, "to publish": again, "fresh": fresh}
    return ", ".join(f"{count} {words}" for words, count in counts.items() if count)


def _bound(estimates: Iterable[Estimate]) -> str:
    """What their sum is: a bound from below where the steps of one are unknown, from above where a limit was taken."""
    bounds = {it.bound for it in estimates}
    return "≥" if "≥" in bounds else "≤" if "≤" in bounds else ""


def hours_text(hours: float, bound: str = "") -> str:
    """Hours for people, to three digits at most; a bound (≤ or ≥) is marked."""
    text = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.01 or not hours else "<0.01"
    return f"{bound} {text}" if bound else text


def _basis(to_train: dict[str, Estimate], site: Site) -> list[str]:
    """What the figures rest on, in one line."""
    words = {
        MEASURED: "the steps that {} logged",
        EXPECTED: "the step_seconds of {}",
        LIMIT: "one whole allocation (≤) of {}, whose step_seconds are not set",
        UNKNOWN: "one allocation (≥) of {}, whose steps follow from rows that are not there yet",
    }
    stages = {basis: [name for name, it in to_train.items() if it.basis == basis] for basis in words}
    told = [words[it].format(", ".join(names)) for it, names in stages.items() if names and (site.slurm or it != LIMIT)]
    return [f"reckoned from {'; '.join(told)}"] if told else []


def _warning(project: Project, to_train: dict[str, Estimate]) -> list[str]:
    words = None if project.over_budget else beyond_budget(project.site, to_train)
    return [f"Snakemake will refuse all of it: {words}"] if words else []


def _parameters(recipe: Recipe) -> list[str]:
    """What NeMo-RL's stages are trained with, side by side; stages that are alike share a column."""
    if recipe.release is None:
        return []
    release = release_of(recipe.release)
    cells = {name: [row(stage, release) for row in ROWS.values()] for name, stage in recipe.stages.items()}
    rows = [[*row, ""] for row in side_by_side(cells) if row[0] != "image"]
    note = ["", f"note: {recipe.note}"] if recipe.note else []
    return ["", f"trained by NeMo-RL {recipe.release} with:", *aligned(rows, left={0}), *note]


def _aside(plan: Iterable[Planned]) -> list[str]:
    """What is set aside, with sizes, and how to remove it; nothing when nothing is."""
    entries = [entry for one in plan for entry in one.standing.aside]
    if not entries:
        return []
    return [
        "",
        "set aside (comes back when that identity is asked for again):",
        *(f"  {entry.path}  step {entry.step}  {amount(tree_bytes(entry.path))}" for entry in entries),
        "to remove one: python -m scripts.discard PATH",
    ]


def beyond_budget(site: Site, to_train: dict[str, Estimate]) -> str | None:
    """How far what is to train exceeds the site's budget, and by which stages; None: it does not, or there is none."""
    budget = site.slurm.budget_gpu_hours if site.slurm else None
    needed = sum(it.gpu_hours for it in to_train.values())
    if budget is None or needed <= budget:
        return None
    ordered = sorted(to_train, key=lambda name: -to_train[name].gpu_hours)
    shares = [f"{name} {hours_text(to_train[name].gpu_hours, to_train[name].bound)}" for name in ordered[:LARGEST]]
    more = f" and {len(ordered) - LARGEST} more" if len(ordered) > LARGEST else ""
    whole = hours_text(needed, _bound(to_train.values()))
    return (
        f"what is to train is expected to need {whole} GPU-hours ({', '.join(shares)}{more}), but "
        f"slurm.budget_gpu_hours of site {site.name} is {hours_text(budget)}; raise it, ask for fewer stages, or go on "
        "all the same: --config over_budget=true"
    )


def check_budget(
    recipe: Recipe, site: Site, results: Path, over_budget: bool, stages: Iterable[str] | None = None
) -> None:
    """UserError when what is to train is expected to need more GPU-hours than the site's budget.

    `stages` are those that this call of Snakemake is to train (default: all); what lies in a run directory already
    costs nothing. Their config.yaml must be what the recipe says now.
    """
    if over_budget:
        return
    names = recipe.stage_order() if stages is None else [name for name in recipe.stage_order() if name in stages]
    to_train = {
        name: estimate(
            site, site.resources_of(name, recipe.stages[name]), results / name, steps_left(recipe, results, name)
        )
        for name in names
    }
    if words := beyond_budget(site, {name: it for name, it in to_train.items() if it.steps != 0}):
        raise UserError(words)


def main() -> None:
    """Command line of the plan."""
    print(plan_text(project_of_arguments("scripts.plan", __doc__)))


if __name__ == "__main__":
    run_program(main)
