"""Find what may rest on wrong verdicts of NeMo-Gym's servers, as earlier versions took them.

Before `VERDICTS` was 2, the first responses of a process that several threads sent at once could fail in the client.
Such a response earned 0 as one that could not be judged, which records count.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq

from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.files import read_json
from scripts.finding import Finding
from scripts.recipe.gym_release import VERDICTS
from scripts.recipe.recipe import Recipe
from scripts.stage.stage import Stage

LOOP = "event loop"
"""Part of the reason that a response of such a process could not be judged."""
SHOWN = 5


def check_verdicts(project: Project) -> Iterator[Finding]:
    """Find stages, evaluations and generated blends that may rest on such verdicts, each with the remedy."""
    for says in _resting(project):
        yield Finding(says, stops=False)


def _resting(project: Project) -> Iterator[str]:
    """Yield a line for each of them."""
    recipe = project.recipe
    for node in recipe.graph.order:
        stage = Stage(recipe, project.results, node.name, root=project.root)
        with suppress(UserError):  # of damaged records, which other checks name
            yield from _of_training(recipe, stage)
            yield from _of_scores(recipe, stage)
    for name in recipe.generated:
        yield from _of_blend(name, project.results / "data" / name / "generated/judged.parquet")


def _of_training(recipe: Recipe, stage: Stage) -> Iterator[str]:
    """Yield a line where steps of attempts by an earlier version have responses that could not be judged."""
    training = stage.last_training
    if not getattr(stage.settings, "gym", None) or not training.path.is_dir():
        return
    # The steps that earlier versions trained, from the attempts' starts: a later attempt trains some again.
    early: dict[int, bool] = {}
    steps = {entry["step"]: entry for entry in training.steps}
    for attempt in training.attempts:
        is_early = (attempt.get("gym_verdicts") or 1) < VERDICTS
        early |= {step: is_early for step in steps if step > attempt["from"]}
    found = {step: entry.get("unjudged_share") for step, entry in steps.items() if early.get(step)}
    found = {step: share for step, share in found.items() if share}
    if not found:
        return
    shown = ", ".join(f"{step} ({share:.0%})" for step, share in [*found.items()][:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    later = [node.name for node in recipe.graph.descendants(stage.node) if node.name != stage.name]
    also = f"; so may {', '.join(later)}, trained from it" if later else ""
    yield (
        f"{stage.name}: may have learnt from wrong verdicts of NeMo-Gym, which an earlier version took: responses of "
        f"steps {shown}{more} earned 0 unjudged{also}. To train it again, remove {stage.paths.directory}, which holds "
        f"links alone, and stagecoach discard {training.path}"
    )


def _of_scores(recipe: Recipe, stage: Stage) -> Iterator[str]:
    """Yield a line for held-out scores by an earlier version with responses that could not be judged."""
    if recipe.evaluation is None or not recipe.evaluation.gym:
        return
    for path in (stage.paths.evaluation, stage.paths.test):
        record = read_json(path) if path.is_file() else {}
        unjudged = record.get("unjudged")
        if unjudged and record.get("gym_verdicts", 1) < VERDICTS:
            yield (
                f"{stage.name}: {path}: {unjudged['responses']} responses count 0 unjudged, by verdicts of NeMo-Gym "
                "that an earlier version took; delete the file to score again"
            )


def _of_blend(name: str, judged: Path) -> Iterator[str]:
    """Yield a line for a blend whose responses could not be judged for the client's fault."""
    if not judged.is_file():
        return
    whys = pq.read_table(judged, columns=["why"])["why"].to_pylist()
    count = sum(LOOP in why for why in whys if why)
    if count:
        yield (
            f"blend {name}: {judged}: {count} of {len(whys)} responses were not judged, for an earlier version failed "
            "to ask NeMo-Gym, and make no row; delete the file to judge again"
        )
