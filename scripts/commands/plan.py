"""Show the stages to train, and the costs."""

import argparse
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from scripts.backends.by_name import backend_of
from scripts.commands.checks import findings
from scripts.commands.project import Project, project_of
from scripts.commands.status import aligned
from scripts.errors import UserError
from scripts.files import duration
from scripts.finding import Finding, Moment
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import each_read_once
from scripts.stage.estimate import LIMIT, Estimate, bound_of, estimate, hours_text
from scripts.stage.held_out import rows_held_out
from scripts.stage.outlook import Outlook
from scripts.stage.scorings import Scoring, words_of_rescored
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, reasons_away

WORDS = {"stale": "trains again", "trained": "published again", "fresh": "fresh", "damaged": "damaged"}
MAY_TRAIN = "may train"
"""What a stage does whose training may lie in the store already, once what comes first is made."""
LARGEST = 3
REFUSED = "Snakemake will refuse all of it: "


class Planned(NamedTuple):
    """Hold a stage's state, the estimate of the rest, the time limit in minutes, and the seconds of held-out scores."""

    state: StageState
    estimate: Estimate
    runtime: int
    scoring: Scoring | None = None

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
        elif not state.is_certain:
            what = MAY_TRAIN
        steps = "" if left == 0 else "?" if left is None else f"{left} of {state.planned}"
        why = ", ".join([*state.changed, *filter(None, (state.note, state.skipped))])
        return what, steps, why or ("never trained" if state.state == "new" else "")


def planned_stages(project: Project, stages: Collection[str], outlook: Outlook | None = None) -> list[Planned]:
    """Return the plan of stages, parents first, by the project's outlook (None: as of now)."""
    outlook = outlook or project.outlook()
    states, site = outlook.states, project.site
    return [
        Planned(
            states[stage.name],
            estimate(site, stage, states[stage.name].left),
            site.resources_of(stage.name, stage.settings).runtime,
            outlook.scorings.get(stage.name),
        )
        for stage in project.stages()
        if stage.name in stages
    ]


@each_read_once()
def plan_text(project: Project) -> str:
    """Return the plan: a table with totals, the basis of the hours, memory, likely mistakes, and refusals."""
    outlook = project.outlook()
    plan = planned_stages(project, project.recipe.stages, outlook)
    note = ["", f"note: {project.recipe.note}"] if project.recipe.note else []
    found = [*findings(project, Moment.READ), *findings(project, Moment.PLAN, stages=_to_train(plan))]
    told = [
        *_totals(project, plan, outlook),
        *_rows(project, _to_train(plan)),
        *_memory(project, _to_train(plan)),
        *_warnings(found),
        *reasons_away(stage.state for stage in plan),
        *note,
    ]
    return "\n".join([*told, *_refused(found)])


def _rows(project: Project, names: Iterable[str]) -> list[str]:
    """Return a line on the rows to train on and the held-out rows of the stages to train, as far as known."""
    counts = rows_held_out(project.recipe, project.results)
    blends = dict.fromkeys(project.recipe.stages[name].blend for name in names)
    said = [f"{blend} {counts[blend][0]:,} and {counts[blend][1]:,}" for blend in blends if blend in counts]
    return [f"rows to train on and held out: {'; '.join(said)}"] if said else []


def _warnings(found: Iterable[Finding]) -> list[str]:
    return [str(finding) for finding in found if not finding.stops]


def _refused(found: Iterable[Finding]) -> list[str]:
    return [f"{REFUSED}{finding.line}" for finding in found if finding.stops]


@each_read_once()
def dry_run_text(project: Project, names: set[str], scored: set[str] | None = None) -> str:
    """Return the plan of the stages and checkpoints that a call needs, and a line where Slurm is missing.

    `scored` are those whose held-out scores the call asks for (None: all).

    Snakemake plans no job behind a choice that may fall as before; the plan has the stages there too.
    """
    outlook = project.outlook()
    if scored is not None:
        asked = {name: scoring for name, scoring in outlook.scorings.items() if name in scored}
        outlook = replace(outlook, scorings=asked)
    plan = planned_stages(project, {project.recipe.graph[name].stage for name in names}, outlook)
    is_idle = all(stage.state.state == "fresh" for stage in plan)
    lines = ["no stage trains", *_more_to_come(outlook)] if is_idle else _totals(project, plan, outlook)
    found = findings(project, Moment.PLAN, stages=_to_train(plan))
    lines += _warnings(found)
    lines += reasons_away(stage.state for stage in plan)
    lines += _refused(found)
    if project.site.slurm and not shutil.which("sbatch"):
        lines.append(f"this machine has no Slurm (no sbatch in PATH), which site {project.site.name} trains through")
    return "\n".join(lines)


def _to_train(plan: list[Planned]) -> dict[str, Estimate]:
    return {stage.state.stage: stage.estimate for stage in plan if stage.estimate.steps != 0}


