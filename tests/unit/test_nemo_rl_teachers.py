"""Distillation and reward models by NeMo-RL: what a recipe may say, what the driver is told, what is exported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from scripts.backends.nemo_rl.checks.context import StageContext, load_upstream
from scripts.backends.nemo_rl.checks.places import any_launch, unknown_keys
from scripts.backends.nemo_rl.checks.silent import check_formats
from scripts.backends.nemo_rl.command import driver_command, hydra_overrides
from scripts.backends.nemo_rl.export import name_head
from scripts.backends.nemo_rl.loops import LOOPS
from scripts.backends.nemo_rl.releases import OPD, load_releases, release_of
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.backends.nemo_rl.train import launch_of
from scripts.backends.protocol import StopRequest, TrainingJob
from scripts.errors import UserError
from scripts.files import write_json
from scripts.model.hugging_face import check_model
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.stage.stage import Stage
from tests.cases import cases, tables_of
from tests.conftest import ROOT
from tests.production import CHECKOUTS, needs_checkouts, recipe_of

MADE = tables_of("nemo_rl_teachers")
OPD_SECTION = "on_policy_distillation"


@pytest.fixture
def made(tmp_path):
    """A recipe of a student with two teachers; `changes` to the student's stage, None for a key to be left out."""

    def load(release: str = "v0.7.0", **changes: object) -> Recipe:
        stages = dict(MADE["stages"])
        student = stages["student"] | changes
        stages["student"] = {key: value for key, value in student.items() if value is not None}
        path = tmp_path / "made.yaml"
        path.write_text(yaml.safe_dump(MADE["recipe"] | {"release": release, "stages": stages}))
        return load_recipe(path)

    return load


def resolved(config: dict, overrides: list[str]) -> dict:
    """A config with overrides, by Hydra's own parser and OmegaConf."""
    laid = OmegaConf.create(config)
    OmegaConf.set_struct(laid, True)
    ConfigLoaderImpl._apply_overrides_to_config(overrides=OverridesParser.create().parse_overrides(overrides), cfg=laid)
    return OmegaConf.to_container(laid)


@cases("nemo_rl_teachers.refused", "changes", "says")
def test_what_does_not_fit_is_refused_with_the_key_and_the_remedy(made, changes, says):
    with pytest.raises(UserError) as refused:
        made(**changes)
    assert says in str(refused.value)


def test_each_environment_reaches_its_teacher_by_name_and_no_other_does(made):
    launch = any_launch("student", made(), Path("/none"))
    told = hydra_overrides(replace(launch, environments=("math", "chat", "code")))
    theirs = {"teacher_model_by_agent_name": {"default_teacher": "Qwen/Qwen3-1.7B"}, "default_teacher_alias": "x"}
    own = [text for text in told if OPD_SECTION in text or "adv_estimator" in text]
    theirs["non_colocated_teachers"] = {"default_teacher_cfg": {"tensor_model_parallel_size": 1, "num_nodes": 9}}
    config = resolved({OPD_SECTION: theirs, "grpo": {}}, own)
    opd = config[OPD_SECTION]
    assert opd["teacher_model_by_agent_name"] == dict.fromkeys(["math", "code"], "/teachers/solver") | {
        "chat": "/teachers/talker"
    }
    assert opd["strict_agent_name_match"] is opd["enabled"] is opd["deduplicate_shared_teacher_checkpoints"] is True
    assert opd["non_colocated_teachers"]["default_teacher_cfg"] == {"num_nodes": 2, "gpus_per_node": 8} | {
        "tensor_model_parallel_size": 4
    }
    assert config["grpo"]["adv_estimator"] == {"name": "opd"}
    assert "cluster.num_nodes=8" in told and not any(text.startswith("distillation.") for text in told)
    bare = resolved({"grpo": {}}, [text for text in own if text.startswith("++")])
    assert bare[OPD_SECTION]["teacher_model_by_agent_name"] == opd["teacher_model_by_agent_name"], "without teachers"


def test_the_same_start_in_two_roles_is_one_teacher_whose_nodes_are_asked_for_once(made):
    two = made().stages["student"]
    assert (two.nodes_of_teachers, two.resources.nodes) == (4, 8)
    one = made(teachers={"math": "solver", "rest": "solver"}).stages["student"]
    assert one.nodes_of_teachers == 2
    sole = made(teachers={"math": "solver"}, distillation={}).stages["student"]
    assert (sole.nodes_of_teachers, sole.teaching.role_of("chat", sole.teachers)) == (2, "math"), "as in backend trl"


def test_a_job_tells_the_driver_the_exports_of_its_roles_and_the_rows_environments(made, tmp_path):
    recipe, results = made(), tmp_path / "results"
    rows = {"sha256": "0", "rows": 100, "environments": {"math": 60, "code": 40}}
    write_json(results / "data/rows/manifest.json", {"train": rows, "validation": rows})
    for name in ("solver", "talker"):
        (results / name / "hf/model").mkdir(parents=True)
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    job = TrainingJob.of(Stage(recipe, results, "student"), max_num_steps=3, threads=1, stop=StopRequest())
    launch = launch_of(job, site)
    assert launch.teachers == {
        "math": str(results / "solver/hf/model"),
        "rest": str(results / "talker/hf/model"),
    }
    assert launch.environments == ("math", "code")
    text = driver_command(launch)
    for name in ("solver", "talker"):
        assert f"'{results}/{name}/hf/model'" in text or f" {results}/{name}/hf/model\n" in text, "its code is loaded"


