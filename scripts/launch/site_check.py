"""Whether a cluster has what the site's file and the recipe's stages ask for; asked of sinfo before submitting."""

import re
from dataclasses import dataclass

from scripts.errors import UserError
from scripts.launch.slurm import ask
from scripts.recipe.site import Slurm
from scripts.recipe.stage import Resources
from scripts.recipe.strict import nearest

FORMAT = "%P|%a|%l|%D|%G|%f"
GPUS = re.compile(r"gpu(?::[^:,(]+)*:(\d+)")


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one partition that are alike; `limit` in minutes, None: none."""

    partition: str
    is_default: bool
    is_up: bool
    limit: float | None
    nodes: int
    gpus: int
    features: frozenset[str]


def node_groups(text: str) -> list[NodeGroup]:
    """The nodes in sinfo's output in FORMAT."""
    groups = []
    for line in text.splitlines():
        partition, up, limit, nodes, gres, features = line.split("|")
        groups.append(
            NodeGroup(
                partition.rstrip("*"),
                partition.endswith("*"),
                up == "up",
                minutes(limit),
                int(nodes),
                sum(map(int, GPUS.findall(gres))),
                frozenset(features.split(",")),
            )
        )
    return groups


def minutes(limit: str) -> float | None:
    """A time limit as Slurm writes it ([days-]hours:minutes:seconds, minutes:seconds, infinite), in minutes."""
    if limit in ("infinite", "n/a"):
        return None
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    seconds = sum(part * 60**place for place, part in enumerate(reversed(parts)))
    return int(days or 0) * 1440 + seconds / 60


def check_site(path: str, slurm: Slurm, stages: dict[str, Resources]) -> None:
    """UserError that lists everything which the cluster has not or does not allow."""
    groups = node_groups(ask("sinfo", "--noheader", f"--format={FORMAT}"))
    problems = _problems(path, slurm, stages, groups)
    if slurm.reservation:
        try:
            ask("scontrol", "show", "reservation", slurm.reservation)
        except UserError as error:
            problems.append(f"{path}: slurm.reservation: {error}")
    if problems:
        raise UserError("the site's file asks for what this cluster has not:\n  " + "\n  ".join(problems))


def _problems(path: str, slurm: Slurm, stages: dict[str, Resources], groups: list[NodeGroup]) -> list[str]:
    names = {group.partition for group in groups}
    problems = []
    for key, wanted in (("partition", slurm.partition), ("light.partition", slurm.light.partition)):
        for name in (wanted or "").split(","):
            if name and name not in names:
                problems.append(f"{path}: slurm.{key}: no partition is named {name}{nearest(name, names)}")
    ours = (slurm.partition or "").split(",")
    here = [group for group in groups if (group.partition in ours if slurm.partition else group.is_default)]
    if problems or not here:
        return problems or [f"{path}: slurm.partition: the cluster has no default partition; name one"]
    if not any(group.is_up for group in here):
        problems.append(f"{path}: slurm.partition: {slurm.partition or here[0].partition} is down")
    fit = here
    if slurm.constraint and re.fullmatch(r"[\w.+-]+", slurm.constraint):
        fit = [group for group in here if slurm.constraint in group.features]
        if not fit:
            words = set().union(*(group.features for group in here)) - {"(null)"}
            return [
                *problems,
                f"{path}: slurm.constraint: no node has {slurm.constraint}{nearest(slurm.constraint, words)}",
            ]
    with_gpus = [group for group in fit if group.gpus == slurm.gpus_per_node or not slurm.gpus_per_node]
    if not with_gpus:
        have = sorted({group.gpus for group in fit})
        return [
            *problems,
            f"{path}: slurm.gpus_per_node is {slurm.gpus_per_node}, but the nodes of {here[0].partition} have "
            f"{' or '.join(map(str, have))}",
        ]
    there = sum(group.nodes for group in with_gpus)
    most = min(there, slurm.max_nodes or there)
    limits = [group.limit for group in with_gpus]
    limit = None if None in limits else max(limits)
    for stage, resources in stages.items():
        if resources.nodes > most:
            problems.append(f"{path}: stage {stage} asks for {resources.nodes} nodes, but can get {most} at most")
        if limit is not None and resources.runtime > limit:
            problems.append(
                f"{path}: stage {stage} asks for {resources.runtime} minutes, but {limit:.0f} is the longest allowed; "
                f"set slurm.max_runtime: {limit:.0f}, and it goes on over several allocations"
            )
    return problems
