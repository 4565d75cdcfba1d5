"""The driver's command: what NeMo-RL is told, and that every value comes through Hydra and two shells as it was."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from scripts.backends.nemo_rl.backend import BACKEND
from scripts.backends.nemo_rl.checks.places import any_launch
from scripts.backends.nemo_rl.command import (
    Launch,
    cluster_environment,
    driver_command,
    hydra_overrides,
    hydra_value,
    kept_checkpoints,
)
from scripts.backends.nemo_rl.releases import load_releases, release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.stage_settings import Checkpointing
from scripts.stage.stage import Stage
from tests.conftest import ROOT
from tests.production import CHECKOUTS, needs_checkouts, recipe_of

RECIPE = recipe_of("super3")
SITE = load_site(ROOT / "config/sites/h100.yaml", RECIPE)
WORDS = ("true", "null", "1e5", "007", "1_000", "a=b", "${x}", "\\${x}", "'", "\\'", "\\\\", "", "nan", "-", "$(id)")
ODD = st.text(alphabet="ab'\"\\${}[]=,:; \t#~+@/.-_0e1é%!*()&|<>`?\n", max_size=12) | st.sampled_from(WORDS)


def launch(stage: str = "rlvr1", **changes) -> Launch:
    """A start of one of the recipe's stages; `changes` to its settings."""
    settings = RECIPE.stages[stage].model_copy(update=changes)
    return Launch(
        runtime=Runtime(stage, settings, release_of("v0.7.0"), SITE),
        model="/lustre/models/sft",
        data=Path("/lustre/r/data/rlvr1"),
        run=Path("/lustre/r/rlvr1/run"),
        max_num_steps=50,
        seed=42,
    )


def parsed(value: str):
    """A value as Hydra's own parser and OmegaConf understand its text."""
    config = OmegaConf.create({"key": 1})
    OmegaConf.set_struct(config, True)
    overrides = OverridesParser.create().parse_overrides([f"key={value}"])
    ConfigLoaderImpl._apply_overrides_to_config(overrides=overrides, cfg=config)
    return OmegaConf.to_container(config, resolve=True)["key"]


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | ODD,
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    )
)
def test_hydra_reads_every_value_as_it_was(value):
    got = parsed(hydra_value(value))
    assert got == value
    assert type(got) is type(value)


@settings(max_examples=25, deadline=None)
@given(st.lists(ODD.filter(lambda text: "\0" not in text), min_size=1, max_size=4))
def test_every_value_survives_the_shells(values):
    start = launch(overrides=[f"+own.key{place}={hydra_value(value)}" for place, value in enumerate(values)])
    text = driver_command(start)
    shown = text[text.index("exec python") :].replace("exec python", "printf '%s\\0'", 1)
    words = subprocess.run(["bash", "-c", f"bash <<'E-O-F'\n{shown}E-O-F"], capture_output=True, check=True).stdout
    told = words.decode().split("\0")[:-1]
    assert told[-len(values) :] == start.runtime.settings.overrides, "the user's own come last"
    assert [parsed(word.partition("=")[2]) for word in told[-len(values) :]] == values


def test_the_recipes_settings_and_our_directories_reach_the_driver():
    told = hydra_overrides(launch())
    for override in (
        "++env.nemo_gym.skip_venv_if_present=true",
        "policy.model_name=/lustre/models/sft",
        "++policy.tokenizer.name=/lustre/models/sft",
        "checkpointing.checkpoint_dir=/lustre/r/rlvr1/run/checkpoints",
        "logger.tensorboard_enabled=true",
        "logger.wandb_enabled=false",
        "data.train.data_path=/lustre/r/data/rlvr1/train-split.jsonl",
        "grpo.num_prompts_per_step=256",
        "policy.train_global_batch_size=4096",
        "policy.megatron_cfg.optimizer.lr=3e-06",
        "cluster.num_nodes=176",
        "policy.generation.colocated.resources.num_nodes=144",
        "env.nemo_gym.num_gpu_nodes=7",
        "grpo.max_num_steps=50",
        "checkpointing.save_period=10",
        "checkpointing.keep_top_k=3",
        "checkpointing.metric_name=null",
    ):
        assert told.count(override) == 1, override
    keys = [override.split("=", 1)[0] for override in told]
    assert len(keys) == len(set(keys)), "no key is said twice"


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_rows_is_passed_on_by_its_name(shuffle):
    data = RECIPE.stages["rlvr1"].data | {"shuffle": shuffle}
    told = hydra_overrides(launch(data=data))
    assert [override for override in told if "shuffle" in override] == [f"data.shuffle={str(shuffle).lower()}"]


