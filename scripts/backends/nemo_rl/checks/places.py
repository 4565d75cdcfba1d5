"""What a site has for a NeMo-RL stage: model, mounts, checkout, containers, caches."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from scripts.backends.nemo_rl.checkpoints import missing_file
from scripts.backends.nemo_rl.checks.context import StageContext, load_upstream, of_loop
from scripts.backends.nemo_rl.command import START_POOLS, Launch, hydra_overrides, pools_of, shared_root
from scripts.backends.nemo_rl.export import trains_adapters
from scripts.backends.nemo_rl.images import PROVED
from scripts.backends.nemo_rl.loops import RewardModel
from scripts.backends.nemo_rl.runtime import CONTAINERS, lacks_of, places_of, runtime_of
from scripts.errors import UserError
from scripts.finding import Finding
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import NemoRlSite, Site, Slurm
from scripts.recipe.strict import nearest
from scripts.slurm.client import client_environment, in_one_line
from scripts.stage.provenance import git

IMAGE_FOLDERS = ("", "/opt", "/opt/nemo-rl", "/root", "/opt/nemo_rl_venv", "/opt/ray_venvs")
LEAST_IMAGE_BYTES = 1 << 30
DEADLINE = "checkpointing.checkpoint_must_save_by=null"
SAVE_FORMAT_KEY = "checkpointing.model_save_format"
GRES = re.compile(r"^maybe_gres_arg\(\) \{.*?^\}", re.MULTILINE | re.DOTALL)
"""ray.sub's function that compares GPUS_PER_NODE with sinfo, and ends the job where they differ."""


def check_conversion(context: StageContext) -> Iterator[Finding]:
    """Find checkpoints that no converter of the release reads."""
    dtensor, megatron = context.setting("policy.dtensor_cfg._v2"), context.setting("policy.megatron_cfg.enabled")
    if dtensor is False and not megatron and "names_automodel" in context.release.can:
        yield context.error(23, f"policy.dtensor_cfg._v2 is false, but {context.release.name} knows only DTensor v2")
    in_shards = dtensor and not megatron and not trains_adapters(context.setting("policy") or {})
    if in_shards and context.setting(SAVE_FORMAT_KEY) != "torch_save":
        yield context.error(
            15,
            "it trains by DTensor v2, whose checkpoints are shards that no converter of the release reads; add "
            f'"++{SAVE_FORMAT_KEY}=torch_save" to its overrides',
        )


@of_loop(RewardModel)
def check_head(context: StageContext) -> Iterator[Finding]:
    """Find a reward model on Megatron."""
    if context.setting("policy.megatron_cfg.enabled"):
        yield context.error(15, "policy.megatron_cfg.enabled is on, but NeMo-RL trains reward models by DTensor alone")


def check_model(context: StageContext) -> Iterator[Finding]:
    """Find a first model that is not there, and a tokenizer too new for the release."""
    model, settings = context.first_model, context.model and context.model / "tokenizer_config.json"
    is_new = settings and settings.is_file() and '"TokenizersBackend"' in settings.read_text(encoding="utf-8")
    if is_new and "transformers_5" not in context.release.can:
        yield context.error(
            12,
            f"{settings}: transformers 5 wrote it, which transformers 4 of {context.release.name} cannot read; keep "
            "the pretrained model's own tokenizer (no eos_token, pad_token or chat_template of the recipe's model)",
        )
    if model.startswith("/") and not Path(model, "config.json").is_file():
        yield context.error(12, f"{model}: no config.json there; the first stage starts from a Hugging Face folder")


def check_paths(context: StageContext) -> Iterator[Finding]:
    """Find paths that containers do not see under the same name, and mounts that hide the image's code."""
    site, nemo_rl = context.site, context.nemo_rl
    seen = [tuple(mount.split(":")[:2]) for mount in site.mounts]
    for source, target in seen:
        if target.rstrip("/") in IMAGE_FOLDERS:
            yield context.error(38, f"mounts: {source}:{target} hides the image's own code; mount it elsewhere")
    same = [Path(source) for source, target in seen if source.rstrip("/") == target.rstrip("/")]
    wanted = {
        "the results": str((context.stage.root or context.stage.results).absolute()),
        "nemo_rl.cache": nemo_rl.cache,
        "the model": context.first_model if context.first_model.startswith("/") else None,
        "nemo_rl.sif": nemo_rl.sif if context.settings.sif else None,
        "environment.HF_HOME": site.environment.get("HF_HOME"),
    }
    for what, path in ((what, Path(path)) for what, path in wanted.items() if path is not None):
        if not any(path.is_relative_to(mount) for mount in same):
            yield context.error(14, f"{what} lies in {path}, which no mount of the site shows to containers as it is")
        if re.search(r"[\s,:]", str(path)):
            yield context.error(14, f"{what} lies in {path}: ray.sub takes no path with a space, comma or colon")
    if context.settings.sif and not nemo_rl.sif:
        yield context.error(42, "its rows run in .sif images, but the site names no folder nemo_rl.sif")
    elif context.settings.sif and not Path(nemo_rl.sif, PROVED).is_file():
        yield context.warning(
            87, f"no image in {nemo_rl.sif} was tried; run some on a node by images prove (docs/images.md, Task images)"
        )
    if not site.slurm.exclusive:
        yield context.error(
            34, "slurm.exclusive is false, but Ray's and NeMo-RL's ports are fixed: two jobs on a node would collide"
        )


