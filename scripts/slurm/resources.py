"""Resources of jobs, in the names of the Slurm plugin; keys that the site leaves out are left out."""

from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Resources

PUBLISHING_MINUTES = 5


def training_resources(
    site: Site, resources: Resources, publishes_only: bool = False, waits: bool = False
) -> dict[str, int | str]:
    """Return a training job's resources; a light job's when it `publishes_only`, perhaps after a wait."""
    slurm = site.slurm
    if publishes_only:
        light = light_resources(site)
        patience = resources.runtime if waits else light.get("runtime", PUBLISHING_MINUTES)
        here = {"nodes": 1, "mem_mb": resources.mem_mb}
        return {"gres": "", "slurm_extra": "", "constraint": "", "tasks": 1, **here, **light, "runtime": patience}
    if slurm is None:
        return resources.model_dump(include={"nodes", "runtime", "mem_mb"})
    extra = ["--exclusive"] if slurm.exclusive else []
    extra += [f"--reservation={slurm.reservation}"] if slurm.reservation else []
    return {
        **_common(site),
        **_named(slurm_partition=slurm.partition, constraint=slurm.constraint),
        "nodes": resources.nodes,
        "runtime": resources.runtime,
        "mem_mb": resources.mem_mb,
        "tasks": 0 if slurm.gpus_per_node else resources.nodes,
        "gres": f"gpu:{slurm.gpus_per_node}" if slurm.gpus_per_node else "",
        "cpus_per_task": -1 if slurm.exclusive else site.threads * site.processes_on_node,
        "slurm_extra": " ".join(extra),
    }


def one_node_resources(site: Site) -> dict[str, int | str]:
    """Return the resources of a job on a whole training node for a light job's time."""
    minutes = site.slurm.light.runtime if site.slurm else PUBLISHING_MINUTES
    return training_resources(site, Resources(nodes=1, runtime=minutes, mem_mb=0))


def light_resources(site: Site) -> dict[str, int | str]:
    """Return the resources of a light job."""
    slurm = site.slurm
    if slurm is None:
        return {}
    own = slurm.light.partition
    return {
        **_common(site),
        **_named(slurm_partition=own or slurm.partition, constraint=None if own else slurm.constraint),
        "nodes": 1,
        "runtime": slurm.light.runtime,
        "mem_mb": slurm.light.mem_mb,
        "cpus_per_task": slurm.light.cpus,
    }


def _common(site: Site) -> dict[str, str]:
    return _named(slurm_account=site.slurm.account, qos=site.slurm.qos)


def _named(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
