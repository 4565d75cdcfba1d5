"""A recipe is checked before anything runs: one line a mistake, with file, line, key and the nearest valid name."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from docs.schema import derived_files, schema_text
from scripts.backends.trl.algorithm import PACKAGES
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.recipe.resolve import config_text, resolve_stage, sync_configs
from scripts.recipe.strict import Strict
from scripts.recipe.yaml_file import pinned_versions, read_yaml
from tests.conftest import ROOT

TINY = ROOT / "config/recipes/tiny.yaml"


@pytest.fixture
def mistaken(tmp_path):
    """The message for the tiny recipe with one piece of text replaced."""

    def load(old: str, new: str) -> str:
        text = TINY.read_text()
        assert old in text
        path = tmp_path / "tiny.yaml"
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError) as error:
            load_recipe(path)
        return str(error.value).replace(str(tmp_path) + "/", "")

    return load


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TINY.read_text().splitlines(), 1) if text in line)


def test_the_tiny_recipe_is_valid_and_ordered_by_parents():
    recipe = load_recipe(TINY)
    assert recipe.stage_order() == ["sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]
    assert recipe.evaluation_blends() == ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]


def test_an_unknown_key_is_named_with_its_line_and_the_nearest(mistaken):
    message = mistaken("num_prompts_per_step: 16", "num_prompt_per_step: 16")
    where = f"tiny.yaml:{line_of('num_prompts_per_step: 16')}: "
    assert where + "stages.rlvr1.grpo.num_prompt_per_step: unknown key; did you mean num_prompts_per_step?" in message


def test_a_key_that_is_gone_is_refused_with_what_to_do_instead(tmp_path):
    class Inner(Strict):
        kept: int = 1
        gone: ClassVar[dict[str, str]] = {"old": "use kept"}

    class Inherits(Inner):
        gone: ClassVar[dict[str, str]] = {"older": "leave it out"}

    class Outer(Strict):
        inner: Inherits

    path = tmp_path / "outer.yaml"
    path.write_text("inner:\n  kept: 2\n  old: 3\n")
    with pytest.raises(UserError) as error:
        read_yaml(path).validate(Outer)
    assert str(error.value) == f"{path}:3: inner.old: is gone: use kept"
    path.write_text("inner:\n  older: 3\n")
    with pytest.raises(UserError, match=r":2: inner\.older: is gone: leave it out"):
        read_yaml(path).validate(Outer)


def test_a_wrong_type_is_named(mistaken):
    message = mistaken("max_num_steps: 600", "max_num_steps: many")
    assert f"tiny.yaml:{line_of('max_num_steps: 600')}: stages.sft.sft.max_num_steps: must be a whole number" in message


def test_a_step_to_keep_that_is_never_saved_is_named(mistaken):
    old = "{save_period: 4, keep_last_k: 2, keep_top_k: 1}"
    where = f"tiny.yaml:{line_of(old)}: stages.rlvr1.checkpointing.keep_steps: step 6 is no multiple of save_period 4"
    assert where in mistaken(old, "{save_period: 4, keep_last_k: 2, keep_steps: [4, 6]}")


def test_a_missing_parent_is_named_with_the_nearest(mistaken):
    message = mistaken("parent: rlvr3", "parent: rlrv3")
    where = f"tiny.yaml:{line_of('swe1: {algorithm')}: stages.swe1.parent: "
    assert message.startswith(where) and message.endswith("no stage is named rlrv3; did you mean rlvr3?")


def test_a_cycle_is_named_stage_by_stage(mistaken):
    message = mistaken("rlvr1: {algorithm: grpo, parent: sft,", "rlvr1: {algorithm: grpo, parent: rlvr2,")
    assert "stages: the stages start from each other: " in message
    assert "rlvr1" in message and "rlvr2" in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("blend: rlvr2}", "blend: rlvr22}", "stages.rlvr2.blend: no blend is named rlvr22; did you mean rlvr"),
        ("algorithm: grpo, parent: sft", "algorithm: grop, parent: sft", "'grop' is not known; did you mean grpo?"),
        ("- mcqa_simple_agent", "- mcqa_agent", "'mcqa_agent' is not known; did you mean mcqa_simple_agent?"),
        (
            "stages:\n  sft: {",
            "stages:\n  sft: {backend: tlr, ",
            "stages.sft.backend: 'tlr' is not known; did you mean trl?",
        ),
        ("blend: sft, sft:", "blend: rlvr1, sft:", "sft trains on demonstrations, but blend rlvr1 holds prompts"),
        ("seed: 1\n", "seed: 1\nseed: 2\n", "key seed stands twice"),
        ("max_new_tokens: 32\n", "max_new_tokens: 32\n  blends: [sft]\n", "no blend of prompts is named sft"),
        ("  rlhf:\n    algorithm", "  logs:\n    algorithm", "stages.logs: the results folder has a logs/ of its own"),
        ("name: tiny", "name: [tiny", "not valid YAML"),
        (
            "rlvr1: {algorithm: grpo,",
            "rlvr1: {algorithm: grpo, policy: {train_global_batch_size: 48},",
            "train_global_batch_size is 48, but num_prompts_per_step x num_generations_per_prompt = 256 is no multiple",
        ),
        (
            "{metric: held_out_change, min: -0.1, action: stop}",
            "{metric: held_out_change}",
            "a criterion needs min or max",
        ),
    ],
)
def test_each_other_mistake_is_one_clear_message(mistaken, old, new, expected):
    message = mistaken(old, new)
    assert expected in message
    assert message.startswith("tiny.yaml:")


def test_a_missing_recipe_names_the_nearest_file():
    with pytest.raises(UserError, match=r"tinny.yaml: no such file; did you mean tiny.yaml\?"):
        load_recipe(TINY.with_name("tinny.yaml"))


def test_config_and_site_are_checked_too(tmp_path):
    with pytest.raises(UserError, match=r"recipes: unknown key; did you mean recipe\?"):
        parse_config({"recipes": "a", "recipe": "b", "site": "c"})
    site = tmp_path / "site.yaml"
    site.write_text("name: here\nthread: 2\n")
    with pytest.raises(UserError, match=r"site.yaml:2: thread: unknown key; did you mean threads\?"):
        load_site(site, load_recipe(TINY))
    site.write_text("name: here\nthreads: 2\nstages:\n  rvlr1: {nodes: 2}\n")
    with pytest.raises(
        UserError, match=r"site.yaml:4: stages.rvlr1: the recipe has no such stage; did you mean rlvr1\?"
    ):
        load_site(site, load_recipe(TINY))


def test_a_stage_lies_over_the_defaults_of_its_algorithm():
    recipe = load_recipe(TINY)
    assert recipe.stages["rlhf"].loss_fn.reference_policy_kl_penalty == 1e-3
    assert recipe.stages["rlhf"].policy.optimizer.lr == recipe.stages["rlvr1"].policy.optimizer.lr == 2e-4


def test_two_stages_may_start_from_the_same_checkpoint(tmp_path):
    path = tmp_path / "branch.yaml"
    path.write_text(TINY.read_text() + "  other: {algorithm: grpo, parent: sft, blend: rlvr1}\n")
    order = load_recipe(path).stage_order()
    assert order.index("sft") < order.index("other")


def edited(tmp_path: Path, **changes: object) -> dict[str, dict[str, object]]:
    """The resolved configs of the tiny recipe with keys of stage rlvr1 set."""
    data = yaml.safe_load(TINY.read_text())
    data["stages"]["rlvr1"].update(changes)
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(data))
    recipe = load_recipe(path)
    return {name: resolve_stage(recipe, name).values() for name in recipe.stages}


@pytest.mark.parametrize(
    "harmless",
    [
        {"resources": {"nodes": 4, "runtime": 5, "mem_mb": 9}},
        {"checkpointing": {"save_period": 3}},
        {"gate": [{"metric": "max_kl", "max": 1}]},
        {"parent": "rlvr2", "blend": "rlvr2"} | {"parent": "sft"},
    ],
)
def test_what_changes_no_weight_is_not_in_the_resolved_config(tmp_path, harmless):
    assert edited(tmp_path, **harmless)["rlvr1"] == edited(tmp_path)["rlvr1"]


def test_what_may_change_weights_is_in_the_config_of_that_stage_alone(tmp_path):
    before, after = edited(tmp_path), edited(tmp_path, seed=5)
    assert {name for name in before if before[name] != after[name]} == {"rlvr1"}
    assert before["rlvr1"]["release"] == pinned_versions("trl", PACKAGES)
    assert "model" in before["sft"] and "model" not in before["rlvr1"]


def test_configs_are_written_only_where_they_differ(tmp_path):
    recipe = load_recipe(TINY)
    assert sync_configs(recipe, tmp_path) == list(recipe.stages)
    stamp = (tmp_path / "rlhf/config.yaml").stat().st_mtime_ns
    assert sync_configs(recipe, tmp_path) == []
    (tmp_path / "swe1/config.yaml").write_text("changed")
    assert sync_configs(recipe, tmp_path) == ["swe1"]
    assert (tmp_path / "rlhf/config.yaml").stat().st_mtime_ns == stamp
    assert (tmp_path / "swe1/config.yaml").read_text() == config_text(resolve_stage(recipe, "swe1").values())


def test_schemas_for_editors_and_conda_environments_are_in_step():
    for path, text in derived_files().items():
        assert path.read_text() == text, f"{path.name} is not what the models and pins say; run: make schema"


NANO = TINY.with_name("tiny-nano.yaml")
OMNI = TINY.with_name("tiny-omni.yaml")


def test_the_other_tiny_recipes_are_valid_chains():
    assert load_recipe(NANO).stage_order() == ["sft", "rlvr", "rlhf", "dpo"]
    assert load_recipe(OMNI).stage_order() == ["sft", "mpo", "text", "vision"]
    assert resolve_stage(load_recipe(NANO), "dpo").values()["dpo"] == {
        "max_num_steps": 40,
        "reference_policy_kl_penalty": 0.05,
        "preference_loss_weight": 1.0,
        "sft_loss_weight": 0.2,
        "preference_average_log_probs": False,
    }


@pytest.mark.parametrize(
    ("recipe", "old", "new", "expected"),
    [
        (
            NANO,
            "parent: rlhf\n    blend: dpo",
            "blend: dpo",
            "dpo departs from a reference, which a fresh model is not",
        ),
        (
            NANO,
            "blend: dpo\n    dpo:",
            "blend: rlvr\n    dpo:",
            "dpo trains on preferences, but blend rlvr holds prompts",
        ),
        (NANO, "sft_loss_weight: 0.2", "bco_loss_weight: 0.2", "bco_loss_weight: unknown key"),
        (
            NANO,
            "preference_loss_weight: 1.0, sft_loss_weight: 0.2",
            "preference_loss_weight: 0",
            "nothing would be learnt",
        ),
        (OMNI, "bco_loss_weight: 0.2", "reward_shift_momentum: 0.99", "reward_shift_momentum: unknown key"),
        (OMNI, ", token_level_loss: false", "", "sequence_level_importance_ratios is for token_level_loss: false"),
        (
            OMNI,
            "token_level_loss: false",
            "token_level_loss: false, ratio_clip_c: 1.2",
            "greater than 1 + ratio_clip_max",
        ),
        (OMNI, "token_level_loss: false", "use_on_policy_kl_approximation: true", "unknown key"),
        (OMNI, "train_global_batch_size: 64,", "train_global_batch_size: 48,", "256 is no multiple of it"),
        (NANO, "  rlhf: {rows: 300,", "  rlhf: {rows: 300, pictures: 0.5,", "the model has no vision"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(tmp_path, recipe, old, new, expected):
    text, path = recipe.read_text(), tmp_path / recipe.name
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        load_recipe(path)
    assert expected in str(error.value) and str(error.value).startswith(f"{path}:")


def test_the_shipped_files_obey_their_schemas():
    from jsonschema import Draft202012Validator

    for name, path in (
        ("recipe", TINY),
        ("recipe", NANO),
        ("recipe", OMNI),
        ("site", ROOT / "config/sites/laptop.yaml"),
        ("config", ROOT / "config/config.yaml"),
    ):
        Draft202012Validator(json.loads(schema_text(name))).validate(yaml.safe_load(path.read_text()))


def test_every_environment_of_the_recipe_room_has_a_verifier():
    from demo.tasks import FAMILIES
    from scripts.rewards.registry import SPECS

    assert {name for name, spec in SPECS.items() if spec.verify} == set(Environment) >= set(FAMILIES)


def test_defaults_are_laid_under_the_stages_of_their_backend_alone(tmp_path):
    data = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    grpo = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    policy = {"train_global_batch_size": 4, "max_total_sequence_length": 64}
    data["stages"]["large"] = {
        **{"algorithm": "grpo", "backend": "nemo_rl", "reward": "verifier", "parent": "sft", "blend": "rlvr1"},
        **{"config": "grpo.yaml", "cluster": {"num_nodes": 1}, "grpo": grpo, "policy": policy},
    }
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(data | {"release": "v0.7.0"}))
    recipe = load_recipe(path)
    assert recipe.stages["large"].grpo == grpo and recipe.stages["rlvr1"].grpo.max_num_steps == 3


def test_a_test_split_needs_test_rows_and_one_thing_to_score_on_them(mistaken, tmp_path):
    asked = "max_new_tokens: 32\n  test: true"
    message = mistaken("max_new_tokens: 32\n\ndefaults", asked + "\n\ndefaults")
    where = "evaluation.test: no blend that is scored has test rows; give one of rlvr1, rlvr2, rlvr3, swe1, swe2, rlhf"
    assert where in message
    text = TINY.read_text().replace("rlvr2: {rows: 700,", "rlvr2: {rows: 700, test: 50,")
    path = tmp_path / "tested.yaml"
    path.write_text(text.replace("max_new_tokens: 32\n\ndefaults", asked + "\n\ndefaults"))
    recipe = load_recipe(path)
    assert recipe.evaluation.tested_blends(recipe) == ["rlvr2"]
    assert recipe.evaluation.tested_stages(recipe) == ["rlhf"]
    swept = path.read_text().rstrip() + "\n    sweep: {seed: [1, 2]}\n"
    path.write_text(swept)
    with pytest.raises(UserError, match=r"evaluation\.test: the chain ends in variants; say best"):
        load_recipe(path)
    path.write_text(swept + "    best: held_out_mean\n")
    recipe = load_recipe(path)
    assert recipe.evaluation.tested_stages(recipe) == ["rlhf.best-held_out_mean"]
    path.write_text(swept.replace("max_new_tokens: 32\n  test", "tasks: [gsm8k]\n  test"))
    with pytest.raises(UserError, match=r"evaluation\.test: scores held-out rows; say max_new_tokens too"):
        load_recipe(path)