def check_judges(context: StageContext) -> Iterator[Finding]:
    """Find pools of judges whose containers would not see their files, and a checkout that cannot start them."""
    checkout = context.nemo_rl.checkouts.get(context.release.name)
    if checkout is None or not pools_of(context):
        return
    if not Path(checkout, START_POOLS).is_file():
        yield context.error(18, f"{checkout}: has no {START_POOLS} to start judges; check {context.release.name} out")
    try:
        shared_root(context, context.stage.paths.logs.absolute())
    except UserError as error:
        yield context.error(14, str(error))


def check_file_system(context: StageContext) -> Iterator[Finding]:
    """Find checkpoints on NFS, where all ranks would write the same files of the tokenizer."""
    path = (context.stage.root or context.stage.results).absolute()
    around = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    kind = max(around, key=lambda mount: len(mount.mountpoint)).fstype
    by_dtensor = context.setting("policy.dtensor_cfg.enabled") and not context.setting("policy.megatron_cfg.enabled")
    if by_dtensor and kind.startswith("nfs") and "writes_tokenizer_once" not in context.release.can:
        yield context.warning(
            97,
            f"{path} lies on {kind}, where DTensor's ranks, which all write a checkpoint's tokenizer, have hung; keep "
            "the results on another file system, or train by Megatron",
        )


def check_checkout(context: StageContext) -> Iterator[Finding]:
    """Find a checkout that is missing, of another revision, or without a key of the recipe's."""
    release, name = context.release, context.release.name
    if not release.is_tried:
        yield context.warning(
            18, f"{name} is untried: nothing but NeMo-RL's documentation was read, neither configs nor ray.sub"
        )
    checkout = context.nemo_rl.checkouts.get(name)
    if checkout is None:
        yield context.error(
            18, f"site {context.site.name}: nemo_rl.checkouts has no {name}; clone NeMo-RL at {release.revision}"
        )
        return
    if not Path(checkout, "ray.sub").is_file():
        yield context.error(18, f"{checkout}: no ray.sub there; clone NeMo-RL at {release.revision} with --recursive")
        return
    files = (context.settings.config, context.settings.entry, release.converter.script, *release.mounts)
    missing = [file for file in files if not Path(checkout, file).exists()]
    for file in missing:
        yield context.error(18, f"{checkout}: has no {file}; is it {name}, cloned with --recursive?")
    head, pinned = (git(Path(checkout), "rev-parse", name) for name in ("HEAD", f"{release.revision}^{{commit}}"))
    if head is not None and head != pinned:
        yield context.error(
            18, f"{checkout}: is at {head[:12]}, but {name} is {release.revision[:12]}; check that revision out"
        )
    elif changed := git(Path(checkout), "status", "--porcelain", "--untracked-files=no"):
        yield context.warning(38, f"{checkout}: {len(changed.splitlines())} files are changed there")
    if missing:
        return
    try:
        problems = unknown_keys(context.stage.recipe, Path(checkout), context.name)
    except UserError as error:
        problems = [str(error)]
    for problem in problems:
        yield context.error(23, problem)


def unknown_keys(recipe: Recipe, checkout: Path, name: str) -> list[str]:
    """Return a line for each key of a stage that the checkout lacks, with the nearest key.

    NeMo-RL refuses such a key at the start, once the nodes are taken.
    """
    stage, at = recipe.stages[name], f"config/recipes/{recipe.name}.yaml: stages.{name}"
    try:
        config = load_upstream(checkout / stage.config)
    except FileNotFoundError as error:
        missing = f"{Path(error.filename).name}, which is not in the checkout of {recipe.release}"
        return [f"{at}.config: {stage.config} needs {missing}"]
    overrides = [*hydra_overrides(any_launch(name, recipe, checkout)), DEADLINE]
    return list(dict.fromkeys(f"{at}.{problem}" for problem in _problems(config, overrides, stage.config)))


def any_launch(name: str, recipe: Recipe, checkout: Path) -> Launch:
    """Return a start of the stage for the keys alone; values mean nothing."""
    nemo_rl = NemoRlSite(checkouts={recipe.release: str(checkout)}, cache="/cache", sif="/sif", wandb_project="any")
    return Launch(
        runtime=runtime_of(recipe, name, Site(name="any", threads=1, slurm=Slurm(), nemo_rl=nemo_rl)),
        model="/model",
        data=Path("/anywhere/data"),
        run=Path("/anywhere"),
        max_num_steps=1,
        seed=recipe.seed_of(name),
        teachers={role: f"/teachers/{start}" for role, start in recipe.stages[name].teachers.items()},
    )


