"""The recipes that NeMo-RL trains: nodes, batches, order, and that what does not fit is refused with its rule."""

import re
from functools import reduce

import pytest

from scripts.backends.nemo_rl.checks.places import any_launch
from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.loops import Rollouts
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.yaml_file import leaves
from tests.cases import cases
from tests.conftest import ROOT
from tests.production import GPUS, PRODUCTION, recipe_of, stages_of, whole_recipe


def nodes_to_train(recipe: Recipe, stage: NemoRlSettings) -> int:
    """The nodes of a stage that neither generate nor judge nor teach."""
    cluster, within = stage.cluster, "judges_within_num_nodes" in release_of(recipe.release).can
    teachers = cluster.teacher_nodes * len({*stage.teachers.values()})
    return cluster.num_nodes - cluster.generation_nodes - within * cluster.judge_nodes - teachers


@cases("production_recipes.nodes", "name", "nodes")
def test_slurm_is_asked_for_the_nodes_that_the_release_means(name, nodes):
    assert {name: stage.resources.nodes for name, stage in whole_recipe(name).stages.items()} == nodes


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("ultra3", [64, 64, 32, 32, 64, 64, 64]),
        ("omni3-mopd", [8, 8]),
        ("mopd-qwen3-1.7b", [1]),
        ("super3", [32] * 6),
        ("super3-b200", [32] * 6),
        ("super3-small", [8, 8, 8, 16, 16, 16]),
    ],
)
def test_what_neither_generates_nor_judges_trains(name, training):
    recipe = recipe_of(name)
    assert [nodes_to_train(recipe, stage) for stage in recipe.stages.values()] == training


@pytest.mark.parametrize("name", PRODUCTION)
def test_batches_add_up_and_divide_among_the_training_gpus(name):
    recipe, gpus = whole_recipe(name), GPUS.get(name, 8)
    for stage_name, stage in stages_of(recipe).items():
        batch = stage.policy["train_global_batch_size"]
        if isinstance(stage.loop, Rollouts):
            product = stage.section["num_prompts_per_step"] * stage.section["num_generations_per_prompt"]
            updates = 4 if stage_name == "vision" else 1
            assert product == updates * batch, stage_name
        if "megatron_cfg" not in stage.policy:
            continue
        parallel = {"pipeline_model_parallel_size": 1} | stage.policy["megatron_cfg"]
        nodes = nodes_to_train(recipe, stage)
        ways = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        group = parallel[ways[0]] * parallel[ways[1]] * parallel[ways[2]]
        replicas, rest = divmod(nodes * gpus, group)
        assert rest == 0, f"{stage_name}: {nodes * gpus} GPUs for groups of {group}"
        assert batch % replicas == 0, f"{stage_name}: {batch} for {replicas} replicas"
        assert nodes * gpus // parallel["pipeline_model_parallel_size"] % parallel["expert_model_parallel_size"] == 0


@pytest.mark.parametrize(("name", "stage"), [("nano3", "dpo"), ("steps-dpo", "dpo"), ("steps-dpo-tiny", "dpo")])
def test_every_gpu_of_a_dpo_stage_gets_as_many_pairs(name, stage):
    settings = recipe_of(name).stages[stage]
    gpus = settings.cluster.num_nodes * 8
    assert settings.policy["train_global_batch_size"] % gpus == 0
    assert settings.dpo.get("val_global_batch_size", 8) % gpus == 0, "8 is what dpo.yaml of NeMo-RL says"


@pytest.mark.parametrize("name", ["super3", "super3-1.7b", "super3-small", "nano3", "steps-rlhf", "steps-rlhf-tiny"])
def test_a_judge_compares_as_many_responses_as_a_prompt_gets(name):
    stage = recipe_of(name).stages["rlhf"]
    env = stage.env["nemo_gym"] | stage.add.get("env", {}).get("nemo_gym", {})
    server = env["genrm_compare_resources_server"]["resources_servers"]["genrm_compare"]
    assert server["num_rollouts_per_prompt"] == stage.grpo["num_generations_per_prompt"]


@cases("production_recipes.order", "name", "order")
def test_stages_follow_each_other_in_the_published_order(name, order):
    recipe = recipe_of(name)
    assert recipe.graph.stage_names == order
    assert [recipe.stages[stage].parent for stage in order] == [None, *order[:-1]]
    if recipe.left_out:
        whole = whole_recipe(name)
        assert whole.graph.stage_names == ["sft", *order] and whole.stages[order[0]].parent == "sft"


