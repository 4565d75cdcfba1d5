"""What is found of a NeMo-RL stage before any node is asked for: each trap by one wrong value, and nothing else."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pydantic import BaseModel

from scripts.backends.nemo_rl.checks import check_traps
from scripts.backends.nemo_rl.checks import places as site_checks
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.places import (
    LEAST_IMAGE_BYTES,
    any_launch,
    check_checkout,
    check_conversion,
    check_gres,
)
from scripts.backends.nemo_rl.checks.silent import check_adapters, check_continuing, check_optimizer
from scripts.backends.nemo_rl.checks.sums import GYM, check_rows_and_steps
from scripts.backends.nemo_rl.command import hydra_overrides
from scripts.backends.nemo_rl.images import PROVED
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.files import write_json
from scripts.finding import Finding
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage
from tests.cases import cases, tables_of
from tests.conftest import ROOT
from tests.production import CHECKOUTS, TRIED, needs_checkouts
from tests.unit.test_traps import CHECKS_OF_NEMO_RL, traps_told

SUPER = load_recipe(ROOT / "config/recipes/super3.yaml")
H100 = load_site(ROOT / "config/sites/h100.yaml", SUPER)
RELEASE = release_of("v0.7.0")
DEADLINE = "checkpointing.checkpoint_must_save_by"
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
READS_GRES = """maybe_gres_arg() {
  if sinfo -p $SLURM_JOB_PARTITION -h -o "%G" | grep -q "gpu:"; then
    if [[ $GPUS_PER_NODE -ne $(sinfo -p $SLURM_JOB_PARTITION -h -o "%G" | cut -d'(' -f1 | awk -F: '{print $NF}') ]]; then
      echo "Error: GRES detected is $(sinfo)" >&2
      exit 1
    fi
  fi
}
"""


@dataclass(frozen=True)
class World:
    """A stage of the recipe on a site whose paths are all there; the methods give one in which something is wrong."""

    root: Path
    recipe: Recipe
    site: Site
    name: str = "rlvr1"

    def found(self) -> list[Finding]:
        return [*check_traps(Candidate(Stage(self.recipe, self.root / "results", self.name), self.site))]

    def with_all(self, changes: dict[str, Any]) -> "World":
        """With changes by method; the values are the method's arguments, named or in order."""
        world = self
        for name, values in json.loads(self.named(json.dumps(changes))).items():
            method = getattr(world, name)
            world = method(**values) if isinstance(values, dict) else method(*values)
        return world

    def named(self, text: str) -> str:
        """A text of the table with the places of this world and the release."""
        names = {"root": str(self.root), "flat": str(self.root).replace("/", "_")}
        for name, value in (names | {"revision": RELEASE.revision, "converter": RELEASE.converter.script}).items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def context(self) -> StageContext:
        """What a check is given."""
        stage = Stage(self.recipe, self.root / "results", self.name)
        return StageContext(**vars(runtime_of(self.recipe, self.name, self.site)), stage=stage)

    def taught(self, **sections: Any) -> "World":
        """With the stage taught by its environment's teacher, whose export is the start's model in another folder."""
        teacher = self.root / "results/swe1/hf/model"
        teacher.mkdir(parents=True)
        for file in (self.root / "model").iterdir():
            shutil.copy(file, teacher)
        world = self.config(grpo={"seq_logprob_error_threshold": 2})
        told = {"teachers": {"solver": "swe1"}, "distillation": {"of": {"math": "solver"}}}
        cluster = {"num_nodes": 180, "teacher_nodes": 4}
        return world.stage(**{"algorithm": "distillation", "cluster": cluster} | told | sections)

    def teacher(self, template: str | None = None, **values: Any) -> "World":
        """With another config or template of the teacher's."""
        folder = self.root / "results/swe1/hf/model"
        if template:
            (folder / "chat_template.jinja").write_text(template)
        (folder / "config.json").write_text(json.dumps(values))
        return self

    def of(self, name: str) -> "World":
        return replace(self, name=name)

    def stage(self, **sections: Any) -> "World":
        """With other settings; sections are laid over the stage's own, all else replaces it."""
        stages = self.recipe.stages | {self.name: laid(self.recipe.stages[self.name], sections)}
        return replace(self, recipe=self.recipe.model_copy(update={"stages": stages}))

    def model(self, name: str) -> "World":
        return replace(self, recipe=self.recipe.model_copy(update={"model": laid(self.recipe.model, {"name": name})}))

    def configured(self, **values: Any) -> "World":
        """With a config of the model."""
        (self.root / "model/config.json").write_text(json.dumps(values))
        return self

    def generation(self, **values: Any) -> "World":
        """With generation settings of the model."""
        (self.root / "model/generation_config.json").write_text(json.dumps(values))
        return self

    def gym(self, **agents: list[str]) -> "World":
        """With Gym's files of these names in the checkout, which the stage's config names, and their agents."""
        folder = self.root / "checkout" / GYM
        folder.mkdir(parents=True, exist_ok=True)
        for name, own in agents.items():
            servers = {f"{name}_server": {"resources_servers": {}}}
            servers |= {agent: {"responses_api_agents": {}} for agent in own}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(servers))
        return self.config(env={"nemo_gym": {"config_paths": [f"{name}.yaml" for name in agents]}})

    def at(self, **values: Any) -> "World":
        return replace(self, site=self.site.model_copy(update=values))

    def nemo_rl(self, **values: Any) -> "World":
        return self.at(nemo_rl=self.site.nemo_rl.model_copy(update=values))

    def slurm(self, **values: Any) -> "World":
        return self.at(slurm=self.site.slurm.model_copy(update=values))

    def mounts(self, *more: str) -> "World":
        return self.at(mounts=[*self.site.mounts, *more])

    def images(self, **others: str | None) -> "World":
        """With other images; one that is None is not named."""
        images = self.site.nemo_rl.images | others
        return self.nemo_rl(images={name: image for name, image in images.items() if image is not None})

    def rows(self, count: int, **environments: int) -> "World":
        """With data: so many training rows, by environment."""
        splits = {"train": (count, environments), "validation": (100, {})}
        described = {name: {"sha256": "0", "rows": rows, "environments": of} for name, (rows, of) in splits.items()}
        write_json(self.root / "results/data" / self.recipe.stages[self.name].blend / "manifest.json", described)
        return self

    def config(self, **sections: Any) -> "World":
        """With other values in the release's own config of the stage."""
        path = self.root / "checkout" / self.recipe.stages[self.name].config
        path.write_text(yaml.safe_dump(laid(yaml.safe_load(path.read_text()), sections)))
        return self

    def without(self, path: str) -> "World":
        (self.root / path).unlink()
        return self

    def cut(self, path: str, size: int) -> "World":
        (self.root / path).write_bytes(bytes(size))
        return self

    def mounted(self, kind: str) -> "World":
        """With all of the world on such a file system, by a kernel's own table."""
        (self.root / "proc/self/mounts").write_text(f"rootfs / ext4 rw 0 0\nserver:/x {self.root} {kind} rw,hard 0 0\n")
        return self

    def template(self, text: str) -> "World":
        """With a chat template of the model."""
        (self.root / "model/chat_template.jinja").write_text(text)
        return self

    def forgets(self, condition: str) -> "World":
        """With a chat template that leaves out earlier thoughts where this holds."""
        return self.template(FORGETS % condition)

    def sinfo(self, gres: str) -> "World":
        """On a cluster whose nodes have such GRES, with a checkout that reads it as v0.7.0 does."""
        (self.root / "bin").mkdir()
        (self.root / "bin/sinfo").write_text(f"#!/bin/sh\necho '{gres}'\n")
        (self.root / "bin/sinfo").chmod(0o755)
        (self.root / "checkout/ray.sub").write_text(READS_GRES)
        return self

    def enroot(self, writable: str) -> "World":
        """On a host with enroot, which reads its settings and then its library."""
        program = self.root / "bin/enroot"
        program.parent.mkdir()
        program.write_text(
            f"#!/bin/sh\nENROOT_DATA_PATH={self.root} ENROOT_ROOTFS_WRITABLE={writable}\n. $ENROOT_LIBRARY_PATH/common.sh\n"
        )
        program.chmod(0o755)
        return self

    def imported(self, files: list[str], age: float = -60) -> "World":
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
    """A value with others over it, key by key where both have keys."""
    if isinstance(base, BaseModel) and isinstance(over, dict):
        return base.model_copy(update={key: laid(getattr(base, key), value) for key, value in over.items()})
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
    monkeypatch.setattr(psutil, "PROCFS_PATH", f"{tmp_path}/proc")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text("rootfs / ext4 rw 0 0\n")
    write_json(tmp_path / "sif" / PROVED, [])
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
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
    for name in SUPER.graph.stage_names:
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