def _problems(config: dict[str, Any], overrides: list[str], path: str) -> Iterator[str]:
    """Apply Hydra overrides in order: ``key`` must be there, ``+key`` must not, ``~key`` takes away."""
    known = list(_all_keys(config))
    for override in overrides:
        marks, key = re.match(r"([+~]*)([^=]*)", override).groups()
        *parents, last = key.split(".")
        node: Any = config
        for part in parents:
            if "+" in marks and not isinstance(node.get(part), dict):
                node[part] = {}
            node = node.get(part)
            if not isinstance(node, dict):
                break
        if "+" not in marks and (not isinstance(node, dict) or last not in node):
            hint = nearest(key, known)
            yield f"{key}: no key of {path}{hint if 'did you mean' in hint else ''}"
        elif marks == "+" and node.get(last) is not None:
            yield f"{key}: is a key of {path}; say it under {key.split('.')[0]}, not under add"
        elif marks == "~":
            del node[last]
        else:
            node.setdefault(last)


def _all_keys(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _all_keys(value, f"{prefix}{key}.")


def check_gres(context: StageContext) -> Iterator[Finding]:
    """Find a partition whose GRES the release's ray.sub refuses; ray.sub's function is run, where Slurm is there."""
    file = Path(context.nemo_rl.checkouts.get(context.release.name, ""), "ray.sub")
    slurm = context.site.for_stage(context.name).slurm
    function = GRES.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    if function is None or slurm.partition is None or shutil.which("sinfo") is None:
        return
    told = {"SLURM_JOB_PARTITION": slurm.partition, "GPUS_PER_NODE": str(slurm.gpus_per_node)}
    command = ["bash", "-c", f"{function[0]}\nmaybe_gres_arg"]
    done = subprocess.run(command, env=client_environment() | told, capture_output=True, text=True, check=False)
    if done.returncode:
        yield context.error(
            35,
            f"{file} would end the job once nodes are held ({in_one_line(done.stderr)}); set slurm.gpus_per_node, name "
            "another partition, or mend maybe_gres_arg in the checkout, which reads sinfo's GRES",
        )


def check_images(context: StageContext) -> Iterator[Finding]:
    """Find images that are missing, half made or unnamed, and enroot's settings here with which containers fail."""
    names = [context.settings.image, *(["sandbox"] if context.settings.sandbox else [])]
    for name in names:
        image, path = context.image_of(name), Path(context.image_of(name))
        if path.is_absolute() and not path.is_file():
            yield context.error(37, f"{image}: no such image; build it (docs/images.md) or name another in the site")
        elif path.is_absolute():
            if (size := path.stat().st_size) < LEAST_IMAGE_BYTES:
                yield context.error(37, f"{image}: has {size} bytes; a half-made import? make it again")
        elif "/" not in image or image.startswith("your-registry"):
            yield context.error(
                37, f"image {name} is {image}, which only you can name: set nemo_rl.images.{name} in the site"
            )
        else:
            yield context.warning(37, f"image {image} would be imported on every node; import it once to a .sqsh file")
    told = subprocess.run(["bash", str(CONTAINERS)], capture_output=True, text=True, check=False)  # noqa: S607
    for place in places_of(told.stdout):
        for lack in lacks_of(place):
            yield context.warning(104, lack)


def check_import(context: StageContext) -> Iterator[Finding]:
    """Find a half-made or outdated import of the model, which NeMo-RL would take by path alone."""
    model = context.model
    imported = model and (folder := context.import_of(model)) and folder / "iter_0000000"
    if not imported or not imported.exists():
        return
    if missing := missing_file(imported):
        yield context.error(
            13, f"{imported}: has no {missing}; an import that was killed? delete it, and NeMo-RL imports again"
        )
    elif max((file.stat().st_mtime for file in model.glob("*")), default=0) > imported.stat().st_mtime:
        yield context.warning(
            13, f"{model}: has changed since NeMo-RL imported it; delete {imported.parent} or use a new path"
        )


def check_hub(context: StageContext) -> Iterator[Finding]:
    """Find models that compute nodes would fetch from the hub."""
    if context.site.environment.get("HF_HOME") or os.environ.get("HF_HOME"):
        return
    wanted = ["its judge models"] if context.settings.reward == "judge" else []
    wanted += [f"judges.{name}.model" for name, judge in pools_of(context).items() if not judge.model.startswith("/")]
    if context.first_model and not context.first_model.startswith("/"):
        wanted.append(f"the model {context.first_model}")
    for what in wanted:
        yield context.error(
            41, f"{what} would come from the hub, and no HF_HOME (site's environment) says where that is cached"
        )