def _totals(project: Project, plan: list[Planned], outlook: Outlook) -> list[str]:
    """Return the table, the basis of the hours, and a line where the budget is exceeded."""
    to_train, costs = _to_train(plan), costs_on(project.site)
    bases: dict[str, list[str]] = {}
    for name, left in to_train.items():
        if left.basis not in costs.ignored:
            bases.setdefault(left.basis, []).append(name)
    sources = "; ".join(basis.format(", ".join(names)) for basis, names in bases.items())
    lines = [*_table(costs, plan), *([f"reckoned from {sources}"] if sources else [])]
    lines += _predictions(plan)
    lines += costs.longest_path(project.recipe, to_train)
    lines += _more_to_come(outlook)
    words = beyond_budget(project, to_train, outlook)
    return [*lines, *_refused([Finding(words)] if words else [])]


def _more_to_come(outlook: Outlook) -> list[str]:
    """Return the lines on samplings and held-out scorings to come."""
    lines = [each.line for each in outlook.samplings]
    known = {name: each.seconds for name, each in outlook.scorings.items() if each.seconds is not None}
    if known:
        lines.append(f"held-out scores of {', '.join(known)} take {duration(sum(known.values()))}, by the last pace")
    return [*lines, *words_of_rescored(outlook.scorings)]


def _predictions(plan: list[Planned]) -> list[str]:
    """Return a line on the stages whose row is a prediction, and one on those that may not train after all."""
    waiting = [stage.state.stage for stage in plan if stage.state.state == "waiting" or stage.state.is_foreseen]
    doubtful = [stage.state.stage for stage in plan if not stage.state.is_certain]
    lines = [f"predicted, until what comes first is made: {_first(waiting)}"] if waiting else []
    if doubtful:
        lines.append(f"counted as if they train, though the store may have them trained: {_first(doubtful)}")
    return lines


class CostsHere:
    """The costs of stages that this machine trains: the time."""

    head: Sequence[str] = ("time",)
    ignored: Collection[str] = frozenset({LIMIT})
    """Bases of an estimate that are not told: this machine has no limit of time."""

    def of(self, stage: Planned) -> list[str]:
        """Return a stage's costs, a text for each column."""
        return [_time([stage])]

    def of_all(self, plan: list[Planned]) -> list[str]:
        """Return the costs of all stages."""
        return [_time(plan)]

    def longest_path(self, recipe: Recipe, to_train: dict[str, Estimate]) -> list[str]:
        """Return no line, as stages train one after another here."""
        return []


class CostsOnCluster(CostsHere):
    """The costs of stages that train through Slurm: nodes and hours."""

    head = ("nodes", "GPUs", "limit", "allocations", "node-hours", "GPU-hours")
    ignored: Collection[str] = frozenset()

    def of(self, stage: Planned) -> list[str]:
        """Return a stage's costs, a text for each column."""
        left = stage.estimate
        if left.steps == 0:
            return [""] * len(self.head)
        hours = [hours_text(left.node_hours, left.bound), hours_text(left.gpu_hours, left.bound)]
        return [str(left.nodes), str(left.gpus), f"{stage.runtime} min", str(left.allocations), *hours]

    def of_all(self, plan: list[Planned]) -> list[str]:
        """Return the costs of all stages."""
        estimates = [stage.estimate for stage in plan]
        bound = bound_of(estimates)
        node_hours = hours_text(sum(each.node_hours for each in estimates), bound)
        gpu_hours = hours_text(sum(each.gpu_hours for each in estimates), bound)
        return ["", "", "", str(sum(each.allocations for each in estimates)), node_hours, gpu_hours]

    def longest_path(self, recipe: Recipe, to_train: dict[str, Estimate]) -> list[str]:
        """Return a line on the stages that train one after another for longest, where others train beside them."""
        paths: dict[str, list[str]] = {}

        def hours(path: list[str]) -> float:
            return sum(to_train[name].hours for name in path)

        for stage in recipe.graph.order:
            before = max((paths[each] for each in sorted(stage.trained_before)), key=hours, default=[])
            paths[stage.name] = [*before, *([stage.name] if stage.name in to_train else [])]
        longest = max(paths.values(), key=hours)
        if len(longest) == len(to_train):
            return []
        on_path = [to_train[name] for name in longest]
        bound, gpu_hours = bound_of(on_path), sum(each.gpu_hours for each in on_path)
        days = f"{bound} {hours(longest) / 24:.1f}".strip()
        cost = f"{hours_text(gpu_hours, bound)} GPU-hours in {days} days, queues aside"
        return [f"longest path: {' → '.join(longest)}, {cost}"]


def costs_on(site: Site) -> CostsHere:
    """Return what the plan tells of costs on a site."""
    return CostsOnCluster() if site.slurm else CostsHere()