@cases("nemo_rl_checks.wrong", "wrong")
def test_one_wrong_value_is_one_finding(world, wrong):
    spoilt = world.with_all(wrong["world"])
    assert spoilt.found() == [Finding(world.named(wrong["says"]), spoilt.name, wrong.get("stops", True), wrong["trap"])]


@pytest.mark.parametrize(("last", "says"), [(14, []), (15, ["set it to 14 at most or leave it out"])])
def test_a_stage_that_continues_another_needs_rows_for_its_own_steps_alone(world, last, says):
    longer = world.stage(max_num_steps=6).of("rlvr2").stage(continues="rlvr1", max_num_steps=last).rows(2570)
    found = [finding.message for finding in check_rows_and_steps(longer.context())]
    assert [text.rpartition("; ")[2] for text in found] == says


def test_a_release_whose_copies_are_the_loaded_weights_may_keep_its_optimizer_on_the_cpu(world):
    context = world.with_all(tables_of("nemo_rl_checks")["wrong"]["an optimizer on the CPU"]["world"]).context()
    assert [finding.trap for finding in check_optimizer(context)] == [68]
    mended = context.release.model_copy(update={"can": release_of("main").can})
    assert list(check_optimizer(replace(context, release=mended))) == []


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("v0.6.0", ["policy.megatron_cfg.peft.enabled is on, for which v0.6.0 has no converter"]),
        ("super-v3", ["policy.megatron_cfg.peft.enabled is on, but super-v3 has no peft to merge them by"]),
        ("main", []),
    ],
)
def test_adapters_need_a_release_that_converts_and_merges_them(world, release, says):
    context = world.stage(policy={"megatron_cfg": {"enabled": True, "peft": {"enabled": True}}}).context()
    found = check_adapters(replace(context, release=release_of(release)))
    assert list(found) == [Finding(line, "rlvr1", trap=15) for line in says]


