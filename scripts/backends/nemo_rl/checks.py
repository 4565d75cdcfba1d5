"""What can be seen of a NeMo-RL stage before any node is asked for.

Each finding names a trap (by its number in docs/traps.md), the value and the fix. Nothing is read but files.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.backends.nemo_rl import arithmetic, caches, defects
from scripts.backends.nemo_rl.command import image_of
from scripts.backends.nemo_rl.megatron import iteration_of
from scripts.backends.nemo_rl.megatron_python import VENVS, WORKER, has_megatron
from scripts.backends.nemo_rl.patient import Finding, Patient
from scripts.backends.nemo_rl.upstream import load_upstream, unknown_keys
from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site

SANDBOXED = re.compile(r"ns_tools|math_formal_lean|lean4")
HIDING = ("", "/opt", "/opt/nemo-rl", "/root", "/opt/nemo_rl_venv", "/opt/ray_venvs")
LEAST_IMAGE_BYTES = 1 << 30
SAVE_FORMAT = "checkpointing.model_save_format"
WITHOUT = "uv builds the environment of the converter, for which compute nodes need a network"
GYM = "3rdparty/Gym-workspace/Gym"


def findings(name: str, recipe: Recipe, site: Site, results: Path) -> list[Finding]:
    """Everything that is found of a stage; of its rows only when they are there."""
    patient = Patient(name, recipe, site, results)
    if site.slurm is None or site.nemo_rl is None:
        missing = "slurm" if site.slurm is None else "nemo_rl"
        return [patient.finding(23, f"site {site.name} has no section {missing}, which NeMo-RL needs")]
    return [finding for check in CHECKS for finding in check(patient)]


def check_cohorts(patient: Patient) -> Iterator[Finding]:
    """A generative reward model waits for all responses to a prompt, in training and in validation."""
    stage = patient.stage
    if stage.algorithm != "grpo":
        return
    generations = stage.grpo["num_generations_per_prompt"]
    cohorts = patient.values("env", "num_rollouts_per_prompt")
    for where, size in cohorts.items():
        if isinstance(size, int) and size != generations:
            yield patient.finding(
                20,
                f"env.{where} is {size}, but grpo.num_generations_per_prompt is {generations}: the reward model would "
                "wait for ever; make them equal",
            )
    key = patient.release.keys.validation_generations
    if patient.validates and cohorts and patient.told(key) != generations:
        yield patient.finding(20, f"it validates with a reward model, so {key} must be {generations} too")
    if stage.is_asynchronous:
        for key in ("use_dynamic_sampling", "reward_scaling", "reward_shaping"):
            value = patient.setting(key)
            if value is True or (isinstance(value, dict) and value.get("enabled")):
                yield patient.finding(5, f"grpo.{key} is on, which asynchronous training does not know; switch it off")
        if (epochs := stage.grpo.get("max_num_epochs", 1)) != 1:
            yield patient.finding(
                5,
                f"grpo.max_num_epochs is {epochs}, but asynchronous training makes one pass over the rows",
                stops=False,
            )
    if patient.is_of_gym and patient.setting("max_val_samples") is not None:
        yield patient.finding(20, "grpo.max_val_samples must be null: Gym's validation takes the whole file")


def check_checkpoints(patient: Patient) -> Iterator[Finding]:
    """What NeMo-RL saves must be new each time, and what is kept be chosen by something that is measured."""
    for where, value in patient.values("policy", "async_save").items():
        if value is True:
            yield patient.finding(
                10, f"policy.{where} is on, which has saved old weights again and again; set it to false", stops=False
            )
    if patient.stage.checkpointing.keep_top_k and not patient.validates:
        yield patient.finding(
            27,
            "checkpointing.keep_top_k asks for the best checkpoints, but nothing validates, so NeMo-RL would keep the "
            "newest; set keep_last_k instead, or a val_period",
            stops=False,
        )


def check_conversion(patient: Patient) -> Iterator[Finding]:
    """What it saves must be what a converter of its release reads, and its image have the Python which that needs."""
    dtensor, megatron = patient.told("policy.dtensor_cfg._v2"), patient.told("policy.megatron_cfg.enabled")
    if dtensor and not megatron and patient.told(SAVE_FORMAT) != "torch_save":
        yield patient.finding(
            15,
            "it trains by DTensor v2, whose checkpoints are shards that no converter of the release reads; add "
            f'"++{SAVE_FORMAT}=torch_save" to its overrides',
        )
    image = image_of(patient.stage.image, patient.release, patient.nemo_rl)
    if has_megatron(image) is False:
        yield patient.finding(15, f"{image}: has no {VENVS}/{WORKER}; {WITHOUT}", stops=False)


def conversion(patient: Patient) -> str | None:
    """By which Python its checkpoints are converted, as far as that can be told; None: a finding tells it."""
    image = image_of(patient.stage.image, patient.release, patient.nemo_rl)
    found = has_megatron(image)
    if found is None:
        return f"{image}: cannot be looked into from here; if it has no {VENVS}/{WORKER}, {WITHOUT}"
    return f"{image}: its {VENVS}/{WORKER} converts checkpoints" if found else None


def check_model(patient: Patient) -> Iterator[Finding]:
    """What a first stage starts from must be there: a Hugging Face folder and, where asked for, Megatron's weights."""
    model = patient.recipe.model
    if patient.stage.parent is not None:
        return
    if model.name.startswith("/") and not Path(model.name, "config.json").is_file():
        yield patient.finding(
            12, f"{model.name}: no config.json there; the first stage starts from a Hugging Face folder"
        )
    if model.megatron is None:
        return
    try:
        iteration_of(model.megatron)
    except UserError as error:
        yield patient.finding(12, str(error))
    if model.name.startswith("/") and not any(Path(model.name).glob("*.safetensors")):
        yield patient.finding(
            12, f"{model.name}: no *.safetensors there, like which the converter lays out an export", stops=False
        )


