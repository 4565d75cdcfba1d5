"""What is found of a NeMo-RL stage before any node is asked for: each trap by one wrong value, and nothing else."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.backends.nemo_rl.checks import findings
from scripts.backends.nemo_rl.checks import places as site_checks
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.places import LEAST_IMAGE_BYTES
from scripts.backends.nemo_rl.checks.silent import check_adapters, check_optimizer_offload
from scripts.backends.nemo_rl.checks.sums import GYM
from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.backends.nemo_rl.upstream import any_launch
from scripts.backends.protocol import Finding
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.stage.stage import Stage
from tests.conftest import ROOT
from tests.unit.test_traps import CHECKS_OF_NEMO_RL, traps_told

SUPER = load_recipe(ROOT / "config/recipes/super3.yaml")
H100 = load_site(ROOT / "config/sites/h100.yaml", SUPER)
RELEASE = release_of("v0.7.0")
DEADLINE = "checkpointing.checkpoint_must_save_by"


def with_peft(world: "World", **peft: Any) -> "World":
    """Its stage trains adapters in Megatron."""
    return world.config("policy", megatron_cfg={"enabled": True, "peft": {"enabled": True, **peft}})


def with_lora(world: "World", **dtensor: Any) -> "World":
    """Its stage trains adapters in DTensor's second version."""
    lora = {"enabled": True} | dtensor.pop("lora_cfg", {})
    return world.config(
        "policy", dtensor_cfg={"_v2": True, **dtensor, "lora_cfg": lora}, megatron_cfg={"enabled": False}
    )


@dataclass(frozen=True)
class World:
    """A stage of the recipe on a site whose paths are all there; the methods give one in which something is wrong."""

    root: Path
    recipe: Recipe
    site: Site
    name: str = "rlvr1"

    def found(self) -> list[Finding]:
        return findings(Stage(self.recipe, self.root / "results", self.name), self.site)

    def of(self, name: str) -> "World":
        return replace(self, name=name)

    def stage(self, **sections: Any) -> "World":
        """With other settings; sections are laid over the stage's own, all else replaces it."""
        stage = self.recipe.stages[self.name]
        own = {key: laid(getattr(stage, key), value) for key, value in sections.items()}
        stages = self.recipe.stages | {self.name: stage.model_copy(update=own)}
        return replace(self, recipe=self.recipe.model_copy(update={"stages": stages}))

    def model(self, name: str) -> "World":
        model = self.recipe.model.model_copy(update={"name": name})
        return replace(self, recipe=self.recipe.model_copy(update={"model": model}))

    def configured(self, **values: Any) -> "World":
        """With a config of the model."""
        (self.root / "model/config.json").write_text(json.dumps(values))
        return self

    def gym(self, name: str, *agents: str) -> "World":
        """With one of Gym's files more in the checkout, which the stage's config names, and its agents."""
        file = self.root / "checkout" / GYM / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        servers = {f"{name}_server": {"resources_servers": {}}} | {
            agent: {"responses_api_agents": {}} for agent in agents
        }
        file.write_text(yaml.safe_dump(servers))
        return self.config("env", nemo_gym={"config_paths": sorted(path.name for path in file.parent.glob("*.yaml"))})

    def on(self, **values: Any) -> "World":
        return replace(self, site=self.site.model_copy(update=values))

    def nemo_rl(self, **values: Any) -> "World":
        return self.on(nemo_rl=self.site.nemo_rl.model_copy(update=values))

    def slurm(self, **values: Any) -> "World":
        return self.on(slurm=self.site.slurm.model_copy(update=values))

    def rows(self, count: int, **environments: int) -> "World":
        """With data: so many training rows, by environment."""
        folder = self.root / "results/data" / self.recipe.stages[self.name].blend
        folder.mkdir(parents=True)
        train = {"rows": count, "environments": environments}
        validation = {"rows": 100, "environments": {}}
        splits = {"train": train, "validation": validation}
        (folder / "manifest.json").write_text(
            json.dumps({name: {"sha256": "0"} | split for name, split in splits.items()})
        )
        return self

    def config(self, name: str, **sections: Any) -> "World":
        """With other values in the release's own config of the stage."""
        path = self.root / "checkout" / self.recipe.stages[self.name].config
        path.write_text(yaml.safe_dump(laid(yaml.safe_load(path.read_text()), {name: sections})))
        return self

    def without(self, *paths: str) -> "World":
        for path in paths:
            (self.root / path).unlink()
        return self

    def template(self, text: str) -> "World":
        """With a chat template of the model."""
        (self.root / "model/chat_template.jinja").write_text(text)
        return self

    def imported(self, *files: str, age: float = -60) -> "World":
        """With an earlier import of the model in the cache, so many seconds younger than the model."""
        folder = f"model_{str(self.root / 'model').replace('/', '_')}"
        path = self.root / "cache/megatron_ckpt_cache" / folder / "iter_0000000"
        path.mkdir(parents=True)
        for file in files:
            (path / file).touch()
        now = (self.root / "model/config.json").stat().st_mtime
        os.utime(path, (now - age, now - age))
        return self


