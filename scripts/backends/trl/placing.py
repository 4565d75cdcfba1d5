"""Place a stage: device, processes, the GPUs left beside a vLLM server, equal shares of a step."""

from scripts.backends.trl.algorithm import TrlConfig, TrlSettings
from scripts.errors import UserError
from scripts.recipe.site import Site


def devices_of(site: Site) -> tuple[str, int]:
    """Return `cuda` or `cpu`, and the processes on this node: one a GPU, on CPUs one unless the site sets more.

    UserError where the site asks for missing GPUs.
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


def is_served(settings: TrlSettings) -> bool:
    """Whether a vLLM server samples the rollouts of a stage."""
    return settings.samples_by_vllm and not settings.policy.generation.colocated.enabled


def left_by_server(stage: str, settings: TrlSettings, nodes: int, on_gpus: bool) -> int:
    """Return the nodes left beside a vLLM server, which takes a node; UserError where none are left."""
    if not is_served(settings):
        return nodes
    if not on_gpus:
        raise UserError(
            f"{stage}: vLLM is served on GPUs alone; leave out policy.generation.colocated, or set the site's "
            "accelerator: cuda"
        )
    if nodes < 2:
        raise UserError(
            f"{stage}: vLLM takes the only node (policy.generation.colocated), which leaves nothing to train on; give "
            "the stage more nodes (resources.nodes), or leave colocated out"
        )
    return nodes - 1


def check_shares(stage: str, config: TrlConfig, settings: TrlSettings, nodes: int, ranks: int) -> None:
    """Raise UserError where processes cannot share a step of the resolved config evenly.

    Every process trains equally many rows; the completions of a prompt, rewarded together, stay together.
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
