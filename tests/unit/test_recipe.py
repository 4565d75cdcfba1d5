"""A recipe is checked before anything runs: one line a mistake, with file, line, key and the nearest valid name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from docs.schema import derived_files, schema_text
from scripts.backends.trl.algorithm import PACKAGES
from scripts.errors import UserError
from scripts.recipe.effect import Effect
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe, load_site, parse_config
from scripts.recipe.recipe import STAGES
from scripts.recipe.resolve import config_text, resolve_stage, sync_configs, training_config
from scripts.recipe.strict import Strict
from scripts.recipe.yaml_file import pinned_versions, read_yaml
from tests.cases import cases
from tests.conftest import ROOT

TINY = ROOT / "config/recipes/tiny.yaml"
SHIPPED = sorted(path for kind in ("recipes", "sites") for path in (ROOT / "config" / kind).glob("*.yaml"))


def test_the_tiny_recipe_is_valid_and_ordered_by_parents():
    recipe = load_recipe(TINY)
    assert recipe.graph.stage_names == ["sft", "rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]
    assert [rows.name for rows in recipe.graph.scored_rows] == ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]


def test_a_name_that_no_file_can_have_is_refused(refused):
    longest = "".join(f"{number:04d}" for number in range(50))
    message = refused("tiny", ("  rlhf:\n    algorithm", f"  {longest}x:\n    algorithm"))
    assert "has 201 characters; a name has at most 200" in message


@cases("recipe.mistakes", "recipe", "old", "new", "says")
def test_a_mistake_is_one_clear_message_with_line_key_and_nearest_name(refused, recipe, old, new, says):
    message = refused(recipe, (old, new))
    assert message.startswith(f"{recipe}.yaml:") and says in message


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


def test_a_cycle_is_named_stage_by_stage(refused):
    message = refused("tiny", ("rlvr1: {algorithm: grpo, parent: sft,", "rlvr1: {algorithm: grpo, parent: rlvr2,"))
    assert "stages: the stages start from each other: " in message
    assert "rlvr1" in message and "rlvr2" in message


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


def test_mistakes_at_several_keys_are_a_line_each_and_of_one_key_one(tmp_path):
    with pytest.raises(UserError) as caught:
        parse_config({"recipe": "a", "site": "b", "seed": "x", "sample": 0, "compare": 3})
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["sample", "seed", "compare"]
    blends = {"file": {"a": 1}, "holdout": 1.5, "environment": {"mine": 0.7}}
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(TINY.read_text()) | {"blends": {"sft": blends}})
    )
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    keys = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert keys == [f"blends.sft.{key}" for key in ("file", "environment", "holdout")]


def test_a_stage_lies_over_the_defaults_of_its_algorithm():
    recipe = load_recipe(TINY)
    assert recipe.stages["rlhf"].loss_fn.reference_policy_kl_penalty == 1e-3
    assert recipe.stages["rlhf"].policy.optimizer.lr == recipe.stages["rlvr1"].policy.optimizer.lr == 2e-4


def test_two_stages_may_start_from_the_same_checkpoint(edited):
    swe1 = "  swe1: {algorithm: grpo, "
    order = edited("tiny", (swe1, f"  other: {{algorithm: grpo, parent: sft, blend: rlvr1}}\n{swe1}")).graph.stage_names
    assert order.index("sft") < order.index("other")


def resolved(tmp_path: Path, **changes: object) -> dict[str, dict[str, object]]:
    """The resolved configs of the tiny recipe with keys of stage rlvr1 set."""
    data = yaml.safe_load(TINY.read_text())
    data["stages"]["rlvr1"].update(changes)
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(data))
    recipe = load_recipe(path)
    return {name: resolve_stage(recipe, name).values() for name in recipe.stages}


def test_what_changes_no_weight_is_not_in_the_resolved_config(tmp_path):
    before = resolved(tmp_path)["rlvr1"]
    for harmless in (
        {"resources": {"nodes": 4, "runtime": 5, "mem_mb": "9G"}},
        {"checkpointing": {"save_period": 3}},
        {"gate": [{"metric": "max_kl", "max": 1}]},
    ):
        assert resolved(tmp_path, **harmless)["rlvr1"] == before, harmless


def test_what_may_change_weights_is_in_the_config_of_that_stage_alone(tmp_path):
    before, after = resolved(tmp_path), resolved(tmp_path, seed=5)
    assert {name for name in before if before[name] != after[name]} == {"rlvr1"}
    assert before["rlvr1"]["release"] == pinned_versions("trl", PACKAGES)
    assert "model" in before["sft"] and "model" not in before["rlvr1"]


def test_a_warm_up_starts_at_its_first_share_and_0_keeps_the_identity_of_earlier_configs(tmp_path):
    def optimizer(**says: object) -> dict[str, object]:
        return resolved(tmp_path, policy={"optimizer": {"lr": 2e-4} | says})["rlvr1"]["policy"]["optimizer"]

    assert optimizer() == optimizer(lr_warmup_init=1e-5), "without a warm-up it changes no weight"
    earlier = optimizer(lr_warmup_iters=4, lr_warmup_init=0.0)
    assert earlier == optimizer() | {"lr_warmup_iters": 4}
    assert optimizer(lr_warmup_iters=4) == earlier | {"lr_warmup_init": 5e-5}


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


def test_the_other_tiny_recipes_are_valid_chains():
    nano, omni = (load_recipe(TINY.with_name(f"tiny-{name}.yaml")) for name in ("nano", "omni"))
    assert nano.graph.stage_names == ["sft", "rlvr", "rlhf", "dpo"]
    assert omni.graph.stage_names == ["sft", "mpo", "text", "vision"]
    weights = {"preference_loss_weight": 1.0, "sft_loss_weight": 0.2, "preference_average_log_probs": False}
    dpo = {"max_num_steps": 40, "reference_policy_kl_penalty": 0.05} | weights
    assert resolve_stage(nano, "dpo").values()["dpo"] == dpo


@pytest.mark.parametrize("path", [*(ROOT / "config").glob("*.yaml"), *SHIPPED], ids=lambda path: path.stem)
def test_an_editor_finds_nothing_wrong_with_a_shipped_file(path):
    schema = path.parent.name.removesuffix("s")  # recipes, sites, config
    Draft202012Validator(json.loads(schema_text(schema))).validate(yaml.safe_load(path.read_text()))


def test_an_editor_and_the_recipe_take_a_choice_for_any_start(tmp_path):
    data = yaml.safe_load((ROOT / "config/recipes/tiny-rm.yaml").read_text())
    data["stages"]["rlhf"] |= {"parent": {"stage": "sft", "best": "held_out_mean", "checkpoint": [110, 220]}}
    data["stages"]["rlhf"] |= {"reward_model": {"stage": "rm", "checkpoint": 40}}
    Draft202012Validator(json.loads(schema_text("recipe"))).validate(data)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.checkpoints[recipe.stages["rlhf"].reward_model].step == 40


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


def test_a_test_split_needs_test_rows_and_one_thing_to_score_on_them(edited, refused):
    asked = "max_new_tokens: 32\n  test: true"
    rows = ("rlvr2: {rows: 700,", "rlvr2: {rows: 700, test: 50,")
    tested = (rows, ("max_new_tokens: 32\n\ndefaults", f"{asked}\n\ndefaults"))
    recipe = edited("tiny", *tested)
    assert [rows.name for rows in recipe.graph.tested_rows] == ["rlvr2"]
    assert [end.name for end in recipe.graph.ends] == ["rlhf"]
    last = "  rlhf:\n    algorithm: grpo\n"
    swept = (last, f"{last}    sweep: {{seed: [1, 2]}}\n")
    assert "evaluation.test: the chain ends in variants; say best" in refused("tiny", *tested, swept)
    recipe = edited("tiny", *tested, (last, f"{swept[1]}    best: held_out_mean\n"))
    assert [end.name for end in recipe.graph.ends] == ["rlhf.best-held_out_mean"]
    unscored = (asked, "tasks: [gsm8k]\n  test: true")
    assert "evaluation.test: scores held-out rows; say max_new_tokens too" in refused("tiny", *tested, unscored)


def test_the_settings_that_change_no_weight_are_these():
    """A setting is in the resolved config, and so in the identity, unless it is named here."""
    every = {"parent", "continues", "blend", "checkpointing", "resources", "gate", "default_gate", "quantize", "sweep"}
    every |= {"best", "max_truncated_share", "max_lost_share", "template_change"}
    placing = {"policy.train_micro_batch_size", "policy.dtensor_cfg"}
    sampling = placing | {"policy.generation.vllm_cfg"}
    measuring = ("val_period", "val_batches", "val_at_start", "val_at_end")
    more = {
        "grpo": sampling | {"gym_servers", "probe", "reward_model"},
        "distillation": sampling | {"teachers"},
        "merge": set(),
    }
    for algorithm, settings in STAGES["trl"].items():
        offline = placing | {f"{algorithm}.{name}" for name in measuring}
        assert {*without_effect(settings)} == every | more.get(algorithm, offline), algorithm
    for algorithm, settings in STAGES["nemo_rl"].items():
        judges = {f"judges.{name}" for name in ("replicas", "nodes_per_replica", "environment", "address")}
        own = {"cluster", "image", "launcher", "logger", "teachers"}
        assert {*without_effect(settings)} == every | own | judges, algorithm


def without_effect(settings: type[Strict]) -> Iterator[str]:
    """The settings, by dotted key, that a resolved config lacks."""
    for name, field in settings.model_fields.items():
        if settings.effects.get(name) is Effect.NONE:
            yield name
            continue
        parts = [field.annotation, *get_args(field.annotation)]
        for section in parts:
            if isinstance(section, type) and issubclass(section, Strict):
                yield from (f"{name}.{inner}" for inner in without_effect(section))


def test_facts_are_of_resolved_configs_and_none_of_a_recipe():
    loaded = load_recipe(ROOT / "config/recipes/tiny.yaml")
    stage = loaded.stages["sft"]
    assert stage.release == {}
    with pytest.raises(ValidationError, match="unknown key"):
        type(stage).model_validate({"algorithm": "sft", "release": {}})
    resolved = resolve_stage(loaded, "sft")
    assert type(resolved) is type(stage)
    assert training_config(resolved.values()) == resolved
    for name in ("release", "seed"):
        with pytest.raises(ValidationError, match="is missing"):
            training_config({key: value for key, value in resolved.values().items() if key != name})