def laid(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: laid(base.get(key), value) for key, value in over.items()}


def make_config(name: str) -> dict[str, Any]:
    """A config with every key that a stage's driver is told, and no value but the cache of prefixes switched off."""
    config: dict[str, Any] = {}
    for override in [*hydra_overrides(any_launch(name, SUPER, Path("/none"))), DEADLINE]:
        if override.startswith("sif_dir"):
            config["sif_dir"] = None
            continue
        *parents, last = override.lstrip("+").partition("=")[0].split(".")
        node = config
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = None
    config["policy"]["generation"]["vllm_cfg"]["enable_prefix_caching"] = False
    return config


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    monkeypatch.delenv("HF_HOME", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for image in ("train.sqsh", "sandbox.sqsh"):
        with (tmp_path / image).open("wb") as file:
            file.truncate(LEAST_IMAGE_BYTES)
    checkout = tmp_path / "checkout"
    files = ["ray.sub", SUPER.stages["rlvr1"].entry, RELEASE.converter.script]
    for file in [*files, *(f"{folder}/x" for folder in RELEASE.mounts)]:
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).touch()
    for name in SUPER.stage_order():
        path = checkout / SUPER.stages[name].config
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(make_config(name)))
    nemo_rl = {
        "checkouts": {"v0.7.0": str(checkout)},
        "images": {name: str(tmp_path / f"{name}.sqsh") for name in ("train", "sandbox")},
        "cache": str(tmp_path / "cache"),
        "sif": str(tmp_path / "sif"),
    }
    here = {"mounts": [f"{tmp_path}:{tmp_path}"], "environment": {"HF_HOME": str(tmp_path / "hub")}}
    return World(tmp_path, SUPER, H100.model_copy(update=here)).nemo_rl(**nemo_rl).model(str(tmp_path / "model"))


@pytest.mark.parametrize("name", SUPER.stages)
def test_a_right_recipe_on_a_right_site_has_no_findings(world, name):
    assert world.of(name).found() == []


