"""The table of edits: the stages that train after each, by jobs, plan, status, budget and run directories."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from scripts.commands.plan import check_budget, planned_stages
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.site import Site
from scripts.stage.paths import StagePaths
from scripts.stage.status import status_of
from tests.workflow.edits import DOCUMENT, EDITS, Edit, document

BUDGET = {"name": "cluster", "threads": 2, "slurm": {"gpus_per_node": 1, "max_runtime": 60, "budget_gpu_hours": 1e-9}}


def attempts(workflow) -> Counter:
    """How often each identity has begun to train."""
    counts: Counter = Counter()
    for path in workflow.results.parent.glob("**/attempts.jsonl"):
        counts[path.resolve().parent] = path.read_text().count('"begin"')
    return counts


def expected_to_train(workflow, targets: list[str]) -> dict[str, set[str]]:
    """The stages that would train, by the dry run, the plan, the status and the budget, without any of Snakemake's."""
    table = workflow.snakemake("--dry-run", *targets)
    jobs = set(re.findall(r"^(\w+) +(?:trains|resumes)\b", table, re.M))
    jobs &= set(re.findall(r"^rule train: stage=(\w+);", table, re.M))
    config = load_config(Path("config/config.yaml"), {})
    recipe = load_recipe(Path(config.recipe), config.seed, config.model, config.start)
    project = Project(recipe, load_site(Path(config.site), recipe), Path(config.folder), False, Path(config.results))
    states = project.states()
    statuses = [status_of(state, StagePaths(project.results / name)) for name, state in states.items()]
    try:
        check_budget(Project(recipe, Site.model_validate(BUDGET), *(project.results, False, project.root)))
        refused = ""
    except UserError as error:
        refused = str(error).partition("(")[2].partition(")")[0]
    return {
        "jobs": jobs,
        "plan": {it.state.stage for it in planned_stages(project, recipe.stages) if it.estimate.steps != 0},
        "status": {status.stage for status in statuses if status.state not in ("fresh", "trained")},
        "budget": {name for name in recipe.stages if re.search(rf"\b{name} [≤≥<\d]", refused)},
    }


def _when(edit: Edit, number: int) -> list[pytest.MarkDecorator]:
    """Return when an edit is tried: a run in `make slow`, if it trains in `make long`; of plans a fourth in `make test`."""
    if edit.is_trained and not edit.trains:
        return [pytest.mark.slow]
    is_of_every_day = not edit.is_trained and number % 4 == 0
    return [] if is_of_every_day else [pytest.mark.long]


@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, id=edit.edit, marks=_when(edit, number)) for number, edit in enumerate(EDITS)],
)
def test_jobs_plan_status_and_budget_agree_with_what_really_trains(copied, edit, monkeypatch):
    edit.apply(copied)
    monkeypatch.chdir(copied.root)
    stages = load_recipe(copied.root / "config/recipes/short.yaml").stages
    targets = [f"results/short/{stage}/ckpt" for stage in stages]
    before, kept = attempts(copied), {path: path.read_bytes() for path in weights(copied)}
    found = expected_to_train(copied, targets)
    assert found == {asked: {*edit.trains} for asked in ("jobs", "plan", "status", "budget")}
    if not (edit.is_trained or os.environ.get("STAGECOACH_ALL_EDITS")):
        return
    output = copied.snakemake(*targets)
    begun = {path for path, count in attempts(copied).items() if count > before[path]}
    trained = {stage for stage in stages if (copied.results / stage / "run").resolve() in begun}
    assert trained == edit.trains and len(begun) == len(trained)
    there = {path.read_bytes() for path in weights(copied)}
    assert [path for path, content in kept.items() if content not in there] == [], "nothing trained may be lost"
    assert "Nothing to be done" in output or "Nothing to be done" in copied.snakemake("--dry-run", *targets)
    assert not any(expected_to_train(copied, targets).values())


def test_a_recipe_under_another_name_makes_nothing_again(copied):
    recipes = copied.root / "config/recipes"
    (recipes / "short.yaml").rename(recipes / "renamed.yaml")
    assert "Nothing to be done" in copied.snakemake("--dry-run", "--config", "recipe=config/recipes/renamed.yaml")


def weights(workflow) -> list[Path]:
    """The weights of all sealed checkpoints, wherever their stage trained."""
    return [*workflow.results.parent.glob("**/checkpoints/*/model.safetensors")]


def test_the_documents_table_is_the_tests_own():
    assert DOCUMENT.read_text() == document(), "run: python -m tests.workflow.edits"
