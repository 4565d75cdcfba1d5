"""Resources of jobs, in the names of the Slurm plugin; None: nothing is asked for under the name."""

import math
import shlex
from collections.abc import Iterable, Mapping

from scripts.recipe.site import Site, Slurm
from scripts.recipe.stage_settings import Resources

PUBLISHING_MINUTES = 5
ARGUMENTS = "sbatch_arguments"
"""The resource with options of sbatch that the plugin cannot say, quoted for a shell."""
SECOND = "second_component"
"""The resource with the options of a heterogeneous job's second component, quoted likewise."""


def training_resources(
    site: Site,
    resources: Resources,
    publishes_only: bool = False,
    waits: bool = False,
    away: Iterable[str] = (),
    beside: int = 0,
) -> dict[str, int | str | None]:
    """Return a training job's resources, without the nodes `away`; a light job's when it `publishes_only` or waits.

    `beside`: the nodes of a second component. Such a job asks for no spares, which Slurm would not take back.
    """
    slurm = site.slurm
    if slurm is None:
        minutes = resources.runtime if waits or not publishes_only else PUBLISHING_MINUTES
        return {"nodes": 1 if publishes_only else resources.nodes, "runtime": minutes, "mem_mb": resources.mem_mb}
    extra = ["--exclusive"] if slurm.exclusive else []
    extra += [f"--reservation={slurm.reservation}"] if slurm.reservation else []
    arguments = {"gres": slurm.node_gres or False} if slurm.gres else {}
    arguments |= {"mem": "0"} if slurm.exclusive and not resources.mem_mb else {}
    if excluded := [*filter(None, [slurm.arguments.get("exclude")]), *away]:
        arguments["exclude"] = ",".join(map(str, excluded))
    gres = None if slurm.gres else slurm.node_gres
    nodes = resources.nodes if beside else slurm.nodes_asked(resources.nodes)
    full = {
        "slurm_account": slurm.account,
        "slurm_partition": slurm.partition,
        "constraint": slurm.constraint,
        "qos": slurm.qos,
        "nodes": nodes,
        "runtime": resources.runtime,
        "mem_mb": resources.mem_mb,
        "tasks": 0 if gres else nodes,
        "gres": gres or None,
        "cpus_per_task": -1 if slurm.exclusive else site.threads * site.processes_on_node,
        "slurm_extra": " ".join(extra) or None,
        ARGUMENTS: quoted(slurm.arguments | arguments),
        SECOND: _second_component(slurm, resources, beside, arguments) if beside else None,
    }
    if not publishes_only:
        return full
    light = light_resources(site)
    return dict.fromkeys(full) | light | {"tasks": 1} | ({"runtime": resources.runtime} if waits else {})


def _second_component(
    slurm: Slurm, resources: Resources, nodes: int, arguments: Mapping[str, bool | int | str]
) -> str | None:
    """Return sbatch's options of a component on `nodes`, which inherits none of the first component's."""
    options = {"account": slurm.account, "partition": slurm.partition, "constraint": slurm.constraint, "qos": slurm.qos}
    options |= {"reservation": slurm.reservation, "time": resources.runtime, "nodes": nodes, "ntasks": nodes}
    options |= {"mem": resources.mem_mb or None, "gres": slurm.node_gres or None, "exclusive": slurm.exclusive}
    options |= {"requeue": True, **slurm.arguments, **arguments}  # a job is requeued if all its components may be
    if segment := options.get("segment"):
        options["segment"] = math.gcd(int(segment), nodes)
    return quoted({name: value for name, value in options.items() if value is not None})


def one_node_resources(site: Site) -> dict[str, int | str | None]:
    """Return the resources of a job on a whole training node for a light job's time."""
    minutes = site.slurm.light.runtime if site.slurm else PUBLISHING_MINUTES
    return training_resources(site, Resources(nodes=1, runtime=minutes, mem_mb=0))


def light_resources(site: Site) -> dict[str, int | str | None]:
    """Return the resources of a light job."""
    slurm = site.slurm
    if slurm is None:
        return {}
    light = slurm.light
    return {
        "slurm_account": light.account or slurm.account,
        "slurm_partition": light.partition or slurm.partition,
        "constraint": light.constraint or (None if light.partition else slurm.constraint),
        "qos": light.qos or slurm.qos,
        "nodes": 1,
        "runtime": light.runtime,
        "mem_mb": light.mem_mb,
        "cpus_per_task": light.cpus,
        ARGUMENTS: quoted(light.arguments),
    }


def quoted(arguments: Mapping[str, bool | int | str]) -> str | None:
    """Return options of sbatch as words of a shell; None without options."""
    stated = {name: value for name, value in arguments.items() if value is not False}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in stated.items()]
    return shlex.join(words) or None
