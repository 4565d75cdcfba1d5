"""Place a stage: device, processes, the GPUs left beside a vLLM server, equal shares of a step."""

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithm import TrlConfig, TrlSettings
from scripts.errors import UserError
from scripts.recipe.site import Site


def devices_of(site: Site) -> tuple[str, int]:
    """`cuda` or `cpu`, and the processes of a training on this node: one a GPU, one on CPUs unless the site says more.

    UserError where the site asks for GPUs that this node has not.
    """
    if site.accelerator == "cpu":
        return "cpu", site.processes or 1
    import torch  # noqa: PLC0415 - seconds, and only where GPUs are looked for

    found = torch.cuda.device_count()
    if found == 0:
        if site.accelerator == "cuda":
            raise UserError(f"site {site.name}: accelerator is cuda, but torch {torch.__version__} sees no GPU here")
        return "cpu", site.processes or 1
    wanted = site.processes_on_node if site.slurm else site.processes or found
    if wanted > found:
        raise UserError(f"site {site.name}: {wanted} processes need as many GPUs, but torch sees {found} here")
    return "cuda", wanted


def offloads(job: TrainingJob) -> bool:
    """Whether what a GPU does not need at once waits in the node's memory; on CPUs it lies there anyway."""
    return job.settings.policy.dtensor_cfg.cpu_offload and job.accelerator == "cuda"


def is_served(settings: TrlSettings) -> bool:
    """Whether a vLLM server samples the rollouts of a stage."""
    return settings.samples_by_vllm and not settings.policy.generation.colocated.enabled


def left_by_server(stage: str, settings: TrlSettings, nodes: int, processes: int, on_gpus: bool) -> tuple[int, int]:
    """The nodes and processes on each that train beside a vLLM server, if there is one; UserError where none would."""
    if not is_served(settings):
        return nodes, processes
    if not on_gpus:
        raise UserError(
            f"{stage}: vLLM is served on GPUs alone; leave out policy.generation.colocated, or set the site's "
            "accelerator: cuda"
        )
    gpus = gpus_of_server(settings)
    if settings.policy.generation.colocated.resources.num_nodes:
        nodes -= 1
    else:
        processes -= gpus
    if nodes < 1 or processes < 1:
        raise UserError(
            f"{stage}: vLLM takes {'the only node' if nodes < 1 else f'{gpus} GPUs'} (policy.generation.colocated), "
            "which leaves nothing to train on; give the stage more nodes, or vLLM less"
        )
    return nodes, processes


def gpus_of_server(settings: TrlSettings) -> int:
    """The GPUs that a vLLM server has to itself."""
    generation = settings.policy.generation
    return generation.colocated.resources.gpus_per_node or generation.vllm_cfg.tensor_parallel_size


def check_shares(stage: str, config: TrlConfig, settings: TrlSettings, nodes: int, ranks: int) -> None:
    """UserError when a step of this resolved config cannot be shared out evenly among so many processes.

    Every process trains the same number of rows; completions of one prompt stay together, being rewarded together.
    """
    each = "nodes" if ranks == nodes else "processes"
    setting = "resources.nodes" if ranks == nodes else "resources.nodes or the site's processes"
    for key, value in config.shared_by_processes.items():
        if value is not None and value % ranks:
            fits = ", ".join(str(count) for count in range(1, value + 1) if value % count == 0)
            raise UserError(
                f"{stage}: {key} is {value}, which {ranks} {each} cannot share evenly; set {setting} for one of "
                f"{fits}, or {key} to a multiple of {ranks} (which is another stage, trained anew)"
            )
    share, micro = config.rows_per_update // ranks, settings.policy.train_micro_batch_size
    if micro is not None and share % min(micro, share):
        raise UserError(
            f"{stage}: policy.train_micro_batch_size is {micro}, but {share} rows of an update fall to each of "
            f"{ranks} {each}, which is no multiple of it"
        )
