"""The stand-in for the hub: the published layout, tasks with answers that earn the reward, nothing held out trained on."""

import json
import random
from pathlib import Path

import pytest

from demo.synthesize import is_held_out, write_source
from demo.tasks import FAMILIES, TOOLS, make_task, spoil
from scripts.data.fill import fill_blend
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe
from scripts.rewards.registry import check_row, score
from scripts.rewards.response import parse_calls
from scripts.rows.prompts import open_picture, pictures_of, prompt_of
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


@pytest.mark.slow
def test_the_stand_in_has_the_published_layout(source):
    assert {path.stem for path in source.glob("*.jsonl")} == {"sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"}
    assert (source / "tables/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet").exists()
    assert (source / "tables/Skywork/Skywork-OR1-RL-Data/data/math-00000-of-00001.parquet").exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_held_out_rows_prompts_are_trained_on_nowhere(source, tmp_path):
    held_out, trained = set(), set()
    for path in source.glob("*.jsonl"):
        fill_blend(path, source / "tables", tmp_path / path.stem)
        for split, prompts in (("train", trained), ("val", held_out)):
            for row in rows_of(tmp_path / path.stem / f"{split}-split.jsonl"):
                prompts.add((row.get("messages") or row["responses_create_params"]["input"])[0]["content"])
    assert held_out and not held_out & trained


@pytest.mark.slow
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


def test_a_blend_of_an_environment_without_tasks_is_not_synthesized(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/tiny.yaml")
    blends = {"x": recipe.blends["rlvr1"].model_copy(update={"environments": [Environment.CODE_GEN]})}
    with pytest.raises(UserError, match=r"blend x: no rows of .* can be synthesized"):
        write_source(recipe.model_copy(update={"blends": blends}), tmp_path)


def test_one_prompt_in_ten_is_held_out():
    share = sum(is_held_out(Environment.MATH, str(number)) for number in range(5000)) / 5000
    assert 0.08 < share < 0.12


# --- preferences, undeclared tools, pictures ---


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The synthetic sources of the recipes with preferences, by name."""
    found = {}
    for name in ("tiny-nano", "tiny-omni"):
        found[name] = tmp_path_factory.mktemp(name)
        write_source(load_recipe(ROOT / f"config/recipes/{name}.yaml"), found[name])
    return found


@pytest.mark.slow
def test_a_preference_prefers_what_earns_the_reward_and_rejects_undeclared_tools(others):
    calls = [row for row in rows_of(others["tiny-nano"] / "dpo.jsonl") if row["chosen"].startswith("[")]
    assert calls
    for row in calls:
        (right,), (wrong,) = parse_calls(row["chosen"]), parse_calls(row["rejected"])
        declared = {tool for tool, _ in TOOLS.values()}
        assert right.name in declared and wrong.name not in declared and right.arguments == wrong.arguments
    for row in rows_of(others["tiny-omni"] / "mpo.jsonl"):
        assert set(row) == {"prompt", "chosen", "rejected"} and row["chosen"] != row["rejected"]


@pytest.mark.slow
def test_pictures_are_data_uris_that_show_what_the_answer_says(others):
    rows = rows_of(others["tiny-omni"] / "vision.jsonl")
    counted = 0
    for row in rows:
        (uri,) = pictures_of(prompt_of(row))
        pixels = list(open_picture(uri).resize((2, 2), 0).getdata())
        if row["agent_ref"]["name"] == Environment.MATH:
            assert sum(max(pixel) >= 180 for pixel in pixels) == int(row["expected_answer"])
            counted += 1
        else:
            (shown,) = {pixel.index(max(pixel)) for pixel in pixels}
            options = {letter: name for option in row["options"] for letter, name in option.items()}
            assert options[row["expected_answer"]] == ("red", "green", "blue")[shown]
    assert 0.4 < counted / len(rows) < 0.6
    prompts = [json.dumps(row["responses_create_params"]) for row in rows]
    assert not set(prompts[:-100]) & set(prompts[-100:])


def test_a_picture_that_is_no_data_uri_is_refused():
    with pytest.raises(UserError, match=r"https://example.org/a.png..., cannot be read"):
        open_picture("https://example.org/a.png")