# As Nemotron's do: of what is before the last question, only what follows the thoughts is rendered.
FORGETS = """{%% for message in messages %%}
{%%- set content = message.content %%}
{%%- if %s and '</think>' in content and not loop.last %%}
    {%%- set content = content.split('</think>')[-1].lstrip() %%}
{%%- endif %%}
<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{%% endfor %%}<|im_start|>assistant
"""
HEEDS = FORGETS % "truncate_history_thinking | default(true)"
PLACE = "nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare.num_rollouts_per_prompt"
WRONG: dict[str, tuple[Callable[[World], World], int, str, bool]] = {
    "no section slurm": (
        lambda world: world.on(slurm=None),
        23,
        "site h100 has no section slurm, which NeMo-RL needs",
        True,
    ),
    "no section nemo_rl": (
        lambda world: world.on(nemo_rl=None),
        23,
        "site h100 has no section nemo_rl, which NeMo-RL needs",
        True,
    ),
    "no node left to train on": (
        lambda world: world.stage(
            cluster=world.recipe.stages["rlvr1"].cluster.model_copy(update={"generation_nodes": 176})
        ),
        17,
        "cluster leaves 0 nodes to train on; raise cluster.num_nodes",
        True,
    ),
    "experts do not fill the nodes": (
        lambda world: world.stage(policy={"megatron_cfg": {"expert_model_parallel_size": 48}}),
        18,
        "32 training nodes have 256 GPUs, no multiple of ETP x EP x PP = 48",
        True,
    ),
    "tensors do not fill the nodes": (
        lambda world: world.stage(
            policy={"megatron_cfg": {"tensor_model_parallel_size": 5}, "train_global_batch_size": 18}
        ),
        18,
        "32 training nodes have 256 GPUs, no multiple of TP x CP x PP = 40",
        True,
    ),
    "a batch that cannot be shared": (
        lambda world: world.stage(policy={"train_global_batch_size": 4100}),
        19,
        "policy.train_global_batch_size 4100 cannot be shared evenly by the 8 data-parallel replicas of 256 GPUs",
        True,
    ),
    "generating GPUs left over": (
        lambda world: world.stage(policy={"generation": {"vllm_cfg": {"tensor_parallel_size": 7}}}),
        18,
        "1152 generating GPUs are no multiple of vLLM's tensor_parallel_size 7",
        True,
    ),
    "a cohort of another size": (
        lambda world: world.stage(env=cohort_of(8)),
        20,
        f"env.{PLACE} is 8, but grpo.num_generations_per_prompt is 16: the reward model would wait for ever; make them "
        "equal",
        True,
    ),
    "environments without rows": (
        lambda world: (
            world.gym("math", "math_agent").gym("mcqa", "mcqa_agent", "mcqa_other").rows(51_200, math_agent=51_200)
        ),
        21,
        "2 of the 3 environments that its config runs have no row, so nothing is learnt there: mcqa_agent, mcqa_other; "
        "published data are a part of what the model learnt from",
        False,
    ),
    "validation without whole cohorts": (
        lambda world: world.stage(grpo={"val_period": 5}).config("grpo", val_period=-1),
        20,
        "it validates with a reward model, so data.validation.repeat must be 16 too",
        True,
    ),
    "validation that only the release's config asks for": (
        lambda world: world.config("grpo", val_at_end=True),
        20,
        "it validates with a reward model, so data.validation.repeat must be 16 too",
        True,
    ),
    "several epochs": (
        lambda world: world.config("grpo", max_num_epochs=1).stage(grpo={"max_num_epochs": 3}),
        5,
        "grpo.max_num_epochs is 3, but asynchronous training makes one pass over the rows",
        False,
    ),
    "too few rows": (
        lambda world: world.rows(600),
        4,
        "600 training rows make 2 batches of 256, too few to train; lower the batch",
        True,
    ),
    "a step beyond the rows": (
        lambda world: world.rows(2570).stage(max_num_steps=9),
        4,
        "max_num_steps is 9, but 2570 rows make 10 steps of 256, and asynchronous training may lose the last 2, which it "
        "generates ahead; set it to 8 at most or leave it out",
        True,
    ),
    "a step beyond the epochs": (
        lambda world: (
            world.config("grpo", max_num_epochs=2)
            .rows(2570)
            .stage(max_num_steps=21, grpo={"async_grpo": {"enabled": False}})
        ),
        4,
        "max_num_steps is 21, but 2570 rows make 10 steps of 256 in each of 2 epochs; set it to 20 at most, or raise "
        "grpo.max_num_epochs",
        True,
    ),
    "asynchronous saving": (
        lambda world: world.config("policy", megatron_cfg={"enabled": True, "checkpoint": {"async_save": True}}),
        10,
        "policy.megatron_cfg.checkpoint.async_save is on, which has saved old weights again and again; set it to false",
        False,
    ),
    "the best by what nobody measures": (
        lambda world: world.stage(
            checkpointing=world.recipe.stages["rlvr1"].checkpointing.model_copy(update={"keep_top_k": 2})
        ),
        27,
        "checkpointing.keep_top_k asks for the best checkpoints, but nothing validates, so NeMo-RL would keep the "
        "newest; set keep_last_k instead, or a val_period",
        False,
    ),
    "an import that was killed": (
        lambda world: world.imported("run_config.yaml"),
        13,
        "{root}/cache/megatron_ckpt_cache/model_{flat}_model/iter_0000000: has no metadata.json; an import that was "
        "killed? delete it, and NeMo-RL imports again",
        True,
    ),
    "a model that changed in place": (
        lambda world: world.imported("run_config.yaml", "metadata.json", age=60),
        13,
        "{root}/model: has changed since NeMo-RL imported it; delete "
        "{root}/cache/megatron_ckpt_cache/model_{flat}_model or use a new path",
        False,
    ),
    "the image's code hidden": (
        lambda world: world.on(mounts=[*world.site.mounts, "/home/me/RL:/opt/nemo-rl/"]),
        38,
        "mounts: /home/me/RL:/opt/nemo-rl/ hides the image's own code; mount it elsewhere",
        True,
    ),
    "the whole image hidden": (
        lambda world: world.on(mounts=["/:/"]),
        38,
        "mounts: /:/ hides the image's own code; mount it elsewhere",
        True,
    ),
    "a cache that containers do not see": (
        lambda world: world.nemo_rl(cache="/raid/cache"),
        14,
        "nemo_rl.cache lies in /raid/cache, which no mount of the site shows to containers as it is",
        True,
    ),
    "checkpoints that no converter reads": (
        lambda world: world.config("policy", dtensor_cfg={"_v2": True}, megatron_cfg={"enabled": False}),
        15,
        "it trains by DTensor v2, whose checkpoints are shards that no converter of the release reads; add "
        '"++checkpointing.model_save_format=torch_save" to its overrides',
        True,
    ),
    "adapters told to what does not train": (
        lambda world: world.config(
            "policy", dtensor_cfg={"lora_cfg": {"enabled": True}}, megatron_cfg={"enabled": True}
        ),
        76,
        "policy.dtensor_cfg.lora_cfg.enabled is on, but that is not what trains; say it in policy.megatron_cfg.peft",
        True,
    ),
    "adapters over a tied head": (
        lambda world: with_lora(world.configured(tie_word_embeddings=True), lora_cfg={"match_all_linear": True}),
        76,
        "policy.dtensor_cfg.lora_cfg lays adapters over lm_head, which is {root}/model's embedding too: merged they would "
        "change what it reads, and vLLM leaves them out; say exclude_modules: ['lm_head'] with match_all_linear: false",
        True,
    ),
    "adapters over a tied head in Megatron": (
        lambda world: with_peft(world.configured(tie_word_embeddings=True)),
        76,
        "policy.megatron_cfg.peft lays adapters over output_layer, which is {root}/model's embedding too: merged they "
        "would change what it reads, and vLLM leaves them out; say exclude_modules: ['output_layer']",
        True,
    ),
    "a mount under another name": (
        lambda world: world.on(environment={"HF_HOME": "/hub"}, mounts=[*world.site.mounts, "/hub:/models"]),
        14,
        "environment.HF_HOME lies in /hub, which no mount of the site shows to containers as it is",
        True,
    ),
    "a path with a space": (
        lambda world: world.on(environment={"HF_HOME": f"{world.root}/my hub"}),
        14,
        "environment.HF_HOME lies in {root}/my hub: ray.sub takes no path with a space, comma or colon",
        True,
    ),
    "ports shared": (
        lambda world: world.slurm(exclusive=False),
        34,
        "slurm.exclusive is false, but Ray's and NeMo-RL's ports are fixed: two jobs on a node would collide",
        True,
    ),
    "no folder of task images": (
        lambda world: world.of("swe2").nemo_rl(sif=None),
        42,
        "its rows run in .sif images, but the site names no folder nemo_rl.sif",
        True,
    ),
    "no model": (
        lambda world: world.without("model/config.json"),
        12,
        "{root}/model: no config.json there; the first stage starts from a Hugging Face folder",
        True,
    ),
    "no checkout named": (
        lambda world: world.nemo_rl(checkouts={}),
        18,
        f"site h100: nemo_rl.checkouts has no v0.7.0; clone NeMo-RL at {RELEASE.revision}",
        True,
    ),
    "no checkout there": (
        lambda world: world.without("checkout/ray.sub"),
        18,
        f"{{root}}/checkout: no ray.sub there; clone NeMo-RL at {RELEASE.revision} with --recursive",
        True,
    ),
    "a checkout of another release": (
        lambda world: world.without(f"checkout/{RELEASE.converter.script}"),
        18,
        f"{{root}}/checkout: has no {RELEASE.converter.script}; is it v0.7.0, cloned with --recursive?",
        True,
    ),
    "a key that the release has not": (
        lambda world: world.stage(grpo={"num_prompt_per_step": 4}),
        23,
        "config/recipes/super3.yaml: stages.rlvr1.grpo.num_prompt_per_step: no key of "
        "examples/nemo_gym/nemotron-3-super/stage1_rlvr.yaml; did you mean grpo.num_prompts_per_step?",
        True,
    ),
    "no image": (
        lambda world: world.without("sandbox.sqsh"),
        37,
        "{root}/sandbox.sqsh: no such image; build it (docs/images.md) or name another in the site",
        True,
    ),
    "half an image": (
        lambda world: world.without("train.sqsh").nemo_rl(images=written(world, "train", 3)),
        37,
        "{root}/train.sqsh: has 3 bytes; a half-made import? make it again",
        True,
    ),
    "an image that only you can name": (
        lambda world: world.nemo_rl(images={"sandbox": world.site.nemo_rl.images["sandbox"]}),
        37,
        "image train is your-registry/nemo-rl:v0.7.0.prefetched_venvs, which only you can name: set nemo_rl.images.train "
        "in the site",
        True,
    ),
    "an image of a registry": (
        lambda world: world.nemo_rl(images=world.site.nemo_rl.images | {"train": "nvcr.io/nvidia/nemo-rl:v0.7.0"}),
        37,
        "image nvcr.io/nvidia/nemo-rl:v0.7.0 would be imported on every node; import it once to a .sqsh file",
        False,
    ),
    "judges without a cache": (
        lambda world: world.on(environment={}),
        41,
        "its judge models would come from the hub, and no HF_HOME (site's environment) says where that is cached",
        True,
    ),
    "a model of the hub without a cache": (
        lambda world: world.stage(reward="verifier").on(environment={}).model("nvidia/some-model"),
        41,
        "the model nvidia/some-model would come from the hub, and no HF_HOME (site's environment) says where that is "
        "cached",
        True,
    ),
    "a reference that resumes": (
        lambda world: by_dtensor(world.of("rlhf")),
        66,
        "loss_fn.reference_policy_kl_penalty is 0.0001 and policy.dtensor_cfg._v2 is on: a resume takes the checkpoint "
        "that it goes on from as the reference, not the model that the stage began with; let checkpointing.save_period "
        "be max_num_steps, so that what is interrupted begins anew, or train by Megatron",
        False,
    ),
    "prefixes of old weights": (
        lambda world: world.stage(overrides=["policy.generation.vllm_cfg.enable_prefix_caching=true"]),
        67,
        "policy.generation.vllm_cfg.enable_prefix_caching is on: what vLLM has cached of prompts and turns outlives the "
        "weights that computed it; hold gen_kl_error by a gate, or make it false, and each turn is computed anew",
        False,
    ),
    "prefixes of old weights, by default": (
        lambda world: world.config("policy", generation={"vllm_cfg": {"enable_prefix_caching": None}}),
        67,
        "policy.generation.vllm_cfg.enable_prefix_caching is not set, which is on: what vLLM has cached of prompts and "
        "turns outlives the weights that computed it; hold gen_kl_error by a gate, or make it false, and each turn is "
        "computed anew",
        False,
    ),
    "an optimizer on the CPU": (
        lambda world: world.config(
            "policy", megatron_cfg={"enabled": True, "optimizer": {"optimizer_cpu_offload": True}}
        ),
        68,
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload is on: the first step would go out from random weights, not "
        "the model's; make it false",
        True,
    ),
    "a template that forgets": (
        lambda world: world.template(HEEDS),
        64,
        "{root}/model: its chat template leaves out what was thought in earlier turns, which NeMo-RL trains on: a rollout "
        "of several user turns fails or is cut wrongly; set env.nemo_gym.policy_model.responses_api_models.vllm_model."
        "chat_template_kwargs.truncate_history_thinking to false",
        False,
    ),
    "a template that only a judge's server tells to keep thoughts": (
        lambda world: world.template(HEEDS).config("env", nemo_gym={"judge": {"truncate_history_thinking": False}}),
        64,
        "{root}/model: its chat template leaves out what was thought in earlier turns, which NeMo-RL trains on: a rollout "
        "of several user turns fails or is cut wrongly; set env.nemo_gym.policy_model.responses_api_models.vllm_model."
        "chat_template_kwargs.truncate_history_thinking to false",
        False,
    ),
    "a template that does not heed what it is told": (
        lambda world: told_to_keep_thoughts(world.template(FORGETS % "true")),
        64,
        "{root}/model: its chat template leaves out what was thought in earlier turns, which NeMo-RL trains on: a rollout "
        "of several user turns fails or is cut wrongly; use another, truncate_history_thinking: false does not help",
        False,
    ),
    "rows that need the sandbox": (
        lambda world: world.rows(10_000, ns_tools_simple_agent=9_000).stage(sandbox=False),
        21,
        "ns_tools_simple_agent need the sandbox; set sandbox: true",
        True,
    ),
}


