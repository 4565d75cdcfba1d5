"""Show the stages to train, and the costs."""

import argparse
import shutil
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from scripts.backends.by_name import backend_of
from scripts.commands.doctor import doubts, lacking_rows, refusals
from scripts.commands.project import Project, project_of, store_refusals
from scripts.commands.status import aligned
from scripts.errors import UserError
from scripts.files import duration
from scripts.recipe.model import PretrainedModel
from scripts.recipe.site import Site
from scripts.records import each_read_once
from scripts.stage.estimate import (
    LIMIT,
    Estimate,
    Sampling,
    bound_of,
    estimate,
    hours_text,
    samplings,
    seconds_to_score,
)
from scripts.stage.held_out import rows_held_out
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, reasons_away

WORDS = {"stale": "trains again", "trained": "published again", "fresh": "fresh", "damaged": "damaged"}
LARGEST = 3
REFUSED = "Snakemake will refuse all of it: "


class Planned(NamedTuple):
    """Hold a stage's state, the estimate of the rest, the time limit in minutes, and the seconds of held-out scores."""

    state: StageState
    estimate: Estimate
    runtime: int
    scoring: float = 0.0

    def words(self) -> tuple[str, str, str]:
        """Return what would happen to the stage, the steps to train of all (?: unknown; none: nothing), and why."""
        state, left = self.state, self.estimate.steps
        what = WORDS.get(state.state, "trains")
        if state.is_unknown:
            what = "unknown"
        elif state.amendable:
            what = "trains from the start"
        elif state.state == "training":
            what = f"training, from step {state.start}"
        elif state.state == "unfinished" and state.start:
            what = f"resumes at step {state.start}"
        steps = "" if left == 0 else "?" if left is None else f"{left} of {state.planned}"
        why = ", ".join([*state.changed, *filter(None, (state.note, state.skipped))])
        return what, steps, why or ("never trained" if state.state == "new" else "")


def planned_stages(project: Project, stages: Collection[str]) -> list[Planned]:
    """Return the plan of stages, parents first."""
    states, site = project.states(), project.site
    scoring = seconds_to_score(project.recipe, project.results, states)
    return [
        Planned(
            states[stage.name],
            estimate(site, stage, states[stage.name].left),
            site.resources_of(stage.name, stage.settings).runtime,
            scoring.get(stage.name, 0.0),
        )
        for stage in project.stages()
        if stage.name in stages
    ]


@each_read_once()
def plan_text(project: Project) -> str:
    """Return the plan: a table with totals, the basis of the hours, memory, likely mistakes, and refusals."""
    plan = planned_stages(project, project.recipe.stages)
    note = ["", f"note: {project.recipe.note}"] if project.recipe.note else []
    likely = doubts(project.recipe, project.results, _to_train(plan))
    told = [
        *_totals(project, plan),
        *_rows(project, _to_train(plan)),
        *_memory(project, _to_train(plan)),
        *likely,
        *reasons_away(stage.state for stage in plan),
        *note,
    ]
    refused = [*refusals(project.recipe, project.results, project.site), *store_refusals(project.store)]
    return "\n".join([*told, *_refused(refused)])


def _rows(project: Project, names: Iterable[str]) -> list[str]:
    """Return a line on the rows to train on and the held-out rows of the stages to train, as far as known."""
    counts = rows_held_out(project.recipe, project.results)
    blends = dict.fromkeys(project.recipe.stages[name].blend for name in names)
    said = [f"{blend} {counts[blend][0]:,} and {counts[blend][1]:,}" for blend in blends if blend in counts]
    return [f"rows to train on and held out: {'; '.join(said)}"] if said else []


def _refused(problems: list[str]) -> list[str]:
    return [f"{REFUSED}{problem}" for problem in problems]