def test_ultras_teachers_stand_beside_each_other_and_teach_the_student_that_they_start_from():
    recipe = recipe_of("ultra3")
    starts = {name: [start.name for start in recipe.graph[name].starts] for name in recipe.graph.stage_names}
    student, teachers = "student_rlvr2", ["rlhf_teacher", "ifbench_teacher", "reasoning_teacher", "swe_teacher"]
    assert starts.pop("mopd") == [student, *teachers]
    assert starts == {"student_rlvr1": [], student: ["student_rlvr1"]} | {name: [student] for name in teachers}
    assert recipe.stages[student].continues == "student_rlvr1" and recipe.stages[student].max_num_steps == 128 + 50
    assert {blend.holdout for blend in recipe.blends.values()} == {100}
    assert all(stage.resources.nodes % 16 == 0 for stage in recipe.stages.values()), "segments of 16 nodes"


@pytest.mark.parametrize("name", PRODUCTION)
def test_images_are_the_releases_own(name):
    recipe = recipe_of(name)
    images = release_of(recipe.release).images
    assert {stage.image for stage in recipe.stages.values()} <= images.keys()
    assert all("sandbox" in images for stage in recipe.stages.values() if stage.sandbox)


def figure(stage: NemoRlSettings, key: str) -> object:
    """A setting by its dotted key."""
    return reduce(
        lambda found, part: found[part] if isinstance(found, dict) else getattr(found, part), key.split("."), stage
    )


@cases("production_recipes.figures", "name", "stages", "figures")
def test_a_stage_has_the_published_figures(name, stages, figures):
    recipe = whole_recipe(name)
    for stage in stages:
        assert {key: figure(recipe.stages[stage], key) for key in figures} == figures, stage


@pytest.mark.parametrize("name", ["super3", "super3-small"])
def test_the_sft_of_super_warms_up_as_reported_and_has_the_parallelism_of_its_rl(name):
    sft, rlvr = (whole_recipe(name).stages[stage].policy for stage in ("sft", "rlvr1"))
    megatron = sft["megatron_cfg"]
    assert 30_000 / 64 <= megatron["scheduler"]["lr_warmup_iters"] < 30_000 / 64 + 1
    for group in ("tensor_model", "context", "expert_model", "expert_tensor"):
        assert megatron[f"{group}_parallel_size"] == rlvr["megatron_cfg"][f"{group}_parallel_size"]
    assert megatron["enabled"] and sft["sequence_packing"]["enabled"] and not sft["dtensor_cfg"]["enabled"]
    unit = 2 * megatron["context_parallel_size"] * megatron["tensor_model_parallel_size"]
    assert sft["make_sequence_length_divisible_by"] == unit, "else v0.7.0's packing stops at its first step"


def test_the_sft_of_nano_leaves_what_a_converter_reads_and_every_blend_holds_rows_out():
    nano = whole_recipe("nano3")
    assert "++checkpointing.model_save_format=torch_save" in nano.stages["sft"].overrides
    assert {blend.holdout for blend in nano.blends.values()} == {1000}


def test_the_rung_of_1_7_billion_may_begin_with_the_other_backend():
    whole, rest = whole_recipe("super3-1.7b"), recipe_of("super3-1.7b")
    assert [stage.backend for stage in whole.stages.values()] == ["trl", "nemo_rl", "nemo_rl", "nemo_rl"]
    assert whole.graph["sft"].origin and whole.stages["rlvr"].parent == "sft"
    assert resolve_stage(rest, "rlvr").model.name == "Qwen/Qwen3-1.7B" and resolve_stage(whole, "rlvr").model is None
    assert rest.blends.keys() == {"rlvr", "swe1", "rlhf"}, "its SFT's data are not fetched"


@pytest.mark.parametrize("name", ["super3", "super3-small", "nano3"])
def test_demonstrations_are_tokenized_in_the_models_own_template_with_the_reasoning_of_every_turn(name):
    sft = whole_recipe(name).stages["sft"]
    told = hydra_overrides(any_launch("sft", whole_recipe(name), ROOT))
    assert "++policy.tokenizer.chat_template=default" in told and sft.chat_template is None
    assert sft.tokenizer["chat_template_kwargs"] == {"truncate_history_thinking": False}


@pytest.mark.parametrize("name", ["super3", "super3-b200", "super3-small", "nano3", "omni3"])
def test_a_model_whose_data_are_published_in_part_says_so(name):
    assert "so results differ from its report's" in recipe_of(name).note


