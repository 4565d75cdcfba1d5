"""The recipes for a model of one's own: they load with their sites, and their batches fall evenly to the processes."""

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from scripts.data.download import fetch_source
from scripts.errors import UserError
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import resolve_stage
from scripts.rewards.registry import score
from tests.conftest import ROOT

RECIPES = [
    ("tiny-pretrained", "laptop", 2),
    ("tiny-tools", "laptop", 2),
    ("tiny-rm", "laptop", 2),
    ("smollm2", "laptop", 2),
    ("sft", "laptop", 2),
    ("qwen3-gsm8k", "gpu", 1),
    ("tulu3-8b", "gpu", 8),
    ("qwen3-small-cluster", "gpu-cluster", 8),
]


def path_of(name: str):
    return ROOT / f"config/recipes/{name}.yaml"


@pytest.mark.parametrize(("name", "site", "processes"), RECIPES)
def test_it_loads_with_its_site_and_every_process_gets_as_many_rows(name, site, processes):
    recipe = load_recipe(path_of(name))
    load_site(ROOT / f"config/sites/{site}.yaml", recipe)
    for stage in recipe.stages:
        config, policy = resolve_stage(recipe, stage), recipe.stages[stage].policy
        share, rest = divmod(config.rows_per_update, processes)
        assert rest == 0 and share % (policy.train_micro_batch_size or share) == 0, stage


@pytest.mark.parametrize(("stage", "rows", "epochs"), [("sft", 939_343, 2), ("dpo", 271_409, 1)])
def test_steps_of_tulu_3_are_its_epochs_of_what_is_not_held_out(stage, rows, epochs):
    recipe = load_recipe(path_of("tulu3-8b"))
    settings = recipe.stages[stage]
    trained = epochs * (rows - recipe.blends[settings.blend].holdout)
    assert settings.section.max_num_steps == trained // settings.policy.train_global_batch_size


def test_the_recipe_of_the_documentation_needs_forty_lines_and_its_rows_are_paid_for_their_answers(tmp_path):
    text = re.search(r"```yaml\n(name: math\n.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)[1]
    assert len(text.splitlines()) <= 40
    rows = [{"question": f"1+{number}?", "answer": f"It is\n#### {number + 1}"} for number in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "math.yaml").write_text(text.replace("path: /data/gsm8k", "path: /data/gsm8k, split: train"))
    with pytest.raises(UserError, match=r"math\.yaml:2: source: subset and split are of a blend's own source"):
        load_recipe(tmp_path / "math.yaml")
    (tmp_path / "math.yaml").write_text(text.replace("/data/gsm8k", str(tmp_path)))
    fetch_source(load_recipe(tmp_path / "math.yaml"), tmp_path / "source")
    prompts, shown = (
        [json.loads(line) for line in (tmp_path / f"source/{name}.jsonl").read_text().splitlines()]
        for name in ("rlvr", "sft")
    )
    for prompt, demonstration in zip(prompts, shown, strict=True):
        assert demonstration["messages"][0] == prompt["responses_create_params"]["input"][0]
        assert score(prompt, demonstration["messages"][1]["content"]) == 1.0


def test_a_model_of_ones_own_stands_in_for_a_pretrained_one_alone():
    recipe = load_recipe(path_of("qwen3-gsm8k"), model="./mine")
    assert recipe.model.model_dump(exclude_defaults=True) == {"name": "./mine"}
    with pytest.raises(
        UserError, match=r"model=./mine is for recipes that start from a pretrained model.*makes a model"
    ):
        load_recipe(path_of("tiny"), model="./mine")


def commented(text: str) -> list[dict[str, Any]]:
    """The blends and stages that stand in a recipe's comments, a dictionary for each `blends:`."""
    lines = [line.removeprefix("# ") for line in text.splitlines() if re.match(r"# (blends:|stages:|  )", line)]
    parts = "\n".join(lines).split("blends:\n")[1:]
    return [yaml.safe_load(f"blends:\n{part}") for part in parts]


@pytest.mark.parametrize("parent", [None, "sft"])
def test_what_stands_in_comments_of_the_recipe_for_chats_trains_alone_or_after_sft(parent, tmp_path):
    text = path_of("sft").read_text()
    whole = yaml.safe_load(text)
    assert [*whole["stages"]] == ["sft"] and whole["stages"]["sft"]["data"] == {"shuffle": True}
    found = commented(text)
    assert [[*more["stages"]] for more in found] == [["dpo"], ["kto"], ["reward"]]
    for more in found:
        (stage,) = more["stages"].values()
        stages = whole["stages"] | {name: stage | {"parent": "sft"} for name in more["stages"]}
        path = tmp_path / "recipe.yaml"
        blends = whole["blends"] | more["blends"]
        path.write_text(yaml.safe_dump(whole | {"blends": blends, "stages": stages if parent else more["stages"]}))
        recipe = load_recipe(path)
        (own,) = more["blends"].values()
        assert own["holdout_by"] == "random" and 0 < own["holdout"] < 0.2
        for name in recipe.stages:
            assert resolve_stage(recipe, name).data.shuffle
            assert recipe.graph[name].draws_by_seed
