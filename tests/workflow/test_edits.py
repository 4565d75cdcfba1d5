"""The table of edits: the stages that train after each, by jobs, plan, status, budget and run directories."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from scripts.commands.plan import LARGEST, check_budget, planned_stages
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.site import Site
from scripts.stage.paths import StagePaths
from scripts.stage.status import status_of
from tests.conftest import Workflow
from tests.workflow.edits import DOCUMENT, EDITS, Edit, document
from tests.workflow.wide import prepare

BUDGET = {"name": "cluster", "threads": 2, "slurm": {"gpus_per_node": 1, "max_runtime": 60, "budget_gpu_hours": 1e-9}}


def attempts(workflow) -> Counter:
    """How often each identity has begun to train."""
    counts: Counter = Counter()
    for path in workflow.results.parent.glob("**/attempts.jsonl"):
        counts[path.resolve().parent] = path.read_text().count('"begin"')
    return counts


ROW = r"^([\w.-]+) +(trains|resumes|may train)\b"


def expected(workflow) -> dict[str, set[str]]:
    """What is said to come after an edit, by the list of jobs, the table below it, plan, status and budget.

    The stages that train (`trains`) or may (`may`), those that are scored (`scores`), and the blends that are sampled
    (`samples`). The list of jobs is asked for after plan, status and budget, none of which writes Snakemake's settings.
    """
    config = load_config(Path("config/config.yaml"), {})
    recipe = load_recipe(Path(config.recipe), config.seed, config.model, config.start)
    project = Project(recipe, load_site(Path(config.site), recipe), Path(config.folder), False, Path(config.results))
    outlook = project.outlook()
    statuses = [status_of(state, StagePaths(project.results / name)) for name, state in outlook.states.items()]
    try:
        check_budget(Project(recipe, Site.model_validate(BUDGET), *(project.results, False, project.root)))
        refused = ""
    except UserError as error:
        refused = str(error).partition("(")[2].partition(")")[0]
    plan = [planned for planned in planned_stages(project, recipe.stages, outlook) if planned.estimate.steps != 0]
    printed = workflow.snakemake("--dry-run")
    table = dict(re.findall(ROW, printed, re.M))
    jobs = {*re.findall(r"^rule (?:train|merge): stage=([\w.-]+);", printed, re.M)} & recipe.stages.keys()
    scored = re.findall(r"^rule (?:evaluate|test|score_quantized): stage=([\w.-]+);", printed, re.M)
    told = re.findall(r"^blend ([\w.-]+): ", printed, re.M)
    again = {*re.findall(r"^([\w.-]+) +(?:published again|fresh)\b", printed, re.M)} & jobs
    if "no stage trains" in printed:
        again = jobs
    return {
        "jobs": jobs - again,
        "published again": again,
        "table": {name for name, what in table.items() if what != "may train"},
        "table, may": {name for name, what in table.items() if what == "may train"},
        "plan": {it.state.stage for it in plan if it.state.is_certain},
        "plan, may": {it.state.stage for it in plan if not it.state.is_certain},
        "status": {status.stage for status in statuses if status.state not in ("fresh", "trained")},
        "budget": {name for name in recipe.stages if re.search(rf"\b{re.escape(name)} [≤≥<\d]", refused)},
        "scores": {*outlook.scorings},
        "scoring jobs": {*scored},
        "samples": {each.blend for each in outlook.samplings},
        "table, samples": {*told},
    }


def differences(edit: Edit, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """What was said that is not as the edit expects; a job behind a choice is not planned, so may be missing."""
    counted = edit.trains | edit.may
    wanted = {
        "table": edit.trains,
        "table, may": edit.may,
        "plan": edit.trains,
        "plan, may": edit.may,
        "status": counted,
        "scores": edit.scores,
        "samples": edit.samples,
        "table, samples": edit.samples,
    }
    wrong = {asked: found[asked] for asked in wanted if found[asked] != wanted[asked]}
    if not edit.trains <= found["jobs"] <= counted:
        wrong["jobs"] = found["jobs"]
    if not found["scoring jobs"] <= edit.scores | found["published again"]:
        wrong["scoring jobs"] = found["scoring jobs"]
    largest = min(len(counted), LARGEST)
    if not (found["budget"] <= counted and len(found["budget"]) == largest):
        wrong["budget"] = found["budget"]
    return wrong


def _when(edit: Edit, number: int) -> list[pytest.MarkDecorator]:
    """Return when an edit is tried: a run in `make slow`, if it trains in `make long`; of plans an eighth in `make test`."""
    if edit.is_trained and edit.tree == "short" and not edit.trains:
        return [pytest.mark.slow]
    is_of_every_day = edit.tree == "short" and not edit.is_trained and number % 8 == 0
    return [] if is_of_every_day else [pytest.mark.long]


@pytest.mark.parametrize(
    "edit",
    [pytest.param(edit, id=edit.edit, marks=_when(edit, number)) for number, edit in enumerate(EDITS)],
)
def test_jobs_plan_status_and_budget_agree_with_what_really_trains(request, edit, monkeypatch):
    copied = request.getfixturevalue("copied" if edit.tree == "short" else "wide_copied")
    edit.apply(copied)
    monkeypatch.chdir(copied.root)
    before, kept = attempts(copied), {path: path.read_bytes() for path in weights(copied)}
    assert differences(edit, expected(copied)) == {}
    if not (edit.is_trained or os.environ.get("STAGECOACH_ALL_EDITS")):
        return
    stages = load_recipe(copied.root / f"config/recipes/{edit.tree}.yaml").stages
    targets = [f"{copied.results.relative_to(copied.root)}/{stage}/ckpt" for stage in stages]
    output = copied.snakemake(*targets)
    begun = {path for path, count in attempts(copied).items() if count > before[path]}
    trained = {stage for stage in stages if (copied.results / stage / "run").resolve() in begun}
    assert edit.trains <= trained <= edit.trains | edit.may and len(begun) == len(trained)
    there = {path.read_bytes() for path in weights(copied)}
    assert [path for path, content in kept.items() if content not in there] == [], "nothing trained may be lost"
    assert "Nothing to be done" in output or "Nothing to be done" in copied.snakemake("--dry-run", *targets)
    left = expected(copied)
    assert not any(left[asked] for asked in ("plan", "plan, may", "status", "budget"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The tree of tests/workflow/wide.yaml, made to its report."""
    workflow = Workflow(tmp_path_factory.mktemp("wide"))
    prepare(workflow)
    workflow.snakemake()
    return workflow


@pytest.fixture
def wide_copied(wide, tmp_path):
    """A copy of it."""
    return wide.copied_to(tmp_path)


def test_a_recipe_under_another_name_makes_nothing_again(copied):
    recipes = copied.root / "config/recipes"
    (recipes / "short.yaml").rename(recipes / "renamed.yaml")
    assert "Nothing to be done" in copied.snakemake("--dry-run", "--config", "recipe=config/recipes/renamed.yaml")


def weights(workflow) -> list[Path]:
    """The weights of all sealed checkpoints, wherever their stage trained."""
    return [*workflow.results.parent.glob("**/checkpoints/*/model.safetensors")]


def test_the_documents_table_is_the_tests_own():
    assert DOCUMENT.read_text() == document(), "run: python -m tests.workflow.edits"
