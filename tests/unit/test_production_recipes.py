"""The recipes that NeMo-RL trains: nodes, batches, order, and that what does not fit is refused with its rule."""

import json
import re

import pytest
import yaml
from jsonschema import Draft202012Validator

from docs.schema import schema_text
from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.upstream import any_launch
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.yaml_file import leaves
from tests.cases import cases
from tests.conftest import ROOT
from tests.production import stages_of, whole_recipe

NAMES = (
    "super3",
    "super3-1.7b",
    "super3-b200",
    "super3-small",
    "nano3",
    "omni3",
    "lora-8b",
    "lora-8b-megatron",
    "steps-dpo",
    "steps-rlvr",
    "steps-rlhf",
    "steps-dpo-tiny",
    "steps-rlvr-tiny",
    "steps-rlhf-tiny",
)
SUPER_ORDER = ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]


def recipe_of(name: str) -> Recipe:
    return load_recipe(ROOT / f"config/recipes/{name}.yaml")


def whole_recipe_of(name: str) -> Recipe:
    return whole_recipe(ROOT / f"config/recipes/{name}.yaml")


@pytest.fixture
def refused(tmp_path):
    """The message, without the file's folder and line, for a shipped recipe with a piece of text replaced."""

    def load(name: str, old: str, new: str) -> str:
        text = (ROOT / f"config/recipes/{name}.yaml").read_text()
        assert old in text
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError) as error:
            load_recipe(path)
        return re.sub(r"\.yaml:\d+", ".yaml", str(error.value).replace(f"{tmp_path}/", ""))

    return load


def test_these_are_all_recipes_of_nemo_rl():
    assert sorted(NAMES) == sorted(
        path.stem for path in (ROOT / "config/recipes").glob("*.yaml") if load_recipe(path).release
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_editor_finds_nothing_wrong_with_it(name):
    recipe = yaml.safe_load((ROOT / f"config/recipes/{name}.yaml").read_text())
    Draft202012Validator(json.loads(schema_text("recipe"))).validate(recipe)


@cases("production_recipes.nodes", "name", "nodes")
def test_slurm_is_asked_for_the_nodes_that_the_release_means(name, nodes):
    assert {name: stage.resources.nodes for name, stage in whole_recipe_of(name).stages.items()} == nodes


@pytest.mark.parametrize(
    ("name", "training"),
    [("super3", [32] * 6), ("super3-b200", [32] * 6), ("super3-small", [8, 8, 8, 16, 16, 16])],
)
def test_what_neither_generates_nor_judges_trains(name, training):
    recipe = recipe_of(name)
    within = "judges_within_num_nodes" in release_of(recipe.release).can
    clusters = [stage.cluster for stage in recipe.stages.values()]
    assert [
        cluster.num_nodes - cluster.generation_nodes - within * cluster.judge_nodes for cluster in clusters
    ] == training


@pytest.mark.parametrize("name", NAMES)
def test_batches_add_up_and_divide_among_the_training_gpus(name):
    recipe = whole_recipe_of(name)
    within = "judges_within_num_nodes" in release_of(recipe.release).can
    for stage_name, stage in stages_of(recipe).items():
        batch = stage.policy["train_global_batch_size"]
        if stage.algorithm == "grpo":
            product = stage.grpo["num_prompts_per_step"] * stage.grpo["num_generations_per_prompt"]
            updates = 4 if stage_name == "vision" else 1
            assert product == updates * batch, stage_name
        if "megatron_cfg" not in stage.policy:
            continue
        parallel = {"pipeline_model_parallel_size": 1} | stage.policy["megatron_cfg"]
        nodes = stage.cluster.num_nodes - stage.cluster.generation_nodes - within * stage.cluster.judge_nodes
        ways = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        group = parallel[ways[0]] * parallel[ways[1]] * parallel[ways[2]]
        replicas, rest = divmod(nodes * 8, group)
        assert rest == 0, f"{stage_name}: {nodes * 8} GPUs for groups of {group}"
        assert batch % replicas == 0, f"{stage_name}: {batch} for {replicas} replicas"
        assert nodes * 8 // parallel["pipeline_model_parallel_size"] % parallel["expert_model_parallel_size"] == 0


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


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("super3", SUPER_ORDER),
        ("super3-b200", SUPER_ORDER),
        ("super3-small", SUPER_ORDER),
        ("super3-1.7b", ["rlvr", "swe1", "rlhf"]),
        ("nano3", ["rlvr", "rlhf", "dpo"]),
        ("omni3", ["mpo", "text", "vision"]),
    ],
)
def test_stages_follow_each_other_in_the_published_order(name, order):
    recipe = recipe_of(name)
    assert recipe.stage_order() == order
    assert [recipe.stages[stage].parent for stage in order] == [None, *order[:-1]]
    if recipe.left_out:
        whole = whole_recipe_of(name)
        assert whole.stage_order() == ["sft", *order] and whole.stages[order[0]].parent == "sft"