def told_to_keep_thoughts(world: World) -> World:
    return world.config(
        "env", nemo_gym={"policy_model": {"chat_template_kwargs": {"truncate_history_thinking": False}}}
    )


def by_dtensor(world: World) -> World:
    readable = world.config("checkpointing", model_save_format="torch_save")
    return readable.config("policy", dtensor_cfg={"enabled": True, "_v2": True})


def cohort_of(size: int) -> dict[str, Any]:
    server = {"resources_servers": {"genrm_compare": {"num_rollouts_per_prompt": size}}}
    return {"nemo_gym": {"genrm_compare_resources_server": server}}


def written(world: World, image: str, size: int) -> dict[str, str]:
    (world.root / f"{image}.sqsh").write_bytes(bytes(size))
    return world.site.nemo_rl.images


@pytest.mark.parametrize("wrong", WRONG)
def test_one_wrong_value_is_one_finding(world, wrong):
    spoil, trap, says, stops = WRONG[wrong]
    spoilt = spoil(world)
    says = says.replace("{root}", str(world.root)).replace("{flat}", str(world.root).replace("/", "_"))
    assert spoilt.found() == [Finding(spoilt.name, trap, says, stops)]


def test_a_release_whose_copies_are_the_loaded_weights_may_keep_its_optimizer_on_the_cpu(world):
    spoilt = WRONG["an optimizer on the CPU"][0](world)
    stage = Stage(spoilt.recipe, spoilt.root / "results", spoilt.name)
    context = StageContext(**vars(runtime_of(spoilt.recipe, spoilt.name, spoilt.site)), stage=stage)
    assert [finding.trap for finding in check_optimizer_offload(context)] == [68]
    mended = context.release.model_copy(update={"can": release_of("main").can})
    assert list(check_optimizer_offload(replace(context, release=mended))) == []