def check_paths(patient: Patient) -> Iterator[Finding]:
    """Containers must see every path under its own name, and nothing may hide the image's own code."""
    site, nemo_rl = patient.site, patient.nemo_rl
    seen = [tuple(mount.split(":")[:2]) for mount in site.mounts]
    for source, target in seen:
        if target.rstrip("/") in HIDING:
            yield patient.finding(38, f"mounts: {source}:{target} hides the image's own code; mount it elsewhere")
    same = [Path(source) for source, target in seen if source.rstrip("/") == target.rstrip("/")]
    wanted = {"the results": patient.results.absolute(), "nemo_rl.cache": Path(nemo_rl.cache)}
    model = patient.recipe.model.name
    if patient.stage.parent is None and model.startswith("/"):
        wanted["the model"] = Path(model)
    if patient.stage.parent is None and patient.recipe.model.megatron is not None:
        wanted["model.megatron"] = Path(patient.recipe.model.megatron.path)
    if patient.stage.sif and nemo_rl.sif:
        wanted["nemo_rl.sif"] = Path(nemo_rl.sif)
    if "HF_HOME" in site.environment:
        wanted["environment.HF_HOME"] = Path(site.environment["HF_HOME"])
    for what, path in wanted.items():
        if not any(path.is_relative_to(mount) for mount in same):
            yield patient.finding(14, f"{what} lies in {path}, which no mount of the site shows to containers as it is")
        if re.search(r"[\s,:]", str(path)):
            yield patient.finding(14, f"{what} lies in {path}: ray.sub takes no path with a space, comma or colon")
    if patient.stage.sif and not nemo_rl.sif:
        yield patient.finding(42, "its rows run in .sif images, but the site names no folder nemo_rl.sif")
    if not site.slurm.exclusive:
        yield patient.finding(
            34, "slurm.exclusive is false, but Ray's and NeMo-RL's ports are fixed: two jobs on a node would collide"
        )


def check_checkout(patient: Patient) -> Iterator[Finding]:
    """The release's code must be there, be the release's, and know every key that it is told."""
    release, name = patient.release, patient.recipe.release
    checkout = patient.nemo_rl.checkouts.get(name)
    if checkout is None:
        yield patient.finding(
            18, f"site {patient.site.name}: nemo_rl.checkouts has no {name}; clone NeMo-RL at {release.revision}"
        )
        return
    if not Path(checkout, "ray.sub").is_file():
        yield patient.finding(18, f"{checkout}: no ray.sub there; clone NeMo-RL at {release.revision} with --recursive")
        return
    for file in (patient.stage.config, patient.stage.entry, release.converter.script, *release.mounts):
        if not Path(checkout, file).exists():
            yield patient.finding(18, f"{checkout}: has no {file}; is it {name}, cloned with --recursive?")
    head = _git(checkout, "rev-parse", "HEAD")
    if head is not None and head != release.revision:
        yield patient.finding(
            18, f"{checkout}: is at {head[:12]}, but {name} is {release.revision[:12]}; check that revision out"
        )
    elif changed := _git(checkout, "status", "--porcelain", "--untracked-files=no"):
        yield patient.finding(38, f"{checkout}: {len(changed.splitlines())} files are changed there", stops=False)
    yield from _check_keys(patient, Path(checkout))


