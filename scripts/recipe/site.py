"""Typed model of a site: settings of a machine or cluster. Changes no weight."""

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from scripts.recipe.stage_settings import Resources, StageSettings
from scripts.recipe.strict import Memory, Name, Strict, invalid, matching

Word = matching(r"^[\w][\w.+-]*$")
Words = matching(r"^[\w][\w.,+-]*$")
Gres = matching(r"^\w[\w.:,+-]*$")
Constraint = matching(r"^[\w\[(][\w.,+\-&|*()\[\]]*$")
Mount = matching(r"^/[^:,\s]*:/[^:,\s]*(:(ro|rw))?$")
Variable = matching(r"^[A-Za-z_][A-Za-z0-9_]*$")
FolderPath = matching(r"^/[^\s:,]*$")
GYM_PYTHON = ".venv-gym/bin/python"
Port = Annotated[int, Field(ge=1024, le=65535)]
TAKEN = {
    "has a key of its own beside arguments": "account constraint partition qos",
    "is slurm.reservation": "reservation",
    "is slurm.exclusive": "exclusive oversubscribe",
    "is slurm.requeue": "no-requeue requeue",
    "is slurm.gres": "gpus gpus-per-node gpus-per-socket gpus-per-task gres",
    "is mem_mb": "mem mem-per-cpu mem-per-gpu",
    "is runtime, in minutes": "time",
    "follows from nodes, gpus_per_node and threads": "cores-per-socket cpus-per-gpu cpus-per-task extra-node-info nodes"
    " ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket sockets-per-node tres-per-task",
    "is Stagecoach's, to find a job and its log": "chdir error export export-file input job-name output"
    " parsable workdir",
    "would start a stage's trainings side by side": "array",
    "names clusters that Stagecoach does not ask about jobs": "clusters",
    "ends a training that stops by itself before its time limit (slurm.margin)": "signal",
    "submits no job, another one, or waits for its end": "help test-only usage version wait wrap",
}
"""sbatch's options that Stagecoach or Snakemake's plugin sets, by the reason."""


def _is_free(option: str) -> str:
    """Refuse an option of TAKEN; sbatch takes the beginning of an option's name for the option."""
    for reason, options in TAKEN.items():
        for taken in options.split():
            if taken.startswith(option):
                raise invalid(f"sbatch's --{taken} {reason}")
    return option


def _is_line(value: object) -> object:
    if not isinstance(value, bool | int | str) or not str(value).isprintable():
        raise invalid("an option of sbatch has a line of text, a number, true or false")
    return value


Option = Annotated[matching(r"^[a-z][a-z0-9-]+$"), AfterValidator(_is_free)]
Value = Annotated[bool | int | str, BeforeValidator(_is_line)]


class Ports(Strict):
    """Ports of a stage's Ray cluster, equal on all nodes; a node carries one stage at a time."""

    gone = dict.fromkeys(
        ("workers_min", "workers_max"), "leave it out; Ray's worker processes take ports 10002 to 19999"
    )

    gcs: Port = 6379
    """Port of the head, for the nodes and the driver."""


class Submission(Strict):
    """The way of jobs into Slurm's queue, in sbatch's words."""

    account: Word | None = None
    partition: Words | None = None
    """A partition, or a comma list."""
    constraint: Constraint | None = None
    qos: Word | None = None
    arguments: dict[Option, Value] = Field({})
    """More options of sbatch by their long names, such as comment or exclude; true: without a value, false: none."""


class LightJobs(Submission):
    """Jobs without training: data, exports, evaluations, publishing. None: as training, but for arguments."""

    cpus: PositiveInt = 2
    mem_mb: Annotated[Memory, Field(gt=0)] = 4000
    """Memory, in MB or as 64G."""
    runtime: PositiveInt = 60
    """Minutes."""


class StageResources(Submission):
    """A stage's resources on this site, over its recipe's and the site's; arguments are joined with the site's."""

    nodes: PositiveInt | None = None
    runtime: PositiveInt | None = None
    """Minutes of an allocation."""
    mem_mb: Memory | None = None
    """Memory of a node, in MB or as 64G; 0: all of a whole node's, else the partition's."""
    step_seconds: PositiveFloat | None = None
    """Expected seconds of a step here."""