@pytest.mark.parametrize("name", ["dpo", "rlvr", "rlhf"])
def test_a_tiny_step_differs_from_the_step_in_sizes_model_and_judge_alone(name):
    step, tiny = (
        dict(leaves(resolve_stage(recipe_of(recipe), name).values()))
        for recipe in (f"steps-{name}", f"steps-{name}-tiny")
    )
    differing = {key.rpartition(".")[2] for key in step.keys() | tiny.keys() if step.get(key) != tiny.get(key)}
    sizes = {"max_num_steps", "num_prompts_per_step", "num_generations_per_prompt", "train_global_batch_size"}
    sizes |= {"max_total_sequence_length", "max_new_tokens", "num_rollouts_per_prompt", "max_output_tokens"}
    validation = {"val_period", "val_batches", "val_global_batch_size", "val_at_start", "val_at_end"}
    warming_up = {"lr_decay_style", "min_lr", "lr_warmup_iters", "lr_warmup_init"}
    vllm = {"gpu_memory_utilization", "enforce_eager", "tensor_parallel_size", "max_model_len", "max_num_seqs"}
    judge = {"genrm_model_name", "model", "uses_reasoning_parser", "reasoning_parser"}
    assert differing <= sizes | validation | warming_up | vllm | judge | {"name"}


def test_a_stage_without_a_stated_end_trains_one_pass_over_its_rows():
    recipe = recipe_of("nano3")
    assert recipe.stages["rlvr"].planned_step(128 * 40 + 5) == 40
    assert recipe.stages["dpo"].planned_step(128 * 40) == 50
    omni = recipe_of("omni3")
    assert omni.stages["vision"].planned_step(512 * 7) == 7


def test_the_splits_reach_the_omni_stages_by_their_own_keys():
    recipe = recipe_of("omni3")
    told = {name: hydra_overrides(any_launch(name, recipe, ROOT)) for name in recipe.stages}
    assert "data.data_path=/anywhere/data/meta/meta_public.json" in told["mpo"]
    assert "data.train_jsonl_fpath=/anywhere/data/train-split.jsonl" in told["text"]
    assert "data.validation_jsonl_fpath=/anywhere/data/val-split.jsonl" in told["text"]
    assert "data.cache_dir=/anywhere/data" in told["vision"]
    for name in ("mpo", "vision"):
        assert not any("jsonl_fpath" in override for override in told[name]), "it has no such key"


def test_what_a_config_lacks_is_added_and_says_where_the_rows_are():
    recipe = recipe_of("steps-dpo")
    told = hydra_overrides(any_launch("dpo", recipe, ROOT))
    assert "+data.train.data_path=/anywhere/data/train-split.jsonl" in told
    assert not any(override.startswith("data.train.data_path=") for override in told)


def test_the_published_blends_come_from_the_hub_and_what_the_loaders_hold_out_is_said():
    nano, omni = recipe_of("nano3").blends, recipe_of("omni3").blends
    assert nano["rlvr"].source.repository == "nvidia/Nemotron-3-Nano-RL-Training-Blend"
    assert nano["rlvr"].published_files("rlvr") == {"rlvr.jsonl": "train.jsonl"}
    assert (nano["rlhf"].source, nano["dpo"].source) == (None, None), "nobody has published them"
    published = {name: blend.source and blend.source.repository for name, blend in omni.items()}
    assert published == {"mpo": "OpenGVLab/MMPR", "text": None, "vision": "OpenGVLab/MMPR-Tiny"}
    assert recipe_of("omni3").source == nano["rlvr"].source
    assert (omni["mpo"].format, omni["text"].format, omni["vision"].format) == ("mmpr", "jsonl", "mmpr_tiny")
    assert {name: blend.holdout for name, blend in omni.items()} == {"mpo": 2000, "text": 1000, "vision": 500}


def test_judges_get_their_nodes_where_the_release_has_no_key_for_them():
    told = hydra_overrides(any_launch("rlhf", recipe_of("steps-rlhf"), ROOT))
    assert "cluster.num_nodes=1" in told
    assert not any("num_gpu_nodes" in override for override in told)


@cases("production_recipes.refused", "name", "old", "new", "says")
def test_what_does_not_fit_is_refused_with_the_rule(refused, name, old, new, says):
    assert re.sub(r"\.yaml:(\d+|{line})", ".yaml", refused(name, (old, new))) == says