def test_one_teacher_of_all_rows_is_told_by_the_teachers_own_section():
    recipe = recipe_of("distillation-qwen3-32b-to-4b")
    told = hydra_overrides(any_launch("distilled", recipe, Path("/none")))
    assert "teacher.model_name=/teachers/qwen3-32b" in told and "distillation.max_num_steps=1" in told
    assert not any(OPD_SECTION in text or "distillation.default" in text for text in told)
    stage = recipe.stages["distilled"]
    assert (stage.rows_per_step, stage.samples_per_step, stage.is_asynchronous) == (64, 64, False)


@pytest.fixture
def scored(tmp_path):
    """A recipe of a reward model."""
    blends = {"blends": {"pairs": {"kind": "preferences"}}}
    path = tmp_path / "made.yaml"
    path.write_text(yaml.safe_dump(MADE["recipe"] | blends | {"release": "v0.7.0", "stages": {"rm": MADE["reward"]}}))
    return load_recipe(path)


def test_a_reward_model_is_trained_on_pairs_in_the_starts_own_template(scored):
    told = hydra_overrides(any_launch("rm", scored, Path("/none")))
    assert "++policy.tokenizer.chat_template=default" in told, "rm.yaml has Llama's"
    assert {"rm.max_num_steps=1", "rm.val_period=16", "+data.train.data_path=/anywhere/data/train-split.jsonl"} < {
        *told
    }
    stage = scored.stages["rm"]
    assert (stage.kind, stage.rows_per_step, stage.planned_step(1300)) == ("preferences", 128, 10)


@needs_checkouts
@pytest.mark.parametrize("release", ["v0.6.0", "v0.7.0", "main", "super-v3"])
def test_a_reward_models_keys_are_those_of_each_release(scored, release):
    assert unknown_keys(scored.model_copy(update={"release": release}), Path(CHECKOUTS, release), "rm") == []


def test_routes_are_part_of_what_is_trained_and_earlier_stages_know_nothing_of_them(made):
    values = made().stages["student"].values_with_effect()
    assert values["distillation"] == MADE["stages"]["student"]["distillation"] and "teachers" not in values
    teacher = made().stages["solver"].values_with_effect()
    assert not {"distillation", "teacher", "rm", "on_policy_distillation"} & teacher.keys()


@pytest.mark.parametrize("release", load_releases())
@needs_checkouts
def test_a_release_lacks_the_programs_that_the_table_says(release):
    checkout = Path(CHECKOUTS, release)
    if not checkout.exists():
        pytest.skip("read in its documentation alone")
    names = {name for loop in LOOPS.values() for name in loop.drivers if name != "run_vlm_sft.py"}
    there = {path.name for path in checkout.glob("examples/**/run_*.py")}
    lacks = (names - there) | ({OPD} if not (checkout / "nemo_rl/algorithms" / OPD).exists() else set())
    assert lacks == {*release_of(release).lacks}


@needs_checkouts
@pytest.mark.parametrize(("name", "stage"), [("ultra3", "mopd"), ("omni3-mopd", "mopd")])
def test_published_routes_are_the_recipes(name, stage):
    recipe = recipe_of(name)
    settings: NemoRlSettings = recipe.stages[stage]
    theirs = load_upstream(Path(CHECKOUTS, recipe.release, settings.config))
    published = theirs[OPD_SECTION]["teacher_model_by_agent_name"]
    assert settings.distillation["of"].keys() == published.keys()
    if name == "ultra3":
        named = {agent: path.removeprefix("${_teachers.").rstrip("}") for agent, path in published.items()}
        assert settings.distillation["of"] == named


def test_a_teacher_of_another_vocabulary_is_refused_whatever_the_recipe_allows(made, tmp_path):
    recipe, results, words = made(template_change=True), tmp_path / "results", {"a": 0, "b": 1}
    folders = {
        "start": tmp_path / "start",
        "solver": results / "solver/hf/model",
        "talker": results / "talker/hf/model",
    }
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        vocabulary = words if name != "talker" else {"a": 1, "b": 0}
        Tokenizer(WordLevel(vocabulary, "a")).save(str(folder / "tokenizer.json"))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(folders["start"])})})
    stage, site = Stage(recipe, results, "student"), load_site(ROOT / "config/sites/h100.yaml", recipe)
    context = StageContext(**vars(runtime_of(recipe, "student", site)), stage=stage)
    (found,) = check_formats(context)
    assert (found.trap, found.stops) == (80, True)
    assert found.message.startswith(
        "teachers.rest reads otherwise than the student: the vocabulary (2 tokens, now 2; 'a' was 0"
    )


def test_a_converted_reward_model_is_loaded_with_its_head(tmp_path):
    """As converted: the tensors of NeMo-RL's model with one label, beside the config of the start."""
    config = LlamaConfig(
        **{"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_labels": 1},
        **{"num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    model, export, start = LlamaForSequenceClassification(config), tmp_path / "export", tmp_path / "start"
    model.save_pretrained(export)
    before = LlamaConfig(
        **(config.to_dict() | {"num_labels": 2, "pad_token_id": None, "architectures": ["LlamaForCausalLM"]})
    )
    for folder in (export, start):
        folder.mkdir(exist_ok=True)
        values = before.to_dict()
        (folder / "config.json").write_text(json.dumps({key: values[key] for key in values if values[key] is not None}))
        (folder / "tokenizer.json").write_text("{}")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "score.weight"}
    save_file(state | {"lm_head.weight": torch.zeros(8, 8)}, start / "model.safetensors")
    name_head(export)
    check_model(export, like=start)
    loaded = AutoModelForSequenceClassification.from_pretrained(export)
    tokens = torch.tensor([[1, 3, 4], [1, 5, 2]])
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits) and loaded.score.weight.shape == (1, 8)
    save_file(state, export / "model.safetensors")
    with pytest.raises(UserError, match=r"has no score\.weight, a reward model's head"):
        check_model(export, like=start)