def test_checkpoints_that_a_converter_reads_are_no_finding(world):
    dtensor = world.config("policy", dtensor_cfg={"_v2": True}, megatron_cfg={"enabled": False})
    assert dtensor.stage(overrides=["++checkpointing.model_save_format=torch_save"]).found() == []
    assert dtensor.config("checkpointing", model_save_format="torch_save").found() == []


def test_adapters_need_a_release_that_converts_and_merges_them(world):
    world = world.stage(policy={"megatron_cfg": {"enabled": True, "peft": {"enabled": True}}})
    stage = Stage(world.recipe, world.root / "results", world.name)
    context = StageContext(**vars(runtime_of(world.recipe, world.name, world.site)), stage=stage)
    says = {
        "v0.6.0": ["policy.megatron_cfg.peft.enabled is on, for which v0.6.0 has no converter"],
        "super-v3": ["policy.megatron_cfg.peft.enabled is on, but super-v3 has no peft to merge them by"],
        "main": [],
    }
    for name, wanted in says.items():
        found = list(check_adapters(replace(context, release=release_of(name))))
        assert found == [Finding("rlvr1", 15, line) for line in wanted]


def test_every_trap_that_is_looked_for_has_such_a_value():
    told = set().union(*(traps_told(ROOT / module) for module in CHECKS_OF_NEMO_RL))
    assert {trap for _, trap, _, _ in WRONG.values()} == told


