"""A check is a function with its moment and its effort, asked once; findings have one form, wherever they are told."""

import re

import pytest

from scripts.backends.by_name import backend_of
from scripts.commands.checks import OF_PROJECT, OF_STAGE, findings, refuse
from scripts.commands.doctor import diagnose
from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.errors import UserError
from scripts.finding import Check, Effort, Finding, Moment, ask, refusal_of, together
from scripts.recipe.load import load_recipe, load_site
from scripts.train.preflight import AFTER_LINES, BEFORE_LINES, OF_ANSWERS, OF_ROWS, OF_SPLITS, OF_STARTS
from tests.conftest import ROOT, SHORT

LATER = "what it reads may have changed"
OF_PREFLIGHT = (*OF_STARTS, *OF_SPLITS, *BEFORE_LINES, *OF_ROWS, *AFTER_LINES, *OF_ANSWERS)
OF_BACKENDS = [check for name in ("trl", "nemo_rl", "merge") for check in backend_of(name).checks()]
EVERY = {check.find.__name__: check for check in (*OF_PROJECT, *OF_STAGE, *OF_PREFLIGHT, *OF_BACKENDS)}


def finds(*found: Finding):
    return lambda asked: asked.append(found) or found


def test_a_check_is_asked_at_its_moment_and_again_by_the_preflight_only_where_it_says_why():
    checks = [Check(moment, finds(Finding(moment.name))) for moment in Moment]
    checks.append(Check(Moment.READ, finds(Finding("again")), again=LATER))
    told = {moment: [finding.message for finding in ask(checks, [], [moment])] for moment in Moment}
    assert told == {moment: [moment.name] for moment in Moment} | {
        Moment.READ: ["READ", "again"],
        Moment.PREFLIGHT: ["PREFLIGHT", "again"],
    }


def test_once_something_stops_checks_of_more_effort_are_not_asked_and_those_of_the_same_are():
    asked = []
    stops, warns = Finding("a", "sft"), Finding("b", "sft", stops=False)
    checks = [
        Check(Moment.PREFLIGHT, finds(Finding("never")), Effort.BATCH),
        Check(Moment.PREFLIGHT, finds(stops), Effort.ROWS),
        Check(Moment.PREFLIGHT, finds(warns), Effort.ROWS),
        Check(Moment.PREFLIGHT, finds(warns), Effort.RECORDS),
    ]
    assert [*ask(checks, asked)] == [warns, stops, warns]
    assert asked == [(warns,), (stops,), (warns,)]


def test_a_finding_is_one_line_with_its_trap():
    assert str(Finding("too few rows", "rlvr1", trap=4)) == "error: rlvr1: too few rows (docs/traps.md, trap 4)"
    assert str(Finding("no such folder: /rows")) == "error: no such folder: /rows"
    assert str(Finding("a small one", "sft", stops=False)) == "warning: sft: a small one"


def test_what_several_stages_share_is_one_finding_in_its_first_place():
    found = [Finding("a", "sft"), Finding("b", "sft", stops=False), Finding("a", "rl"), Finding("c"), Finding("c")]
    assert [*map(str, together(found))] == ["error: sft, rl: a", "warning: sft: b", "error: c"]


def test_an_error_of_a_call_is_a_finding_and_another_exception_is_not_hidden():
    def refused(what):
        raise UserError(f"{what} is gone")

    assert [*refusal_of(refused, "it", about="sft")] == [Finding("it is gone", "sft")]
    assert [*refusal_of(str, "it")] == []
    with pytest.raises(ZeroDivisionError):
        [*refusal_of(divmod, 1, 0)]


def test_only_what_stops_is_refused():
    refuse([Finding("a small one", stops=False)])
    with pytest.raises(UserError, match=r"^sft: a\n  b$"):
        refuse([Finding("a", "sft"), Finding("a small one", stops=False), Finding("b")])


def test_the_page_names_every_check_with_its_moment():
    """The text and the first row of an environment are two checks of one name, at two moments."""
    page = (ROOT / "docs/mistakes.md").read_text().partition("## When each check is asked")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| `check", "| `start"))]
    told = {name: cells[2].split(", ") for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}
    repeated = {name for cells in rows if len(cells) > 3 for name in re.findall(r"`(\w+)`", cells[0])}
    silent = {"measure_splits", "show_rows"}
    assert told.keys() == EVERY.keys() - silent
    for name, moments in told.items():
        assert EVERY[name].moment.name.lower() in moments, name
        assert bool(EVERY[name].again) == (name in repeated), name


# A recipe of NeMo-RL on a site without a cluster: the first job would be the rows' download, the first stage hours away.
SUPER = load_recipe(ROOT / "config/recipes/super3.yaml", model="/no/such/model")
LAPTOP = load_site(ROOT / "config/sites/laptop.yaml", SUPER)


def test_a_site_that_no_stage_can_train_on_is_refused_at_the_start_as_one_finding(tmp_path):
    project = Project(SUPER, LAPTOP, tmp_path)
    (found,) = [finding for finding in findings(project, Moment.START) if finding.trap == 23]
    assert found.line.startswith("rlvr1, rlvr2, rlvr3, swe1, swe2, rlhf: site laptop has no section slurm")
    assert findings(project, Moment.START, stages={"rlvr1"}) == [Finding(found.message, "rlvr1", trap=23)]
    assert findings(project, Moment.START, stages=()) == []


def test_the_doctor_asks_all_and_the_plan_those_up_to_plan(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/nano3.yaml")
    project = Project(recipe, LAPTOP, tmp_path)
    stops = [finding.line for finding in diagnose(project) if finding.stops]
    rows, site = (any(words in line for line in stops) for words in ("/path/to/nano3_blends", "no section slurm"))
    assert rows and site
    text = plan_text(project)
    assert "Snakemake will refuse all of it: /path/to/nano3_blends" in text and "no section slurm" not in text


def test_a_sound_recipe_has_no_findings(tmp_path):
    recipe = load_recipe(SHORT)
    project = Project(recipe, load_site(ROOT / "config/sites/laptop.yaml", recipe), tmp_path)
    assert [finding for finding in diagnose(project) if finding.stops] == []