@each_read_once()
def dry_run_text(project: Project, names: set[str]) -> str:
    """Return the plan of the stages and checkpoints that a call needs, and a line where Slurm is missing.

    Snakemake plans no job behind a choice that may fall as before; the plan has the stages there too.
    """
    plan = planned_stages(project, {project.recipe.graph[name].stage for name in names})
    is_idle = all(stage.state.state == "fresh" for stage in plan)
    lines = ["no stage trains"] if is_idle else _totals(project, plan)
    lines += doubts(project.recipe, project.results, _to_train(plan))
    lines += reasons_away(stage.state for stage in plan)
    lines += _refused([*lacking_rows(project.recipe, project.results), *store_refusals(project.store)])
    if project.site.slurm and not shutil.which("sbatch"):
        lines.append(f"this machine has no Slurm (no sbatch in PATH), which site {project.site.name} trains through")
    return "\n".join(lines)


def _to_train(plan: list[Planned]) -> dict[str, Estimate]:
    return {stage.state.stage: stage.estimate for stage in plan if stage.estimate.steps != 0}


def _totals(project: Project, plan: list[Planned]) -> list[str]:
    """Return the table, the basis of the hours, and a line where the budget is exceeded."""
    to_train = _to_train(plan)
    bases: dict[str, list[str]] = {}
    for name, left in to_train.items():
        if project.site.slurm or left.basis != LIMIT:
            bases.setdefault(left.basis, []).append(name)
    sources = "; ".join(basis.format(", ".join(names)) for basis, names in bases.items())
    lines = [*_table(project.site, plan), *([f"reckoned from {sources}"] if sources else [])]
    if waiting := [stage.state.stage for stage in plan if stage.state.state == "waiting"]:
        lines.append(f"predicted, until what comes first is made: {_first(waiting)}")
    lines += _longest_path(project, to_train) if project.site.slurm else []
    to_come = samplings(project.recipe, project.results, project.site, project.states)
    lines += [each.line for each in to_come]
    if scored := {stage.state.stage: stage.scoring for stage in plan if stage.scoring}:
        lines.append(f"held-out scores of {', '.join(scored)} take {duration(sum(scored.values()))}, by the last pace")
    words = beyond_budget(project, to_train, to_come)
    return [*lines, *_refused([words] if words else [])]


def _longest_path(project: Project, to_train: dict[str, Estimate]) -> list[str]:
    """Return a line on the stages that train one after another for longest, where others train beside them."""
    paths: dict[str, list[str]] = {}

    def hours(path: list[str]) -> float:
        return sum(to_train[name].hours for name in path)

    for stage in project.recipe.graph.order:
        before = max((paths[each] for each in sorted(stage.trained_before)), key=hours, default=[])
        paths[stage.name] = [*before, *([stage.name] if stage.name in to_train else [])]
    longest = max(paths.values(), key=hours)
    if len(longest) == len(to_train):
        return []
    bound, gpu_hours = bound_of(to_train[each] for each in longest), sum(to_train[each].gpu_hours for each in longest)
    days = f"{bound} {hours(longest) / 24:.1f}".strip()
    cost = f"{hours_text(gpu_hours, bound)} GPU-hours in {days} days, queues aside"
    return [f"longest path: {' → '.join(longest)}, {cost}"]


def _table(site: Site, plan: list[Planned]) -> list[str]:
    """Return a line a stage and their sums: on a cluster nodes and hours, on this machine the time."""
    asked = ["nodes", "GPUs", "limit", "allocations", "node-hours", "GPU-hours"] if site.slurm else ["time"]
    head, rows = ["stage", "what", "steps", *asked, "why"], []
    for stage in plan:
        left, (what, steps, why) = stage.estimate, stage.words()
        cells = [""] * len(asked) if site.slurm else [_time([stage])]
        if left.steps != 0 and site.slurm:
            hours = [hours_text(left.node_hours, left.bound), hours_text(left.gpu_hours, left.bound)]
            cells = [str(left.nodes), str(left.gpus), f"{stage.runtime} min", str(left.allocations), *hours]
        rows.append([stage.state.stage, what, steps, *cells, why])
    estimates = [stage.estimate for stage in plan]
    sums = [_time(plan)]
    if site.slurm:
        whole = (sum(getattr(each, name) for each in estimates) for name in ("node_hours", "gpu_hours"))
        hours = [hours_text(each, bound_of(estimates)) for each in whole]
        sums = ["", "", "", str(sum(each.allocations for each in estimates)), *hours]
    words = {"trained": "to publish", "fresh": "fresh", "damaged": "damaged"}
    counts = Counter(
        "unknown" if stage.state.is_unknown else words.get(stage.state.state, "to train") for stage in plan
    )
    counted = ", ".join(f"{counts[word]} {word}" for word in ("to train", "unknown", *words.values()) if counts[word])
    more = "≥ " if any(each.steps is None for each in estimates) else ""
    rows.append(["in all", counted, f"{more}{sum(each.steps or 0 for each in estimates)}", *sums, ""])
    return aligned([head, *rows], left={0, 1, len(head) - 1})


