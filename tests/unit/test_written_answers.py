"""Recipes whose stages learn from written answers: what they need, and what their held-out rows are for."""

import pytest
import yaml

from scripts.recipe.load import load_recipe
from tests.conftest import ROOT, refusal

ALONE = ROOT / "tests/alone.yaml"
SHORT = ROOT / "tests/short.yaml"


@pytest.fixture
def written(tmp_path):
    """Write a test's recipe with other keys, None to leave a key out; return the path."""

    def write(recipe=ALONE, **changes):
        values = yaml.safe_load(recipe.read_text()) | changes
        path = tmp_path / "recipe.yaml"
        kept = {key: value for key, value in values.items() if value is not None}
        path.write_text(yaml.safe_dump(kept, sort_keys=False))
        return path

    return write


@pytest.mark.parametrize("evaluation", [None, {}, {"tasks": []}])
def test_stages_that_learn_from_written_answers_need_no_evaluation_and_no_prompts(written, evaluation):
    recipe = load_recipe(written(evaluation=evaluation))
    assert not any(map(recipe.is_scored, recipe.stages)) and not recipe.evaluation_blends()


@pytest.mark.parametrize("evaluation", [None, {}, {"tasks": []}])
def test_a_stage_that_samples_its_own_answers_is_refused_with_the_lines_that_judge_it(written, evaluation):
    says = refusal(load_recipe, written(SHORT, evaluation=evaluation))
    assert "rlvr1, rlhf would be judged by nothing held out" in says
    *_, section, key = says.splitlines()
    pasted = yaml.safe_load(f"{section}\n{key}")
    assert load_recipe(written(SHORT, **pasted)).is_scored("rlvr1")


def test_responses_to_held_out_prompts_are_refused_where_no_blend_has_prompts(written):
    says = refusal(load_recipe, written(evaluation={"max_new_tokens": 8}))
    assert "no blend of prompts to take held-out rows from; leave max_new_tokens out" in says
