"""Resources of jobs, in the names of the Slurm plugin, and what of them the cluster lacks by sinfo.

None: nothing is asked for under the name.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scripts.errors import UserError
from scripts.recipe.site import Site, Slurm, StageResources
from scripts.recipe.stage_settings import Resources
from scripts.recipe.strict import nearest
from scripts.slurm.client import SlurmUnreachableError, ask

PUBLISHING_MINUTES = 5
FORMAT = "%P|%a|%l|%D|%G|%f"
GPUS = re.compile(r"gpu(?::[^:,(]+)*:(\d+)")
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
    if (slurm := site.slurm) is None:
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
    if (slurm := site.slurm) is None:
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


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a partition; `limit` in minutes, None for no limit."""

    partition: str
    is_default: bool
    is_up: bool
    limit: float | None
    nodes: int
    gpus: int
    features: frozenset[str]


def node_groups(text: str) -> list[NodeGroup]:
    """Parse sinfo's output in FORMAT."""
    return [
        NodeGroup(
            partition.rstrip("*"),
            partition.endswith("*"),
            state == "up",
            minutes(limit),
            int(nodes),
            sum(map(int, GPUS.findall(gres))),
            frozenset(features.split(",")),
        )
        for partition, state, limit, nodes, gres, features in (line.split("|") for line in text.splitlines())
    ]


def minutes(limit: str) -> float | None:
    """Convert Slurm's time limit ([days-]hours:minutes:seconds, minutes:seconds, infinite) to minutes."""
    if limit in ("infinite", "n/a"):
        return None
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    return int(days or 0) * 1440 + seconds / 60


def check_executor(path: str, site: Site, executor: str) -> None:
    """UserError where Snakemake's executor does not fit the site, or this machine has no Slurm."""
    here = "config/sites/laptop.yaml trains on this machine: --config site=config/sites/laptop.yaml, without --profile"
    if executor != "slurm":
        if site.slurm:
            raise UserError(f"{path} trains through Slurm: snakemake --profile slurm ({here})")
        return
    try:
        ask("sinfo", "--noheader", "--format=%P")
    except SlurmUnreachableError:
        raise
    except UserError as error:
        use = here if site.slurm else f"{path} trains on this machine: leave out --profile slurm"
        raise UserError(f"this machine has no Slurm; call snakemake on a login node ({use}): {error}") from None
    if site.slurm is None:
        raise UserError(
            f"{path} has no slurm section, but --profile slurm needs a partition: set site in config/config.yaml to "
            "config/sites/cluster.yaml, with your partition, or leave out --profile slurm to train here"
        )


def check_site(path: str, site: Site, stages: dict[str, Resources], beside: Mapping[str, int] | None = None) -> None:
    """UserError listing everything that the cluster lacks or forbids; `beside`: nodes of second components by stage."""
    groups = node_groups(ask("sinfo", "--noheader", f"--format={FORMAT}"))
    found = (
        problem
        for name, resources in stages.items()
        for problem in _problems(site, name, resources, (beside or {}).get(name, 0), groups)
    )
    if problems := list(dict.fromkeys(found)):
        lines = "\n  ".join(f"{path}: {problem}" for problem in problems)
        raise UserError(f"the site asks for more than the cluster has:\n  {lines}")


def _problems(site: Site, stage: str, resources: Resources, beside: int, groups: list[NodeGroup]) -> Iterator[str]:
    slurm, own = site.for_stage(stage).slurm, site.stages.get(stage, StageResources())
    at = {key: f"stages.{stage}.{key}" if getattr(own, key) else f"slurm.{key}" for key in ("partition", "constraint")}
    names, ours = {group.partition for group in groups}, (slurm.partition or "").split(",")
    asked = {at["partition"]: ours, "slurm.light.partition": (slurm.light.partition or "").split(",")}
    unknown = [(key, name) for key, wanted in asked.items() for name in wanted if name and name not in names]
    if unknown:
        yield from (f"{key}: no partition is named {name}{nearest(name, names)}" for key, name in unknown)
        return
    nodes = [group for group in groups if (group.partition in ours if slurm.partition else group.is_default)]
    if not nodes:
        yield "slurm.partition: the cluster has no default partition; name one"
        return
    partition = nodes[0].partition
    if not any(group.is_up for group in nodes):
        yield f"{at['partition']}: {slurm.partition or partition} is down"
    if slurm.constraint and re.fullmatch(r"[\w.+-]+", slurm.constraint):
        features = set().union(*(group.features for group in nodes)) - {"(null)"}
        nodes = [group for group in nodes if slurm.constraint in group.features]
        if not nodes:
            yield f"{at['constraint']}: no node has {slurm.constraint}{nearest(slurm.constraint, features)}"
            return
    gpus = " or ".join(map(str, sorted({group.gpus for group in nodes})))
    asks_gpus = slurm.gpus_per_node and slurm.gres is None  # sbatch alone understands another GRES
    nodes = [group for group in nodes if not asks_gpus or group.gpus == slurm.gpus_per_node]
    if not nodes:
        yield f"slurm.gpus_per_node is {slurm.gpus_per_node}, but the nodes of {partition} have {gpus}"
        return
    count = sum(group.nodes for group in nodes)
    most = min(count, slurm.max_nodes or count)
    limit = max(math.inf if group.limit is None else group.limit for group in nodes)
    asked = resources.nodes + beside if beside else slurm.nodes_asked(resources.nodes)
    if asked > most:
        yield f"stage {stage} asks for {asked} nodes, but can get {most} at most"
    if resources.runtime > limit:
        yield (
            f"stage {stage} asks for {resources.runtime} minutes, but {limit:.0f} is the longest allowed; "
            f"set slurm.max_runtime: {limit:.0f}, and it goes on over several allocations"
        )