def test_all_checkpoints_are_kept_by_a_number_since_null_is_refused():
    everything = {"checkpointing.keep_top_k": 1_000_000}
    assert kept_checkpoints(Checkpointing(save_period=1)) == everything
    assert kept_checkpoints(Checkpointing(save_period=2, keep_last_k=1, keep_steps=[4])) == everything


def test_the_newest_are_kept_by_step_and_the_best_by_the_configs_metric():
    assert kept_checkpoints(Checkpointing(keep_last_k=2)) == {
        "checkpointing.keep_top_k": 2,
        "checkpointing.metric_name": None,
    }
    assert kept_checkpoints(Checkpointing(keep_last_k=1, keep_top_k=2)) == {"checkpointing.keep_top_k": 3}


def test_the_image_directory_is_told_where_asked_for():
    assert f"sif_dir={SITE.nemo_rl.sif}" in hydra_overrides(launch("swe2"))
    assert "sif_dir" not in " ".join(hydra_overrides(launch("swe1")))


def test_weights_and_biases_gets_the_sites_project_and_team():
    def told(**names: str) -> list[str]:
        site = SITE.model_copy(update={"nemo_rl": SITE.nemo_rl.model_copy(update=names)})
        start = launch()
        there = replace(start, runtime=replace(start.runtime, site=site))
        return [override for override in hydra_overrides(there) if "wandb" in override]

    assert told() == ["logger.wandb_enabled=false"]
    project = ["logger.wandb_enabled=true", "logger.wandb.name=rlvr1", "logger.wandb.project=super3"]
    assert told(wandb_project="super3") == project
    assert told(wandb_project="super3", wandb_entity="team") == [*project, "++logger.wandb.entity=team"]


def test_a_resume_that_ends_before_the_planned_step_goes_on_by_the_checkpoints_schedule():
    scheduler = "++policy.megatron_cfg.scheduler"
    resumed = hydra_overrides(replace(launch(), schedule_steps=80))
    assert "grpo.max_num_steps=50" in resumed
    assert f"{scheduler}.lr_decay_iters=80" in resumed
    assert f"{scheduler}.override_opt_param_scheduler=false" in resumed
    assert f"{scheduler}.use_checkpoint_opt_param_scheduler=true" in resumed
    assert not any("opt_param_scheduler" in override for override in hydra_overrides(launch()))


@pytest.mark.parametrize(
    ("left", "expected"), [(3 * 3600 + 125, "00:03:00:05"), (200_000, "02:07:31:20"), (-50, "00:00:00:01")]
)
def test_the_deadline_is_computed_when_the_driver_starts(left, expected):
    start = launch(overrides=["+last=1"])
    text = driver_command(replace(start, save_by=1_000_000.0 + left - 120.0)).replace("$(date +%s)", "1000000")
    program = text[text.index("left=") :].replace("exec python", "echo", 1)
    told = subprocess.run(["bash", "-euc", program], capture_output=True, text=True, check=True).stdout.split()
    assert told[-2:] == [f"checkpointing.checkpoint_must_save_by='{expected}'", "+last=1"]