@pytest.mark.parametrize(("said", "traps"), [({}, [15]), ({"_v2": False}, [23])])
def test_a_config_that_names_automodel_is_read_in_the_recipes_words(world, said, traps):
    later = world.nemo_rl(checkouts=dict.fromkeys(("v0.7.0", "v0.8.0"), str(world.root / "checkout")))
    later = later.config(policy={"automodel_cfg": {"enabled": True}})
    later = later.stage(policy={"dtensor_cfg": {"enabled": True} | said, "megatron_cfg": {"enabled": False}})
    context = replace(later.context(), release=release_of("v0.8.0"))
    assert [finding.trap for finding in check_conversion(context)] == traps


@needs_checkouts
@pytest.mark.parametrize("release", TRIED)
def test_each_releases_own_ray_sub_is_asked_of_the_gres(world, release):
    shutil.copy(Path(CHECKOUTS, release, "ray.sub"), world.sinfo("gpu:8,nic:2").root / "checkout")
    assert [finding.trap for finding in check_gres(world.context())] == [35] * (release != "nano-v3-omni")
    (world.root / "bin/sinfo").write_text("#!/bin/sh\necho 'gpu:h100:8(S:0-1)'\n")
    assert list(check_gres(world.context())) == []


def test_a_release_known_by_its_tag_is_told_as_untried_and_held_to_the_tag(world):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(world.root / "checkout")]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"], ["tag", "v0.8.0"]):
        subprocess.run([*git, *command], check=True)
    later = world.nemo_rl(checkouts=dict.fromkeys(("v0.7.0", "v0.8.0"), str(world.root / "checkout")))
    context = replace(later.context(), release=release_of("v0.8.0"))
    assert [(finding.trap, finding.stops) for finding in check_checkout(context)] == [(18, False)]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "two"], check=True)
    assert [finding.stops for finding in check_checkout(context)] == [False, True]


def test_a_release_that_keeps_the_loaders_position_continues_no_stage(world):
    context = world.of("rlvr2").stage(continues="rlvr1").context()
    kept = [finding.trap for finding in check_continuing(replace(context, release=release_of("v0.6.0")))]
    assert kept == [78, *(finding.trap for finding in check_continuing(context))]


def test_every_trap_that_is_looked_for_has_such_a_value():
    told = set().union(*(traps_told(ROOT / module) for module in CHECKS_OF_NEMO_RL))
    of_releases = {78}
    assert {wrong["trap"] for wrong in tables_of("nemo_rl_checks")["wrong"].values()} | of_releases == told


@cases("nemo_rl_checks.right", "right")
def test_what_is_near_a_wrong_value_and_right_is_no_finding(world, right):
    assert world.with_all(right).found() == []


def test_another_revision_and_changed_files_are_told(world, monkeypatch):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(world.root / "checkout")]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (found,) = world.found()
    assert (found.trap, found.stops) == (18, True)
    assert found.message == (
        f"{world.root}/checkout: is at {head[:12]}, but v0.7.0 is {RELEASE.revision[:12]}; check that revision out"
    )
    (world.root / "checkout/ray.sub").write_text("changed\n")
    ask = site_checks.git
    monkeypatch.setattr(site_checks, "git", lambda *words: RELEASE.revision if "rev-parse" in words else ask(*words))
    assert world.found() == [
        Finding(f"{world.root}/checkout: 1 files are changed there", "rlvr1", stops=False, trap=38)
    ]
