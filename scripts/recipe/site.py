"""Typed model of a site: settings of a machine or cluster. Changes no weight."""

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from scripts.recipe.stage_settings import Resources, StageSettings
from scripts.recipe.strict import Name, Strict, invalid, matching

Word = matching(r"^[\w][\w.+-]*$")
Words = matching(r"^[\w][\w.,+-]*$")
Constraint = matching(r"^[\w\[(][\w.,+\-&|*()\[\]]*$")
Mount = matching(r"^/[^:,\s]*:/[^:,\s]*(:(ro|rw))?$")
Variable = matching(r"^[A-Za-z_][A-Za-z0-9_]*$")
FolderPath = matching(r"^/[^\s:,]*$")
GYM_PYTHON = ".venv-gym/bin/python"
Port = Annotated[int, Field(ge=1024, le=65535)]


class Ports(Strict):
    """Ports of a stage's Ray cluster, equal on all nodes; a node carries one stage at a time."""

    gone = dict.fromkeys(
        ("workers_min", "workers_max"), "leave it out; Ray's worker processes take ports 10002 to 19999"
    )

    gcs: Port = 6379
    """Port of the head, for the nodes and the driver."""


class LightJobs(Strict):
    """Resources of jobs without training: data, exports, evaluations, publishing."""

    partition: Words | None = None
    """None: the partition of training."""
    cpus: PositiveInt = 2
    mem_mb: PositiveInt = 4000
    runtime: PositiveInt = 60
    """Minutes."""


class StageResources(Strict):
    """A stage's resources on this site, over its recipe's."""

    nodes: PositiveInt | None = None
    runtime: PositiveInt | None = None
    """Minutes of an allocation."""
    mem_mb: PositiveInt | None = None
    """Memory of a node."""
    step_seconds: PositiveFloat | None = None
    """Expected seconds of a step here."""


class Slurm(Strict):
    """Submission of jobs to this cluster."""

    account: Word | None = None
    partition: Words | None = None
    """Partition (or comma list) of training; none: the default one."""
    constraint: Constraint | None = None
    qos: Word | None = None
    reservation: Word | None = None
    max_nodes: PositiveInt | None = None
    """Most nodes of a job; none: by sinfo."""
    max_runtime: PositiveInt | None = None
    """Longest time limit in minutes; a stage's is cut to it."""
    gpus_per_node: NonNegativeInt = 8
    """Every node of a training gives all its GPUs."""
    cpus_per_node: PositiveInt | None = None
    """CPUs of a node for NeMo-RL's Ray; none: the launcher's number."""
    exclusive: bool = True
    """Give a training whole nodes."""
    requeue: bool = True
    """Requeue a training's job at the time limit."""
    margin: PositiveInt = 60
    """Seconds to end a training, besides a step and a save."""
    network: IPv4Network | IPv6Network | None = None
    """Network of the nodes' addresses for Ray, such as 10.0.0.0/8; none: Slurm's NodeAddr."""
    ports: Ports = Ports()
    ray_start_seconds: PositiveInt = 300
    """Patience until Ray runs on every node."""
    object_store_mb: PositiveInt | None = None
    """Ray's object store on a node; none: Ray's choice."""
    light: LightJobs = LightJobs()
    budget_gpu_hours: PositiveFloat | None = None
    """Refuse a plan that needs more."""


class NemoRlSite(Strict):
    """Places of NeMo-RL's code, images and caches on this cluster."""

    checkouts: dict[Name, FolderPath] = Field({})
    """A checkout of each release, at the release's revision."""
    images: dict[Name, str] = Field({})
    """Containers by name, as .sqsh file or registry reference."""
    cache: FolderPath = Field(description="A folder for caches that all nodes see (vLLM, FlashInfer, Megatron, HF).")
    sif: FolderPath | None = None
    """The folder of the .sif images of software-engineering rows."""
    startup_seconds: PositiveInt = 2400
    """From a job's start to its first step: Ray, model load. Earlier attempts replace the figure."""
    save_seconds: PositiveInt = 600
    """Expected seconds to save a checkpoint."""
    stall_seconds: PositiveInt = 7200
    """End an attempt after so long without a new step, start-up aside."""
    wandb_project: str | None = None
    """None: Weights & Biases is off."""
    wandb_entity: str | None = None
    """Team or user of wandb_project; none: the account's own."""

    @model_validator(mode="after")
    def _entity_has_a_project(self) -> "NemoRlSite":
        if self.wandb_entity is not None and self.wandb_project is None:
            raise invalid("wandb_entity is for a wandb_project; name one, or leave it out")
        return self


class Site(Strict):
    """Settings of a machine or cluster. Changes no weight."""

    name: Name
    description: str = ""
    threads: PositiveInt = Field(description="CPU threads of each process of a training, or of an evaluation.")
    accelerator: Literal["auto", "cuda", "cpu"] = "cpu"
    """Devices of backend trl; auto: GPUs, if any. (No GPU has been tried yet.)"""
    processes: PositiveInt | None = None
    """Processes of a training on a node; none: one a GPU, or one without GPUs."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of a GPU (80 of an H100); none: unknown until a training starts."""
    refuse_over_memory: bool = True
    """Refuse a stage of backend trl over the memory by its estimate; false: warn."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field([])
    """Where backend trl's trainers report each step (transformers' report_to), once it is installed."""
    vllm_python: str | None = None
    """Trains where vLLM samples, and scores tasks: a Python of envs/vllm.txt; none: Snakemake's own."""
    gym_python: str = GYM_PYTHON
    """The Python of the environment with NeMo-Gym, from the repository's root (default: make gym's)."""
    slurm: Slurm | None = None
    """None: everything runs on this machine."""
    stages: dict[Name, StageResources] = Field({})
    """Resources of single stages on this site."""
    nemo_rl: NemoRlSite | None = None
    """For recipes whose backend is nemo_rl."""
    group: str | None = None
    """Unix group, by name or number, whose members' trainings are published as one's own; none: only one's own are."""
    mounts: list[Mount] = Field([])
    """Mounts of containers, as host path:container path."""
    environment: dict[Variable, str] = Field({})
    """Variables of every job, such as caches (HF_HOME). No secrets: this file is no safe place."""

    @property
    def processes_on_node(self) -> int:
        """The processes of a training of backend trl on a node, by this file."""
        gpus = self.slurm.gpus_per_node if self.slurm and self.accelerator != "cpu" else 1
        return self.processes or max(gpus, 1)

    def resources_of(self, name: str, stage: StageSettings) -> Resources:
        """Return a stage's resources here: the site's over the recipe's, within the cluster's time limit."""
        own = self.stages.get(name, StageResources()).model_dump(exclude_none=True)
        if self.slurm is not None and self.slurm.max_runtime is not None:
            own["runtime"] = min(own.get("runtime", stage.resources.runtime), self.slurm.max_runtime)
        return stage.resources.model_copy(update=own)
