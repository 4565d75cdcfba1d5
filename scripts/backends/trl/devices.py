"""What a site's nodes train on, and in how many processes."""

from scripts.backends.protocol import TrainingJob
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
