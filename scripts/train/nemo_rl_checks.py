"""What can be seen of a NeMo-RL stage before any node is asked for: arithmetic, paths, images, environments.

Each finding names a trap (by its number in docs/traps.md), the value and the fix. Nothing is read but files.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import read_json
from scripts.launch.nemo_rl_command import image_of
from scripts.launch.upstream import load_upstream, unknown_keys
from scripts.recipe.models import NemoRlStage, Recipe
from scripts.recipe.releases import Release, release_of
from scripts.recipe.resolve import planned_step, resolve_stage, rows_of_manifest
from scripts.recipe.settings import leaves
from scripts.recipe.site import NemoRlSite, Site

SANDBOXED = re.compile(r"ns_tools|math_formal_lean|lean4")
HIDING = ("", "/opt", "/opt/nemo-rl", "/root", "/opt/nemo_rl_venv", "/opt/ray_venvs")
LEAST_IMAGE_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong. `stops`: it surely would, so nothing is started; otherwise it is worth a look."""

    stage: str
    trap: int
    says: str
    stops: bool = True

    def __str__(self) -> str:
        """One line for people."""
        return f"{'error' if self.stops else 'warning'}: {self.stage}: {self.says} (trap {self.trap})"


@dataclass(frozen=True)
class Patient:
    """A stage with all that is asked of it: recipe, site, release, and where its files lie."""

    name: str
    recipe: Recipe
    site: Site
    results: Path

    @property
    def stage(self) -> NemoRlStage:
        """The stage itself."""
        return self.recipe.stages[self.name]

    @property
    def release(self) -> Release:
        """Its release of NeMo-RL."""
        return release_of(self.recipe.release)

    @property
    def nemo_rl(self) -> NemoRlSite:
        """The site's section on NeMo-RL."""
        return self.site.nemo_rl

    @property
    def data(self) -> Path:
        """The folder of its splits."""
        return self.results / "data" / self.stage.blend

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config in the release's checkout, with all that it inherits; empty where that cannot be read."""
        try:
            return load_upstream(Path(self.nemo_rl.checkouts[self.recipe.release], self.stage.config))
        except (KeyError, UserError):
            return {}

    @property
    def is_of_gym(self) -> bool:
        """Whether its rollouts are NeMo-Gym's."""
        return "nemo_gym" in self.stage.entry

    @property
    def validates(self) -> bool:
        """Whether it is validated while it trains."""
        period = self.setting("val_period", 0)
        regularly = isinstance(period, int) and period > 0
        return regularly or bool(self.setting("val_at_start") or self.setting("val_at_end"))

    def setting(self, key: str, default: Any = None) -> Any:
        """What the recipe says of the algorithm, or else the release's config."""
        own, theirs = getattr(self.stage, self.stage.algorithm), self.config.get(self.stage.algorithm) or {}
        return own[key] if key in own else theirs.get(key, default)

    def values(self, section: str, key: str) -> dict[str, Any]:
        """Every value of a key in a section, by its place; what the recipe says lies over the release's config."""
        sections = [self.config.get(section), self.stage.add.get(section), getattr(self.stage, section)]
        return {place: value for settings in sections for place, value in _values(settings or {}, key)}

    def finding(self, trap: int, says: str, stops: bool = True) -> Finding:
        """A finding on this stage."""
        return Finding(self.name, trap, says, stops)


def findings(name: str, recipe: Recipe, site: Site, results: Path) -> list[Finding]:
    """Everything that is found of a stage; of its rows only when they are there."""
    patient = Patient(name, recipe, site, results)
    if site.slurm is None or site.nemo_rl is None:
        missing = "slurm" if site.slurm is None else "nemo_rl"
        return [patient.finding(23, f"site {site.name} has no section {missing}, which NeMo-RL needs")]
    return [finding for check in CHECKS for finding in check(patient)]


def check_parallelism(patient: Patient) -> Iterator[Finding]:
    """The nodes must be filled by the parallel groups, and the batch shared out evenly."""
    stage, gpus = patient.stage, patient.site.slurm.gpus_per_node
    megatron = stage.policy.get("megatron_cfg", {})
    sizes = {
        name: megatron.get(key, 1)
        for name, key in (
            ("TP", "tensor_model_parallel_size"),
            ("CP", "context_parallel_size"),
            ("PP", "pipeline_model_parallel_size"),
            ("EP", "expert_model_parallel_size"),
            ("ETP", "expert_tensor_parallel_size"),
        )
    }
    judges = stage.cluster.judge_nodes if "judges_within_num_nodes" in patient.release.can else 0
    nodes = stage.cluster.num_nodes - stage.cluster.generation_nodes - judges
    training = nodes * gpus
    if training <= 0:
        yield patient.finding(17, f"cluster leaves {nodes} nodes to train on; raise cluster.num_nodes")
        return
    for names in (("TP", "CP", "PP"), ("ETP", "EP", "PP")):
        group = 1
        for size in names:
            group *= sizes[size]
        if training % group:
            yield patient.finding(
                18, f"{nodes} training nodes have {training} GPUs, no multiple of {' x '.join(names)} = {group}"
            )
    replicas = training // (sizes["TP"] * sizes["CP"] * sizes["PP"])
    if replicas and stage.policy["train_global_batch_size"] % replicas:
        yield patient.finding(
            19,
            f"policy.train_global_batch_size {stage.policy['train_global_batch_size']} cannot be shared evenly by the "
            f"{replicas} data-parallel replicas of {training} GPUs",
        )
    tensor = stage.policy.get("generation", {}).get("vllm_cfg", {}).get("tensor_parallel_size", 1)
    generating = (stage.cluster.generation_nodes or nodes) * gpus
    if generating % tensor:
        yield patient.finding(
            18, f"{generating} generating GPUs are no multiple of vLLM's tensor_parallel_size {tensor}"
        )


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
    if patient.validates and cohorts and patient.setting(key.removeprefix("grpo.")) != generations:
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