class Slurm(Submission):
    """Submission of trainings to this cluster, and of other jobs by `light`."""

    reservation: Word | None = None
    max_nodes: PositiveInt | None = None
    """Most nodes of a job; none: by sinfo."""
    max_runtime: PositiveInt | None = None
    """Longest time limit in minutes; a stage's is cut to it."""
    gpus_per_node: NonNegativeInt = 8
    """Every node of a training gives all its GPUs."""
    gres: Gres | None = None
    """GRES of a node, such as gpu:h100:4 or gpu:8,nic:2, or none to ask for none; not said: gpu:<gpus_per_node>."""
    cpus_per_node: PositiveInt | None = None
    """Most CPUs of a node for NeMo-RL's Ray; none: all of the job's."""
    exclusive: bool = True
    """Give a training whole nodes."""
    requeue: bool = True
    """Requeue a training's job at the time limit."""
    sniff: bool = True
    """Look at the nodes for at most a minute before a training; those found sick or slow are left out for a day."""
    spares: NonNegativeInt = 0
    """Nodes that a training on several asks for beyond its own; sick or else last ones go back to Slurm."""
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

    def _refuse_misfits(self) -> None:
        asked = [gres.split(":") for gres in (self.gres or "").split(",") if gres.split(":")[0] == "gpu"]
        gpus = sum(int(count) if count.isdecimal() else 1 for *_, count in asked)
        if asked and gpus != self.gpus_per_node:
            raise invalid(f"gres asks for {gpus} GPUs of a node, but gpus_per_node is {self.gpus_per_node}")

    @property
    def node_gres(self) -> str:
        """Return the GRES that jobs and job steps ask of a node; empty for none."""
        gpus = f"gpu:{self.gpus_per_node}" if self.gpus_per_node else "none"
        return (self.gres or gpus).removeprefix("none")

    def nodes_asked(self, needed: int) -> int:
        """Return the nodes that a job asks for, with spares where a training needs several."""
        return needed + (self.spares if needed > 1 else 0)


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

    def _refuse_misfits(self) -> None:
        if self.wandb_entity is not None and self.wandb_project is None:
            raise invalid("wandb_entity is for a wandb_project; name one, or leave it out")


class Site(Strict):
    """Settings of a machine or cluster. Changes no weight."""

    name: Name
    description: str = ""
    threads: PositiveInt = Field(description="CPU threads of each process of a training, or of an evaluation.")
    accelerator: Literal["auto", "cuda", "cpu"] = "cpu"
    """Devices of backend trl; auto: GPUs, if any. (One H100 has been tried: benchmarks/gpu.md.)"""
    processes: PositiveInt | None = None
    """Processes of a training on a node; none: one a GPU, or one without GPUs."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of a GPU (80 of an H100); none: unknown until a training starts."""
    refuse_over_memory: bool = True
    """Refuse a stage of backend trl over the memory by its estimate; false: warn."""
    try_batch: bool | None = None
    """Let a preflight of backend trl train, save and export one batch; none: of recipes with a pretrained model."""
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

    def for_stage(self, name: str) -> "Site":
        """Return the site with a stage's account, partition, constraint, QOS and arguments over the cluster's."""
        if self.slurm is None:
            return self
        own = self.stages.get(name, StageResources()).model_dump(include={*Submission.model_fields}, exclude_none=True)
        own["arguments"] = self.slurm.arguments | own["arguments"]
        return self.model_copy(update={"slurm": self.slurm.model_copy(update=own)})

    def resources_of(self, name: str, stage: StageSettings) -> Resources:
        """Return a stage's resources here: the site's over the recipe's, within the cluster's time limit."""
        own = self.stages.get(name, StageResources()).model_dump(include={*Resources.model_fields}, exclude_none=True)
        if self.slurm is not None and self.slurm.max_runtime is not None:
            own["runtime"] = min(own.get("runtime", stage.resources.runtime), self.slurm.max_runtime)
        return stage.resources.model_copy(update=own)