def _table(costs: CostsHere, plan: list[Planned]) -> list[str]:
    """Return a line a stage, and their sums."""
    head, rows = ["stage", "what", "steps", *costs.head, "why"], []
    for stage in plan:
        what, steps, why = stage.words()
        rows.append([stage.state.stage, what, steps, *costs.of(stage), why])
    words = {"trained": "to publish", "fresh": "fresh", "damaged": "damaged"}
    counts = Counter(_counted_as(stage.state, words) for stage in plan)
    order = ("to train", MAY_TRAIN, "unknown", *words.values())
    counted = ", ".join(f"{counts[word]} {word}" for word in order if counts[word])
    steps_left = [stage.estimate.steps for stage in plan]
    more = "≥ " if None in steps_left else ""
    rows.append(["in all", counted, f"{more}{sum(filter(None, steps_left))}", *costs.of_all(plan), ""])
    return aligned([head, *rows], left={0, 1, len(head) - 1})


def _counted_as(state: StageState, words: dict[str, str]) -> str:
    """Return the word under which the last row counts a stage; `words` are those of states that do not train."""
    if state.is_unknown:
        return "unknown"
    return words.get(state.state, "to train" if state.is_certain else MAY_TRAIN)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - LARGEST} more" if len(names) > LARGEST else ""
    return ", ".join(names[:LARGEST]) + more


def _time(plan: list[Planned]) -> str:
    """Return the known time of all stages in sequence, held-out scores included."""
    estimates = [stage.estimate for stage in plan]
    known = [each.hours * 3600 for each in estimates if each.steps and not each.bound]
    known += [stage.scoring.seconds for stage in plan if stage.scoring and stage.scoring.seconds]
    more = "≥ " if any(each.bound for each in estimates) else ""
    return f"{more}{duration(sum(known))}" if known else ""


def _memory(project: Project, names: Iterable[str]) -> list[str]:
    """Return the stages' sentences on memory; nothing for a fresh model, since recipes make small models."""
    lines = []
    for name in names if isinstance(project.recipe.model, PretrainedModel) else ():
        stage = Stage(project.recipe, project.results, name)
        says, fits = backend_of(stage.settings.made_by).memory(stage, project.site)
        is_refused = fits is False and project.site.refuse_over_memory
        if says:
            lines.append(says if fits else f"{'the preflight will refuse' if is_refused else 'warning:'} {says}")
    return lines and ["", *lines]


def beyond_budget(project: Project, to_train: dict[str, Estimate], outlook: Outlook) -> str | None:
    """Return in words how far training exceeds the site's budget, with the largest stages; None where it may train.

    Of the samplings to come those for rows of the stages count, of the held-out scorings those with a known pace.
    """
    site, recipe = project.site, project.recipe
    blends = {behind.name for name in to_train for rows in recipe.graph[name].rows for behind in rows.lineage}
    sampled = sum(each.gpu_hours for each in outlook.samplings if each.blend in blends)
    scored = _hours_to_score(site, outlook)
    needed = sampled + scored + sum(left.gpu_hours for left in to_train.values())
    budget = site.slurm.budget_gpu_hours if site.slurm else None
    if project.over_budget or budget is None or needed <= budget:
        return None
    ordered = sorted(to_train, key=lambda name: -to_train[name].gpu_hours)
    shares = _first([f"{name} {hours_text(to_train[name].gpu_hours, to_train[name].bound)}" for name in ordered])
    besides = {"sampling": sampled, "scoring": scored}
    more = "".join(f", {what} {hours_text(hours)}" for what, hours in besides.items() if hours)
    whole = hours_text(needed, bound_of(to_train.values()))
    return (
        f"what is to train is expected to need {whole} GPU-hours ({shares}{more}), but "
        f"slurm.budget_gpu_hours of site {site.name} is {hours_text(budget)}; raise it, ask for fewer stages, or go on "
        "all the same: --config over_budget=true"
    )


def _hours_to_score(site: Site, outlook: Outlook) -> float:
    """Return the GPU-hours of the held-out scorings to come, as far as their pace is known; each has a whole node."""
    gpus = site.slurm.gpus_per_node if site.slurm and site.accelerator != "cpu" else 0
    return sum(each.seconds or 0.0 for each in outlook.scorings.values()) / 3600 * gpus


def check_budget(project: Project, stages: Collection[str] | None = None) -> None:
    """Raise UserError where training is expected to need more GPU-hours than the site's budget.

    `stages` names the stages and checkpoints of a call's training jobs (default: all).
    """
    graph = project.recipe.graph
    asked = {start.stage for start in graph.starts_of(graph.stages if stages is None else stages)}
    outlook = project.outlook()
    if words := beyond_budget(project, _to_train(planned_stages(project, asked, outlook)), outlook):
        raise UserError(words)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 where Snakemake would refuse it."""
    text = plan_text(project_of(arguments))
    print(text)
    return int(f"\n{REFUSED}" in text)