def test_the_cluster_is_told_of_container_mounts_and_sandbox():
    told = cluster_environment(launch(), Path("/lustre/r/rlvr1/logs"), 96)
    assert told["DEDICATED_RAY_HEAD"] == "0", "also where the user's environment says otherwise"
    assert (told["CONTAINER"], told["CPUS_PER_WORKER"]) == (SITE.nemo_rl.images["train"], "96")
    assert told["SANDBOX_CONTAINER"] == SITE.nemo_rl.images["sandbox"]
    assert told["MOUNTS"].split(",") == [
        "/lustre:/lustre",
        "/lustre/code/nemo-rl-v0.7.0:/lustre/code/nemo-rl-v0.7.0",
        "/lustre/code/nemo-rl-v0.7.0/3rdparty/Gym-workspace/Gym:/opt/nemo-rl/3rdparty/Gym-workspace/Gym",
    ]
    assert "SANDBOX_CONTAINER" not in cluster_environment(launch("swe1"), Path("/l"), 96)


def test_no_token_is_part_of_a_command(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret-of-mine")
    assert "secret-of-mine" not in str(cluster_environment(launch(), Path("/l"), 96))
    assert shlex.split(driver_command(launch()))


def test_the_models_code_is_loaded_once_into_the_stages_own_cache_before_any_rank_asks_for_it():
    text = driver_command(launch())
    assert "export HF_MODULES_CACHE=/lustre/cache/stagecoach/hf_modules/rlvr1\n" in text
    assert text.index("AutoConfig.from_pretrained") < text.index("run_grpo_nemo_gym.py")


def test_gyms_environments_are_the_images_own_where_the_release_can():
    told = [word for word in hydra_overrides(launch()) if "venv" in word]
    assert told == ["++env.nemo_gym.uv_venv_dir=/opt/gym_venvs", "++env.nemo_gym.skip_venv_if_present=true"]


def test_the_configs_seed_is_kept_unless_recipe_stage_or_command_line_say_one():
    assert not any(".seed=" in override for override in hydra_overrides(replace(launch(), seed=None)))
    assert "grpo.seed=42" in hydra_overrides(launch())
    path = ROOT / "config/recipes/super3.yaml"
    assert {RECIPE.seed_of(name) for name in RECIPE.stages} == {None}
    assert load_recipe(path, seed=0).seed_of("rlvr1") == 0
    own = RECIPE.stages["rlvr1"].model_copy(update={"seed": 5})
    assert load_recipe(path, seed=7).model_copy(update={"stages": {"rlvr1": own}}).seed_of("rlvr1") == 5
    tiny = load_recipe(ROOT / "config/recipes/tiny.yaml").model_copy(update={"seed": None})
    assert tiny.seed_of("sft") == 0, "TRL has no config of its own"


def test_nano_gets_none_of_supers_variables_and_every_release_what_several_nodes_need():
    told = any_launch("rlvr", recipe_of("nano3"), ROOT).runtime.environment
    assert told == {
        "NRL_MEGATRON_CHECKPOINT_DIR": "/cache/megatron_ckpt_cache",
        "HF_MODULES_CACHE": "/cache/hf_modules/rlvr",
        "NRL_IGNORE_VERSION_MISMATCH": "1",
    }
    assert len(any_launch("rlvr1", RECIPE, ROOT).runtime.environment) == len(told) + 14


@pytest.mark.parametrize(("name", "stages"), [("omni3", ["mpo", "text", "vision"]), ("steps-dpo", ["dpo"])])
def test_what_triton_and_vllm_compile_stays_on_the_node_where_the_launcher_has_it_there(name, stages):
    recipe = recipe_of(name)
    for stage in stages:
        told = any_launch(stage, recipe, ROOT).runtime.environment
        assert not {"TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TMPDIR"} & told.keys()


COMMAND_VARIABLE = re.compile(r"^ +([A-Z][A-Z0-9_]*)=(\S*) \\$", re.MULTILINE)
ULTRAS_VARIABLE = re.compile(r"^([A-Z][A-Z0-9_]*)=(?!\$\()(\S*) \\$", re.MULTILINE)
SEEDED = {"NRL_VLLM_CACHE_SEED_DIR", "UV_CACHE_DIR", "HF_HOME", "HF_TOKEN"}
EXPORTED = re.compile(r'^export ([A-Z][A-Z0-9_]*)="\$\{\w+:-(.*)\}"$', re.MULTILINE)
OURS = {"NRL_MEGATRON_CHECKPOINT_DIR", "HF_MODULES_CACHE", "NRL_IGNORE_VERSION_MISMATCH"}  # docs/nemo_rl.md says why


@needs_checkouts
@pytest.mark.parametrize(
    ("name", "stage", "launcher", "besides", "without"),
    [
        ("super3", "rlvr1", "examples/nemo_gym/nemotron-3-super/super_launch.sh", {"PERSISTENT_CACHE"}, {"PYTHONPATH"}),
        ("super3-b200", "rlvr1", "super_launch.sh", OURS, set()),
        ("ultra3", "mopd", "examples/nemo_gym/nemotron-3-ultra/ultra_launch.sh", OURS, SEEDED),
        ("lightning35-rlvr", "rlvr", "examples/nemo_gym/nemotron-3.5-lightning/lightning35_launch.sh", OURS, SEEDED),
        ("omni3", "mpo", "scripts/nanov3_mpo.sh", OURS, {"HF_HOME", "TMPDIR", "TRITON_CACHE_DIR"}),
        ("omni3", "vision", "scripts/nanov3_vision_rl.sh", OURS, {"HF_HOME", "TMPDIR", "TRITON_CACHE_DIR"}),
    ],
)
def test_a_launchers_variables_are_ours_but_for_those_with_a_reason(name, stage, launcher, besides, without):
    recipe = recipe_of(name)
    text = Path(CHECKOUTS, recipe.release, launcher).read_text()
    pattern = {"omni3": EXPORTED, "ultra3": ULTRAS_VARIABLE, "lightning35-rlvr": ULTRAS_VARIABLE}.get(
        name, COMMAND_VARIABLE
    )
    theirs = {key: value for key, value in pattern.findall(text) if key not in {"GPUS_PER_NODE", "MOUNTS"}}
    ours = any_launch(stage, recipe, ROOT).runtime.environment
    assert theirs.keys() - ours.keys() == without
    assert ours.keys() - theirs.keys() <= besides
    plain = {key: value for key, value in theirs.items() if "$" not in value and key in ours.keys() - OURS}
    assert {key: ours[key] for key in plain} == plain


def test_a_command_shown_before_the_rows_are_there_says_so_of_the_steps_and_the_cpus(tmp_path):
    shown = BACKEND.command_text(Stage(RECIPE, tmp_path, "rlvr1"), SITE)
    assert "unknown until the rows of rlvr1 are there" in shown and "max_num_steps=0" not in shown
    assert "CPUS_PER_WORKER='those of the job on a node'" in shown


@pytest.mark.parametrize("name", load_releases())
def test_each_release_is_told_of_automodel_by_its_own_name(name):
    policy = {"dtensor_cfg": {"enabled": True, "_v2": True, "lora_cfg": {"dim": 8}}}
    start = launch(policy=RECIPE.stages["rlvr1"].policy | policy, overrides=["++policy.dtensor_cfg.own=1"])
    told = hydra_overrides(replace(start, runtime=replace(start.runtime, release=release_of(name))))
    found = {text for text in told if "dtensor" in text or "automodel" in text}
    is_new = name == "v0.8.0"
    key = "policy.automodel_cfg" if is_new else "policy.dtensor_cfg"
    both = {f"{key}.enabled=true", f"{key}.lora_cfg.dim=8", f"++{key}.own=1"}
    assert found == (both if is_new else both | {f"{key}._v2=true"})