def _first(names: list[str]) -> str:
    more = f" and {len(names) - LARGEST} more" if len(names) > LARGEST else ""
    return ", ".join(names[:LARGEST]) + more


def _time(plan: list[Planned]) -> str:
    """Return the known time of all stages in sequence, held-out scores included."""
    estimates = [stage.estimate for stage in plan]
    known = [each.hours * 3600 for each in estimates if each.steps and not each.bound]
    known += [stage.scoring for stage in plan if stage.scoring]
    more = "≥ " if any(each.bound for each in estimates) else ""
    return f"{more}{duration(sum(known))}" if known else ""


def _memory(project: Project, names: Iterable[str]) -> list[str]:
    """Return the stages' sentences on memory; nothing for a fresh model, since recipes make small models."""
    lines = []
    for name in names if isinstance(project.recipe.model, PretrainedModel) else ():
        stage = Stage(project.recipe, project.results, name)
        says, fits = backend_of(stage.settings.backend).memory(stage, project.site)
        is_refused = fits is False and project.site.refuse_over_memory
        if says:
            lines.append(says if fits else f"{'the preflight will refuse' if is_refused else 'warning:'} {says}")
    return lines and ["", *lines]


def beyond_budget(project: Project, to_train: dict[str, Estimate], to_come: list[Sampling]) -> str | None:
    """Return in words how far training exceeds the site's budget, with the largest stages; None where it may train.

    Of the samplings `to_come` those for rows of the stages count.
    """
    site, recipe = project.site, project.recipe
    blends = {behind.name for name in to_train for rows in recipe.graph[name].rows for behind in rows.lineage}
    sampled = sum(each.gpu_hours for each in to_come if each.blend in blends)
    needed = sampled + sum(left.gpu_hours for left in to_train.values())
    budget = site.slurm.budget_gpu_hours if site.slurm else None
    if project.over_budget or budget is None or needed <= budget:
        return None
    ordered = sorted(to_train, key=lambda name: -to_train[name].gpu_hours)
    shares = _first([f"{name} {hours_text(to_train[name].gpu_hours, to_train[name].bound)}" for name in ordered])
    more = f", sampling {hours_text(sampled)}" if sampled else ""
    whole = hours_text(needed, bound_of(to_train.values()))
    return (
        f"what is to train is expected to need {whole} GPU-hours ({shares}{more}), but "
        f"slurm.budget_gpu_hours of site {site.name} is {hours_text(budget)}; raise it, ask for fewer stages, or go on "
        "all the same: --config over_budget=true"
    )


def check_budget(project: Project, stages: Collection[str] | None = None) -> None:
    """Raise UserError where training is expected to need more GPU-hours than the site's budget.

    `stages` names the stages and checkpoints of a call's training jobs (default: all).
    """
    graph = project.recipe.graph
    asked = {start.stage for start in graph.starts_of(graph.stages if stages is None else stages)}
    to_come = samplings(project.recipe, project.results, project.site, project.states)
    if words := beyond_budget(project, _to_train(planned_stages(project, asked)), to_come):
        raise UserError(words)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 where Snakemake would refuse it."""
    text = plan_text(project_of(arguments))
    print(text)
    return int(f"\n{REFUSED}" in text)
