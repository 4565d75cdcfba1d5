"""Look at the nodes of a Slurm job before a training: which are sick or slow, and which go back to Slurm."""

import json
import re
import subprocess
import sys
import time
from statistics import median_low
from typing import Any, NamedTuple

from scripts.errors import UserError, warn
from scripts.files import scratch_folder
from scripts.recipe.site import Slurm
from scripts.slurm import sniff
from scripts.slurm.client import Job, client_environment, job_of, retry_unreachable, run_client, step_command

LONGEST = 60
ROOM_MB = 1000
CLOCK_SECONDS = 1.0
SLOWER = {"product": (2.0, 4.0), "copy": (2.0, 4.0), "gpu_product": (1.1, 1.5), "gpu_copy": (1.1, 1.5)}
"""Times the nodes' median from which a node is slow, and from which a node is sick."""
NOT_STARTED = re.compile(r"failed on node (\S+): (.*)")


class Health(NamedTuple):
    """The nodes that cannot train (`sick`) or slow the rest (`slow`), with reasons, and the seconds of the look."""

    sick: dict[str, str]
    slow: dict[str, str]
    seconds: float


def look_at(job: Job, slurm: Slurm) -> Health:
    """Run scripts.slurm.sniff on every node of a job for at most a minute; on a single node without timings.

    Where most nodes are silent, nothing is known, and a warning says so. UserError where all of several nodes are sick:
    then the site's file is likelier wrong.
    """
    command, environment, nodes = [sys.executable, "-P", sniff.__file__], client_environment(), job.nodes + job.beside
    if len(nodes) > 1:
        limit, more = ["timeout", "--kill-after=5", str(LONGEST)], ["--kill-on-bad-exit=0", "--mpi=none"]
        steps = [step_command(job, job.nodes, slurm.node_gres, "all")]
        if job.beside:
            steps.append([*step_command(job, job.beside, slurm.node_gres, "all"), "--het-group=1"])
        commands = [[*limit, *step, *more, *command] for step in steps]
    else:
        commands, environment = [[*command, "--quick"]], environment | {"SLURMD_NODENAME": nodes[0]}
    began = time.time()
    looks = [subprocess.Popen(each, env=environment, stdout=-1, stderr=-2, text=True) for each in commands]
    told = [line for look in looks for line in look.communicate()[0].splitlines()]
    seconds, lines = time.time() - began, [json.loads(line) for line in told if line.startswith("{")]
    sick, slow = judge(answers := {line["node"]: line for line in lines}, slurm.gpus_per_node, began, seconds)
    silent = {node: f"no answer within {LONGEST} s" for node in nodes if node not in answers}
    if unable := dict(found.groups() for line in told if (found := NOT_STARTED.search(line))):
        sick |= {node: f"Slurm starts nothing there: {why}" for node, why in unable.items() if node in silent}
    elif 2 * len(silent) > len(nodes):
        warn(f"the nodes were not looked at: {' '.join(told)[-300:] or 'no answer'}")
    else:
        sick |= silent
    found = "".join(f"; {node}: {why}" for node, why in (sick | slow).items())
    print(f"looked at {len(nodes)} nodes in {seconds:.1f} s{found}", flush=True)
    if len(nodes) > 1 and len(sick) == len(nodes):
        raise UserError(f"all nodes are sick{found}; mend the site's slurm section, or set slurm.sniff: false")
    return Health(sick, slow, round(seconds, 1))


def judge(answers: dict[str, dict[str, Any]], gpus: int, began: float, seconds: float) -> tuple[dict[str, str], ...]:
    """Return the sick and the slow nodes with reasons, by their measurements; `gpus` is the site's number of a node.

    The look `began` at a time of this host and took some `seconds`. Where nvidia-smi shows no GPU on any node, nothing
    is said of GPUs. Room and speed are held against the other nodes'.
    """
    sick, slow = {}, {node: "a GPU is slowed by its hardware" for node, told in answers.items() if told["throttled"]}
    most = {key: max(told[key] for told in answers.values()) for key in ("gpus", "disk_mb", "shm_mb") if answers}
    for node, told in answers.items():
        off = max(ahead := told["clock"] - began - seconds, began - told["clock"] + told["elapsed"])
        ills = {
            f"{told['gpus']} GPUs instead of {gpus}": most["gpus"] and told["gpus"] < gpus,
            f"{told['ecc']} uncorrected ECC errors": told["ecc"],
            f"Xid {', '.join(map(str, told['xids']))} within a day": told["xids"],
            f"/tmp has {told['disk_mb']:.0f} MB free": told["disk_mb"] < ROOM_MB <= most["disk_mb"],  # noqa: S108
            f"/dev/shm has {told['shm_mb']:.0f} MB free": told["shm_mb"] < ROOM_MB <= most["shm_mb"],  # noqa: S108
            f"its clock is {off:.1f} s {'ahead' if off == ahead else 'behind'}": off > CLOCK_SECONDS,
        }
        if why := "; ".join(ill for ill, holds in ills.items() if holds):
            sick[node] = why
    for name, (bound, worst) in SLOWER.items():
        times = {node: told[name] for node, told in answers.items() if name in told}
        for node, took in times.items():
            if took > bound * (usual := median_low(times.values())):
                why = f"{name} {1000 * took:.1f} ms, the nodes' median {1000 * usual:.1f} ms"
                (sick if took > worst * usual else slow).setdefault(node, why)
    return sick, {node: why for node, why in slow.items() if node not in sick}


def without_spares(job: Job, health: Health, needed: int) -> Job:
    """Give nodes beyond `needed` back to Slurm: sick, then slow, then last ones; return the smaller job.

    The job's first node stays: this process runs there.
    """
    if len(job.nodes) <= needed:
        return job
    best = sorted(job.nodes[1:], key=lambda node: (node in health.sick, node in health.slow))
    nodes = ",".join(node for node in job.nodes if node in (job.nodes[0], *best[: needed - 1]))
    print(f"the training keeps {nodes}; the other nodes go back to Slurm", flush=True)
    with scratch_folder() as folder:  # scontrol leaves scripts in its working directory
        update = ["env", f"--chdir={folder}", "scontrol", "update", f"JobId={job.id}", f"ReqNodeList={nodes}"]
        try:
            retry_unreachable(lambda: run_client(update, client_environment()))
        except UserError as error:
            raise UserError(f"Slurm does not take spare nodes back; set slurm.spares: 0 ({error})") from None
    return retry_unreachable(lambda: job_of(job.id))