@pytest.mark.parametrize("name", NAMES)
def test_images_are_the_releases_own(name):
    recipe = recipe_of(name)
    images = release_of(recipe.release).images
    assert {stage.image for stage in recipe.stages.values()} <= images.keys()
    assert all("sandbox" in images for stage in recipe.stages.values() if stage.sandbox)


def test_the_swe_stages_on_b200_run_in_their_own_image_and_no_prediction_head_is_used():
    stages = recipe_of("super3-b200").stages
    assert {name for name, stage in stages.items() if stage.image == "swe"} == {"swe1", "swe2"}
    assert {stage.policy["megatron_cfg"]["mtp_num_layers"] for stage in stages.values()} == {0}


def test_swe2_on_b200_gets_the_time_that_its_config_reckons_with():
    runtimes = {name: stage.resources.runtime for name, stage in recipe_of("super3-b200").stages.items()}
    assert runtimes == dict.fromkeys(SUPER_ORDER, 240) | {"swe2": 720}


def test_nano_has_the_published_hyper_parameters():
    recipe = recipe_of("nano3")
    rlvr, rlhf, dpo = recipe.stages.values()
    for stage in (rlvr, rlhf):
        assert (stage.grpo["num_prompts_per_step"], stage.grpo["num_generations_per_prompt"]) == (128, 16)
        assert stage.policy["max_total_sequence_length"] == 49152
        assert stage.policy["megatron_cfg"]["optimizer"]["lr"] == 3e-6
        assert not stage.is_asynchronous
    server = rlhf.env["nemo_gym"]["genrm_compare_resources_server"]["resources_servers"]["genrm_compare"]
    assert (server["reasoning_bonus"], server["answer_bonus"]) == (0.5, 0.5)
    assert dpo.policy["optimizer"]["kwargs"]["lr"] == 3e-6
    assert (dpo.policy["train_global_batch_size"], dpo.max_num_steps) == (128, 50)
    assert (dpo.dpo["sft_loss_weight"], dpo.dpo["reference_policy_kl_penalty"]) == (0.2, 0.05)
    assert {blend.holdout for blend in whole_recipe_of("nano3").blends.values()} == {1000}


@pytest.mark.parametrize(("name", "nodes"), [("super3", 32), ("super3-small", 8)])
def test_the_sft_of_super_has_the_reports_figures_and_the_parallelism_of_its_rl(name, nodes):
    sft, rlvr = (whole_recipe_of(name).stages[stage] for stage in ("sft", "rlvr1"))
    megatron, groups = sft.policy["megatron_cfg"], ("tensor_model", "context", "expert_model", "expert_tensor")
    assert (sft.policy["train_global_batch_size"], megatron["optimizer"]["lr"], sft.cluster.num_nodes) == (
        64,
        1e-5,
        nodes,
    )
    assert 30_000 / 64 <= megatron["scheduler"]["lr_warmup_iters"] < 30_000 / 64 + 1
    for group in groups:
        assert megatron[f"{group}_parallel_size"] == rlvr.policy["megatron_cfg"][f"{group}_parallel_size"]
    assert (
        megatron["enabled"] and sft.policy["sequence_packing"]["enabled"] and not sft.policy["dtensor_cfg"]["enabled"]
    )
    unit = 2 * megatron["context_parallel_size"] * megatron["tensor_model_parallel_size"]
    assert sft.policy["make_sequence_length_divisible_by"] == unit, "else v0.7.0's packing stops at its first step"


def test_the_sft_of_nano_is_the_releases_config_and_leaves_what_a_converter_reads():
    sft = whole_recipe_of("nano3").stages["sft"]
    assert (sft.policy["train_global_batch_size"], sft.policy["max_total_sequence_length"]) == (16, 2048)
    assert sft.policy["optimizer"]["kwargs"]["lr"] == 1.5e-5
    assert "++checkpointing.model_save_format=torch_save" in sft.overrides


def test_the_rung_of_1_7_billion_may_begin_with_the_other_backend():
    whole, rest = whole_recipe_of("super3-1.7b"), recipe_of("super3-1.7b")
    assert [stage.backend for stage in whole.stages.values()] == ["trl", "nemo_rl", "nemo_rl", "nemo_rl"]
    assert whole.stages["sft"].starts_from_export(whole) and whole.stages["rlvr"].parent == "sft"
    assert resolve_stage(rest, "rlvr").model.name == "Qwen/Qwen3-1.7B" and resolve_stage(whole, "rlvr").model is None
    assert rest.blends.keys() == {"rlvr", "swe1", "rlhf"}, "its SFT's data are not fetched"


