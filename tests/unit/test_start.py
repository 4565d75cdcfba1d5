"""`start`: a stage in the middle of a chain starts from the recipe's model, and what comes before it is left out."""

import pytest

from scripts.errors import UserError
from scripts.recipe.load import START, check_stage_name, load_recipe, load_site
from scripts.recipe.resolve import resolve_stage
from tests.conftest import ROOT

TINY = ROOT / "config/recipes/tiny.yaml"


def test_the_stage_starts_from_the_model_and_those_that_it_descends_from_are_left_out():
    whole, rest = load_recipe(TINY), load_recipe(TINY, start="rlhf")
    order = whole.graph.stage_names
    kept = order[order.index("rlhf") :]
    assert rest.graph.stage_names == kept and rest.left_out == tuple(order[: order.index("rlhf")])
    assert rest.stages["rlhf"].parent is None and whole.stages["rlhf"].parent is not None
    assert resolve_stage(rest, "rlhf").model == whole.model and resolve_stage(whole, "rlhf").model is None


def test_from_the_first_stage_on_it_is_the_whole_chain():
    whole = load_recipe(TINY)
    assert load_recipe(TINY, start="sft").stages == whole.stages


def test_another_branch_stays_unless_it_descends_from_what_is_left_out(edited):
    stage = "  swe2: {algorithm: grpo, "
    branch = "  other: {{algorithm: grpo, {parent}blend: swe1}}\n"
    for parent, stays in (("parent: sft, ", False), ("", True)):
        recipe = edited("tiny", (stage, branch.format(parent=parent) + stage), start="rlvr2")
        assert ("other" in recipe.stages) == stays and "rlhf" in recipe.stages


def test_blends_that_nothing_uses_any_more_are_left_out_but_not_those_that_scores_are_taken_on():
    whole, rest = load_recipe(TINY), load_recipe(TINY, start="rlhf")
    assert whole.blends["sft"].kind == "demonstrations" and "sft" not in rest.blends
    scored, before = ({rows.name for rows in recipe.graph.scored_rows} for recipe in (rest, whole))
    assert scored == before, "gates compare these scores"
    assert scored | {rest.stages["rlhf"].blend} == rest.blends.keys()
    super3 = load_recipe(ROOT / "config/recipes/super3.yaml", start="swe1")
    assert super3.blends.keys() == super3.stages.keys() == {"swe1", "swe2", "rlhf"}


def test_an_unknown_stage_gets_the_nearest_name_and_the_line(edited):
    with pytest.raises(UserError, match=r"tiny\.yaml: start: no stage is named rlvr4; did you mean rlvr\d\?"):
        load_recipe(TINY, start="rlvr4")
    with pytest.raises(UserError, match=r"tiny\.yaml:1: start: no stage is named stf; did you mean sft\?"):
        edited("tiny", ("# yaml-language-server", "start: stf\n# yaml-language-server"))


def test_what_the_start_could_not_train_from_the_model_is_refused(edited):
    lora = ("parent: sft, blend: rlvr1}", "parent: sft, blend: rlvr1, policy: {lora: {}}}")
    assert edited("tiny", lora).stages["rlvr1"].policy.lora
    with pytest.raises(UserError, match=r"stages\.rlvr1: policy\.lora is laid over a model that was trained"):
        edited("tiny", lora, start="rlvr1")


def test_a_site_may_speak_of_stages_that_are_left_out_but_of_no_unknown_ones(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("name: here\nthreads: 1\nstages: {sft: {runtime: 5}}\n")
    assert load_site(site, load_recipe(TINY, start="rlhf")).stages["sft"].runtime == 5
    site.write_text("name: here\nthreads: 1\nstages: {stf: {runtime: 5}}\n")
    with pytest.raises(UserError, match=r"stages\.stf: the recipe has no such stage"):
        load_site(site, load_recipe(TINY, start="rlhf"))


def test_who_names_a_stage_that_is_left_out_is_told_how_to_begin_there():
    with pytest.raises(UserError, match="the recipe starts at rlhf, without sft; start=sft begins there"):
        check_stage_name(load_recipe(TINY, start="rlhf"), "sft")


def test_jobs_are_told_by_a_variable_and_a_start_that_is_given_wins(monkeypatch):
    monkeypatch.setenv(START, "rlhf")
    assert load_recipe(TINY).start == "rlhf"
    assert load_recipe(TINY, start="sft").start == "sft"
