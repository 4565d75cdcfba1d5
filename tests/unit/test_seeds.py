"""Variants of a sweep that are one training are named as one: before they train, and by their weights afterwards."""

import json

import pytest
import yaml

from scripts.commands.checks import check_data
from scripts.commands.project import Project
from scripts.evaluate.choose import words_of
from scripts.files import sha256_text, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.site import Site
from scripts.report.pages import merged, read_variants
from scripts.stage.seeds import has_dropout, idle_seeds, variants_alike
from tests.conftest import ROOT

ALGORITHMS = ROOT / "tests/algorithms.yaml"
SWEEP = {"policy.optimizer.lr": [0.001, 0.01], "seed": [1, 2]}


@pytest.fixture
def swept(tmp_path):
    """A recipe with a stage in four variants, of two seeds each."""

    def load(name="dpo", model=None, sweep=SWEEP, **settings):
        data = yaml.safe_load(ALGORITHMS.read_text())
        defaults = data["defaults"].get(data["stages"][name]["algorithm"], {})
        stage = data["stages"][name] | settings
        data["stages"] = {"sft": data["stages"]["sft"], name: stage | {"sweep": sweep}}
        data["model"] = model or data["model"]
        assert isinstance(defaults, dict)
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return load_recipe(path)

    return load


def pairs(name):
    """The variants by rate, each with both seeds."""
    return [[f"{name}.lr-{rate}.seed-{seed}" for seed in (1, 2)] for rate in ("0.001", "0.01")]


@pytest.mark.parametrize("name", ["dpo", "mpo", "kto"])
def test_a_seed_without_effect_is_told_before_anything_trains(swept, tmp_path, name):
    assert variants_alike(swept(name)) == pairs(name)
    first, second = map(str, check_data(Project(swept(name), Site(name="here", threads=1), tmp_path)))
    assert first.startswith(f"warning: {name}.lr-0.001.seed-1, {name}.lr-0.001.seed-2: the seed has no effect here, so")
    assert "they are the same training" in second and "data.shuffle: true" in second


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dpo", {"data": {"shuffle": True}}),
        ("sft", {}),  # of a fresh model, whose weights are drawn
        ("text", {}),
    ],
)
def test_a_seed_from_which_something_is_drawn_has_an_effect(swept, tmp_path, name, settings):
    assert idle_seeds(swept(name, **settings), tmp_path) == []


def test_adapters_are_drawn_and_another_value_is_another_training(swept, tmp_path):
    policy = yaml.safe_load(ALGORITHMS.read_text())["stages"]["dpo"]["policy"]
    assert idle_seeds(swept(policy=policy | {"lora": {"dim": 4}}), tmp_path) == []
    assert idle_seeds(swept(sweep={"policy.optimizer.lr": [0.001, 0.01]}), tmp_path) == []


def test_a_model_with_dropout_draws_and_one_that_is_not_there_may(swept, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    recipe = swept(model={"name": str(folder)})
    assert "the seed has no effect here, unless the model's config sets a dropout" in idle_seeds(recipe, tmp_path)[0]
    for config, count in (({"attention_dropout": 0.0, "num_drops": True}, 2), ({"resid_pdrop": 0.1}, 0)):
        (folder / "config.json").write_text(json.dumps(config))
        assert len(idle_seeds(recipe, tmp_path)) == count
    assert has_dropout({"text_config": {"hidden_dropout": 0.1}})


def write_export(results, name, content):
    """The record of an export."""
    files = {"model.safetensors": {"bytes": 1, "sha256": sha256_text(content)}}
    record = {"stage": name, "step": 4, "identity": name, "content": content, "files": files}
    write_json(results / name / "hf/record.json", record)


def test_variants_with_equal_weights_are_one_row_of_the_page_and_a_line_of_the_plan(swept, tmp_path):
    recipe = swept("text", sweep={"seed": [1, 2, 3]})
    for name, content in (("text.seed-1", "a"), ("text.seed-2", "b"), ("text.seed-3", "a")):
        write_export(tmp_path, name, content)
    (line,) = idle_seeds(recipe, tmp_path)
    assert line.startswith("text.seed-1, text.seed-3: their exports are equal, so they are one result")
    variants = merged(read_variants(tmp_path, recipe.sweeps["text"], []), tmp_path)
    assert [(each.name, each.twins, each.varied) for each in variants] == [
        ("text.seed-1", ["text.seed-3"], {"seed": "1, 3"}),
        ("text.seed-2", [], {"seed": 2}),
    ]
    assert "the same weights, so one result and not several that agree" in variants[0].notes


def test_a_choice_names_what_has_the_weights_of_the_chosen_and_does_not_call_it_tied():
    common = {"low": None, "high": None, "left_out": None, "tied": True, "score": 0.5}
    candidates = [common | {"name": name, "content": content} for name, content in zip("abc", "xyx", strict=True)]
    says = words_of({"stage": "s", "by": "held_out_mean", "candidates": candidates})
    assert says == "s: a chosen among 3 by held_out_mean (highest 0.500); the same weights: c; tied: b"