@pytest.mark.parametrize("name", ["super3", "super3-small", "nano3"])
def test_demonstrations_are_tokenized_in_the_models_own_template_with_the_reasoning_of_every_turn(name):
    sft = whole_recipe_of(name).stages["sft"]
    told = hydra_overrides(any_launch("sft", whole_recipe_of(name), ROOT))
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
    assert {name: blend.source and blend.source.repository for name, blend in omni.items()} == {
        "mpo": "OpenGVLab/MMPR",
        "text": None,
        "vision": "OpenGVLab/MMPR-Tiny",
    }
    assert recipe_of("omni3").source == nano["rlvr"].source
    assert (omni["mpo"].format, omni["text"].format, omni["vision"].format) == ("mmpr", "jsonl", "mmpr_tiny")
    assert {name: blend.holdout for name, blend in omni.items()} == {"mpo": 2000, "text": 1000, "vision": 500}


def test_judges_get_their_nodes_where_the_release_has_no_key_for_them():
    told = hydra_overrides(any_launch("rlhf", recipe_of("steps-rlhf"), ROOT))
    assert "cluster.num_nodes=1" in told
    assert not any("num_gpu_nodes" in override for override in told)


UNFIT = (
    "static preference pairs are for dpo or mpo; a deterministic check (verifier) or a judge is for grpo; sft has none"
)
REFUSED = r"""
steps-rlvr | reward: verifier => reward: pairs | steps-rlvr.yaml: stages.rlvr: grpo does not fit a reward from pairs: UNFIT
steps-dpo | reward: pairs => reward: verifier | steps-dpo.yaml: stages.dpo: dpo does not fit a reward from verifier: UNFIT
omni3 | algorithm: mpo\n    reward: pairs => algorithm: mpo\n    reward: judge | omni3.yaml: stages.mpo: mpo does not fit a reward from judge: UNFIT
steps-dpo |   dpo: {kind: preferences} =>   dpo: {} | steps-dpo.yaml: stages.dpo.blend: dpo trains on preferences, but blend dpo holds prompts
omni3 |     kind: preferences\n =>  | omni3.yaml: blends.mpo: mmpr holds preferences: set kind
omni3 |     format: mmpr_tiny\n =>     kind: preferences\n    format: mmpr_tiny\n | omni3.yaml: blends.vision: mmpr_tiny holds prompts: set kind
omni3 | holdout: 2000 # => holdout: 200 # | omni3.yaml: blends.mpo: mmpr is split by NeMo-RL itself: holdout must be 2000, and test left out
omni3 | holdout: 500 # => holdout: 0.1 # | omni3.yaml: blends.vision: mmpr_tiny is split by NeMo-RL itself: holdout must be the stage's data.val_size, and test left out
omni3 | holdout: 500 # => holdout: 400 # | omni3.yaml: stages.vision.data.val_size: must be the holdout of blend vision, 400
steps-rlvr |   rlvr: {} =>   rlvr: {kind: preferences} | steps-rlvr.yaml: stages.rlvr.blend: grpo trains on prompts, but blend rlvr holds preferences
steps-rlvr | train_global_batch_size: 128 => train_global_batch_size: 32 | steps-rlvr.yaml: stages.rlvr: loss_fn.force_on_policy_ratio wants policy.train_global_batch_size (32) to be grpo.num_prompts_per_step x num_generations_per_prompt = 128
nano3 | train_global_batch_size: 2048 => train_global_batch_size: 2000 | nano3.yaml: stages.rlvr: grpo.num_prompts_per_step x num_generations_per_prompt = 2048 is no multiple of policy.train_global_batch_size, 2000\n  nano3.yaml: stages.rlhf: loss_fn.force_on_policy_ratio wants policy.train_global_batch_size (2000) to be grpo.num_prompts_per_step x num_generations_per_prompt = 2048
steps-rlvr | resources: { => resources: {nodes: 4,  | steps-rlvr.yaml: stages.rlvr: resources.nodes follows from cluster here; leave it out
super3-b200 | {num_nodes: 64, generation_nodes: 32} => {num_nodes: 64, generation_nodes: 64} | super3-b200.yaml: stages.swe1: cluster.generation_nodes leaves no node to train on
nano3 | release: v0.7.0 => release: v0.7.1 | envs/nemo-rl.yaml: no release is named v0.7.1; did you mean v0.7.0?
super3-small | launcher: super => launcher: supper | super3-small.yaml: stages.rlvr1.launcher: v0.7.0 has no launcher supper; did you mean super?
steps-dpo |       max_total_sequence_length: 4096\n =>  | steps-dpo.yaml: stages.dpo: policy.max_total_sequence_length must be stated
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_does_not_fit_is_refused_with_the_rule(refused, case):
    name, edit, expected = case.replace("\\n", "\n").split(" | ")
    assert refused(name, *edit.split(" => ")) == expected.replace("UNFIT", UNFIT)
