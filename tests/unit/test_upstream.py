"""A recipe's keys are held against the release that it names: a made-up checkout here, real ones where they are."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.backends.nemo_rl.metrics import NAMES
from scripts.backends.nemo_rl.releases import load_releases, release_of
from scripts.backends.nemo_rl.upstream import load_upstream, unknown_keys, value_of
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from tests.cases import cases, tables_of
from tests.production import CHECKOUTS, PRODUCTION, needs_checkouts, stages_of, stated, whole_recipe

CONFIG = "examples/nemo_gym/stage.yaml"
AT = "config/recipes/made.yaml: stages.rlvr"
MADE = tables_of("upstream")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A release in which one config inherits from two others, as NeMo-RL's do."""
    for name, config in MADE["files"].items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config) if config else "")
    return tmp_path / "checkout"


@pytest.fixture
def recipe(tmp_path):
    """A recipe of one stage that the made-up release can train; `changes` to that stage."""

    def load(**changes: object) -> Recipe:
        stage = dict(MADE["stage"])
        for key, value in changes.items():
            stage[key] = stage[key] | value if isinstance(stage.get(key), dict) else value
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump(MADE["recipe"] | {"stages": {"rlvr": stage}}))
        return load_recipe(path)

    return load


def test_a_config_is_read_with_all_that_it_inherits(checkout):
    config = load_upstream(checkout / CONFIG)
    batch = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}
    assert config["grpo"] == batch | {"max_num_steps": 9, "seed": 7}
    assert config["policy"]["optimizer"] == {"name": "torch.optim.AdamW"}, "sections are merged"
    assert config["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-6, "a number, as OmegaConf reads it"
    assert config["data"] == {"train": {"data_path": "t"}, "validation": {"data_path": "v"}}, "_override_ replaces"
    assert "defaults" not in config


def test_a_recipe_that_says_only_what_the_release_knows_has_no_findings(checkout, recipe):
    fitting = recipe(policy={"megatron_cfg": {"tensor_model_parallel_size": 2}}, add={"env": {"nemo_gym": {"new": 1}}})
    assert unknown_keys(fitting, checkout, "rlvr") == []


@cases("upstream.unknown", "changes", "expected")
def test_what_the_release_has_not_is_named_with_the_nearest(checkout, recipe, changes, expected):
    (line,) = unknown_keys(recipe(**changes), checkout, "rlvr")
    assert line.startswith(f"{AT}.{expected}")


def test_what_the_launch_adds_is_checked_too(checkout, recipe):
    path = checkout / "examples/configs/base.yaml"
    path.write_text(path.read_text().replace("checkpoint_must_save_by:", "must_save_by:"))
    (line,) = unknown_keys(recipe(), checkout, "rlvr")
    assert line.startswith(f"{AT}.checkpointing.checkpoint_must_save_by: no key of {CONFIG}")


def test_a_config_that_inherits_from_nothing_is_named(checkout, recipe):
    (checkout / "examples/configs/grpo.yaml").unlink()
    expected = f"{AT}.config: {CONFIG} needs grpo.yaml, which is not in the checkout of v0.7.0"
    assert unknown_keys(recipe(), checkout, "rlvr") == [expected]


def test_a_config_that_is_no_yaml_says_where(checkout, recipe):
    (checkout / CONFIG).write_text("a: [")
    with pytest.raises(UserError, match=r"stage.yaml: not valid YAML"):
        unknown_keys(recipe(), checkout, "rlvr")


@needs_checkouts
@pytest.mark.parametrize("name", PRODUCTION)
def test_every_shipped_recipe_fits_its_release(name):
    recipe = whole_recipe(name)
    checkout = Path(CHECKOUTS) / recipe.release
    assert not any(unknown_keys(recipe, checkout, stage) for stage in stages_of(recipe))
    if name.startswith("super3"):
        # the configs are the model's own, so only what they leave open or keep for ever may be said otherwise
        judge = "env.nemo_gym.genrm_model.responses_api_models.vllm_model.model"
        keys = set()
        for stage in (stage for name, stage in recipe.stages.items() if name != "sft"):
            config, ours = load_upstream(checkout / stage.config), stated(stage, release_of(recipe.release))
            keys |= {key for key, value in ours.items() if value_of(config, key) != value}
        own = {"super3-b200": {judge}, "super3-1.7b": {"grpo.max_num_steps"}}
        assert keys == {"checkpointing.keep_top_k", "checkpointing.metric_name", "grpo.val_period"} | own.get(
            name, set()
        )


@needs_checkouts
@pytest.mark.parametrize("release", load_releases())
def test_what_is_read_of_a_drivers_events_bears_the_releases_names(release):
    """The names stand in the sources as literals or fields, but for those that the table says are not there."""
    text = "\n".join(path.read_text() for path in (Path(CHECKOUTS) / release / "nemo_rl").rglob("*.py"))
    names = {part for tag in (*NAMES["columns"], *NAMES["counts"]) for part in tag.split("/")[1:]}
    names |= {phase for phases in NAMES["phases"].values() for phase in phases}
    absent = {name for name in names if not re.search(rf"""["'/]{re.escape(name)}["'/]|\b{re.escape(name)}:""", text)}
    assert absent == set(MADE["not_logged"].get(release, []))
    assert "sleep(level=1)" in text and "sleep(level=2)" not in text, "trap 82"
    assert "prefix_cache_hits" not in text, "trap 84: a column would show more than the docs say"