def check_rows_and_steps(patient: Patient) -> Iterator[Finding]:
    """The rows must be enough for the planned step: most releases wait for ever when they end before it."""
    stage, rows = patient.stage, rows_of_manifest(patient.data / "manifest.json")
    if rows is None:
        return
    planned = planned_step(resolve_stage(patient.recipe, patient.name), rows)
    batches = rows // stage.rows_per_step
    epochs = patient.setting("max_num_epochs", 1)
    if planned < 1:
        yield patient.finding(
            4,
            f"{rows} training rows make {batches} batches of {stage.rows_per_step}, too few to train; lower the batch",
        )
    elif stage.is_asynchronous and planned > batches - 1:
        yield patient.finding(
            4,
            f"max_num_steps is {planned}, but {rows} rows make {batches} steps of {stage.rows_per_step}, and "
            f"asynchronous training generates one ahead; set it to {batches - 1} at most or leave it out",
        )
    elif not stage.is_asynchronous and isinstance(epochs, int) and planned > batches * epochs:
        yield patient.finding(
            4,
            f"max_num_steps is {planned}, but {rows} rows make {batches} steps of {stage.rows_per_step} in each of "
            f"{epochs} epochs; set it to {batches * epochs} at most, or raise {stage.algorithm}.max_num_epochs",
        )


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


def check_import(patient: Patient) -> Iterator[Finding]:
    """NeMo-RL imports a model once and knows it by its path alone, be it half imported or changed since."""
    model = _folder_of_model(patient)
    caches = patient.release.variables(patient.stage.launcher) | patient.stage.environment
    cache = caches.get("NRL_MEGATRON_CHECKPOINT_DIR", "").replace("{cache}", patient.nemo_rl.cache)
    imported = Path(cache, f"model_{str(model).replace('/', '_')}", "iter_0000000")
    if model is None or not cache or not imported.exists():
        return
    wanting = [name for name in ("run_config.yaml", "metadata.json") if not (imported / name).is_file()]
    if wanting:
        yield patient.finding(
            13, f"{imported}: has no {wanting[0]}; an import that was killed? delete it, and NeMo-RL imports again"
        )
    elif max((file.stat().st_mtime for file in model.glob("*")), default=0) > imported.stat().st_mtime:
        yield patient.finding(
            13,
            f"{model}: has changed since NeMo-RL imported it; delete {imported.parent} or use a new path",
            stops=False,
        )


def _folder_of_model(patient: Patient) -> Path | None:
    """The folder that the stage starts from; None: a repository of the hub, or not made yet."""
    if patient.stage.parent is not None:
        export = patient.results / patient.stage.parent / "hf/model"
        return export.resolve() if export.exists() else None
    name = patient.recipe.model.name.rstrip("/")
    return Path(name) if name.startswith("/") else None


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
    if patient.stage.parent is None and model.startswith("/") and not Path(model, "config.json").is_file():
        yield patient.finding(12, f"{model}: no config.json there; the first stage starts from a Hugging Face folder")
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


def check_hub(patient: Patient) -> Iterator[Finding]:
    """Judges and datasets are fetched from the hub by compute nodes unless they are cached."""
    if "HF_HOME" in {*patient.site.environment, *os.environ}:
        return
    wanted = ["its judge models"] if patient.stage.reward == "judge" else []
    if patient.stage.parent is None and not patient.recipe.model.name.startswith("/"):
        wanted.append(f"the model {patient.recipe.model.name}")
    for what in wanted:
        yield patient.finding(
            41, f"{what} would come from the hub, and no HF_HOME (site's environment) says where that is cached"
        )


def check_secrets(patient: Patient) -> Iterator[Finding]:
    """Tokens belong into the environment of whoever starts Snakemake."""
    places = {"the site's environment": patient.site.environment, "its environment": patient.stage.environment}
    for where, variables in places.items():
        for name in variables:
            if re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", name):
                yield patient.finding(41, f"{name} stands in {where}, a file; export it in your shell instead")


def check_environments(patient: Patient) -> Iterator[Finding]:
    """Some environments need the sandbox."""
    manifest = patient.data / "manifest.json"
    if patient.stage.sandbox or not manifest.exists():
        return
    splits = read_json(manifest)
    names = {name for split in ("train", "validation") for name in splits[split]["environments"]}
    if sandboxed := sorted(filter(SANDBOXED.search, names)):
        yield patient.finding(21, f"{', '.join(sandboxed)} need the sandbox; set sandbox: true")


CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_parallelism,
    check_cohorts,
    check_rows_and_steps,
    check_checkpoints,
    check_import,
    check_paths,
    check_checkout,
    check_images,
    check_hub,
    check_secrets,
    check_environments,
)


def _values(settings: dict[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    """Every value of a key at any depth, with its place."""
    return ((place, value) for place, value in leaves(settings) if place.rpartition(".")[2] == key)


def _git(folder: str, *arguments: str) -> str | None:
    """What git says of a folder; None where there is no git, or no repository."""
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "-C", folder, *arguments],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
