"""The stand-in for the hub: the published layout, tasks with answers that earn the reward, nothing held out trained on."""

import json
import random
from pathlib import Path

import pytest

from scripts.data.fill import fill_blend
from scripts.data.synthesize import is_held_out, write_source
from scripts.data.tasks import FAMILIES, make_task, spoil
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.models import Environment
from scripts.rewards.registry import check_row, score
from tests.conftest import ROOT

DAPO, SKYWORK = "super_v3_lcsft_step1000_dapo17k", "super_v3_lcsft_step1000_skyworks"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tiny recipe's synthetic source."""
    directory = tmp_path_factory.mktemp("source")
    write_source(load_recipe(ROOT / "config/recipes/tiny.yaml"), directory)
    return directory


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- synthesize ---


def test_the_stand_in_has_the_published_layout(source):
    assert {path.stem for path in source.glob("*.jsonl")} == {"sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"}
    assert (source / "tables/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet").exists()
    assert (source / "tables/Skywork/Skywork-OR1-RL-Data/data/math-00000-of-00001.parquet").exists()


def test_about_a_fifth_of_the_math_rows_are_placeholders_into_both_tables(source):
    math = [
        row
        for name in ("rlvr1", "rlvr2", "rlvr3")
        for row in rows_of(source / f"{name}.jsonl")
        if row["agent_ref"]["name"] == Environment.MATH
    ]
    left = [row for row in math if "_hf_placeholder" in row]
    assert 0.15 < len(left) / len(math) < 0.27
    assert {row["dataset"] for row in left} == {DAPO, SKYWORK}


def test_every_filled_row_obeys_its_environments_contract(source, tmp_path):
    for name in ("rlvr1", "swe1", "rlhf"):
        fill_blend(source / f"{name}.jsonl", source / "tables", tmp_path / name)
        for row in rows_of(tmp_path / name / "train-split.jsonl"):
            assert check_row(row) is None
            assert row["responses_create_params"]["input"][0]["content"]


def test_the_held_out_rows_prompts_are_trained_on_nowhere(source, tmp_path):
    held_out, trained = set(), set()
    for path in source.glob("*.jsonl"):
        fill_blend(path, source / "tables", tmp_path / path.stem)
        for split, prompts in (("train", trained), ("val", held_out)):
            for row in rows_of(tmp_path / path.stem / f"{split}-split.jsonl"):
                prompts.add((row.get("messages") or row["responses_create_params"]["input"])[0]["content"])
    assert held_out and not held_out & trained


def test_the_same_recipe_gives_the_same_bytes(source, tmp_path):
    write_source(load_recipe(ROOT / "config/recipes/tiny.yaml"), tmp_path)
    assert (tmp_path / "record.json").read_text() == (source / "record.json").read_text()


@pytest.mark.parametrize("environment", FAMILIES)
def test_the_demonstrated_answer_earns_the_full_reward_and_a_spoilt_one_is_another(environment):
    rng = random.Random(0)
    for _ in range(200):
        task = make_task(environment, rng)
        row = {"agent_ref": {"name": str(environment)}, **task.fields}
        assert score(row, task.answer) == 1.0
        assert spoil(environment, task.answer, rng) != task.answer


def test_a_blend_whose_rows_only_a_judge_could_score_is_not_synthesized(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/tiny.yaml")
    blends = {"x": recipe.blends["rlvr1"].model_copy(update={"environments": [Environment.LC_JUDGE]})}
    with pytest.raises(UserError, match="blend x: no rows of lc_judge_simple_agent can be synthesized"):
        write_source(recipe.model_copy(update={"blends": blends}), tmp_path)


def test_one_prompt_in_ten_is_held_out():
    share = sum(is_held_out(Environment.MATH, str(number)) for number in range(5000)) / 5000
    assert 0.08 < share < 0.12