RIGHT: dict[str, Callable[[World], World]] = {
    "a resumed model without a reference": by_dtensor,
    "a reference that is never resumed": lambda world: by_dtensor(world.of("rlhf")).stage(max_num_steps=4),
    "prefixes kept while nothing else is generated": lambda world: world.stage(
        grpo={"async_grpo": {"enabled": False}}
    ).config("policy", generation={"vllm_cfg": {"enable_prefix_caching": True}}),
    "a template that is told to keep thoughts": lambda world: told_to_keep_thoughts(world.template(HEEDS)),
    "a template that keeps thoughts": lambda world: world.template(FORGETS % "false"),
    "a template that is none": lambda world: world.template("{% for %}"),
}


@pytest.mark.parametrize("right", RIGHT)
def test_what_is_near_a_wrong_value_and_right_is_no_finding(world, right):
    assert RIGHT[right](world).found() == []


def test_another_revision_and_changed_files_are_told(world, monkeypatch):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(world.root / "checkout")]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (found,) = world.found()
    assert (found.trap, found.stops) == (18, True)
    assert found.says == (
        f"{world.root}/checkout: is at {head[:12]}, but v0.7.0 is {RELEASE.revision[:12]}; check that revision out"
    )
    (world.root / "checkout/ray.sub").write_text("changed\n")
    ask = site_checks.git
    monkeypatch.setattr(site_checks, "git", lambda *words: RELEASE.revision if "rev-parse" in words else ask(*words))
    assert world.found() == [Finding("rlvr1", 38, f"{world.root}/checkout: 1 files are changed there", stops=False)]


def test_a_finding_is_one_line_with_its_trap():
    assert str(Finding("rlvr1", 4, "too few rows")) == "error: rlvr1: too few rows (trap 4)"
    assert str(Finding("rlvr1", 4, "too few rows", stops=False)).startswith("warning: ")