def _check_keys(patient: Patient, checkout: Path) -> Iterator[Finding]:
    if not all((checkout / file).is_file() for file in (patient.stage.config, patient.stage.entry)):
        return
    alone = patient.recipe.model_copy(update={"stages": {patient.name: patient.stage}})
    try:
        for problem in unknown_keys(alone, checkout):
            yield patient.finding(23, problem)
    except UserError as error:
        yield patient.finding(23, str(error))


def check_images(patient: Patient) -> Iterator[Finding]:
    """The containers must be there before the nodes are."""
    names = [patient.stage.image, *(["sandbox"] if patient.stage.sandbox else [])]
    for name in names:
        image = image_of(name, patient.release, patient.nemo_rl)
        if image.startswith("/"):
            path = Path(image)
            if not path.is_file():
                yield patient.finding(
                    37, f"{image}: no such image; build it (docs/images.md) or name another in the site"
                )
            elif path.stat().st_size < LEAST_IMAGE_BYTES:
                yield patient.finding(
                    37, f"{image}: has {path.stat().st_size} bytes; a half-made import? make it again"
                )
        elif "/" not in image or image.startswith("your-registry"):
            yield patient.finding(
                37, f"image {name} is {image}, which only you can name: set nemo_rl.images.{name} in the site"
            )
        else:
            yield patient.finding(
                37, f"image {image} would be imported on every node; import it once to a .sqsh file", stops=False
            )


def check_secrets(patient: Patient) -> Iterator[Finding]:
    """Tokens belong into the environment of whoever starts Snakemake."""
    places = {"the site's environment": patient.site.environment, "its environment": patient.stage.environment}
    for where, variables in places.items():
        for name in variables:
            if re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", name):
                yield patient.finding(41, f"{name} stands in {where}, a file; export it in your shell instead")


def check_environments(patient: Patient) -> Iterator[Finding]:
    """Some environments need the sandbox; others have no rows, because what is published is a part of the data."""
    manifest = patient.data / "manifest.json"
    if not manifest.exists():
        return
    splits = read_json(manifest)
    names = {name for split in ("train", "validation") for name in splits[split]["environments"]}
    sandboxed = sorted(filter(SANDBOXED.search, names))
    if sandboxed and not patient.stage.sandbox:
        yield patient.finding(21, f"{', '.join(sandboxed)} need the sandbox; set sandbox: true")
    served = agents_of(patient)
    if without := sorted(served - names):
        yield patient.finding(
            21,
            f"{len(without)} of the {len(served)} environments that its config runs have no row, so "
            f"nothing is learnt there: {', '.join(without)}; published data are a part of what the model learnt from",
            stops=False,
        )


def agents_of(patient: Patient) -> set[str]:
    """The agents, by which rows name their environment, that the stage's Gym runs; of files that are not there none."""
    gym = Path(patient.nemo_rl.checkouts.get(patient.recipe.release, ""), GYM)
    sections = [patient.config.get("env"), patient.stage.add.get("env"), patient.stage.env]
    settings = [(section or {}).get("nemo_gym") or {} for section in sections]
    paths = next((one["config_paths"] for one in reversed(settings) if one.get("config_paths")), [])
    files = [load_upstream(gym / path) for path in paths if (gym / path).is_file()]
    named = [item for one in [*files, *settings] for item in one.items()]
    return {name for name, server in named if isinstance(server, dict) and "responses_api_agents" in server}


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_cohorts,
    check_checkpoints,
    check_conversion,
    check_model,
    check_paths,
    check_checkout,
    check_images,
    check_secrets,
    check_environments,
    *arithmetic.CHECKS,
    *caches.CHECKS,
    *defects.CHECKS,
)


def _git(folder: str, *arguments: str) -> str | None:
    """What git says of a folder; None where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
