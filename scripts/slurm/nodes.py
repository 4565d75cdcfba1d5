"""Look at the nodes of a Slurm job before a training: which are sick or slow, and which go back to Slurm."""

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from scripts.errors import UserError, warn
from scripts.processes import end_session
from scripts.recipe.site import Slurm
from scripts.slurm import sniff
from scripts.slurm.client import Job, client_environment, job_of, retry_unreachable, run_client, step_command

LONGEST = 60.0
ROOM_MB = 1000
CLOCK_SECONDS = 1.0
SLOWER = {"product": (2.0, 4.0), "copy": (2.0, 4.0), "gpu_product": (1.1, 1.5), "gpu_copy": (1.1, 1.5)}
"""Times the median of the nodes from which a node is slow, and from which it is sick."""
NOT_STARTED = re.compile(r"failed on node (\S+): (.*)")


@dataclass(frozen=True)
class Health:
    """The nodes that cannot train (`sick`) or slow the rest (`slow`), with reasons, and the seconds of the look."""

    sick: dict[str, str] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def look_at(job: Job, slurm: Slurm) -> Health:
    """Run scripts.slurm.sniff on every node of a job for at most a minute; on a single node without timings.

    Where most nodes give no answer, nothing is known of any, and a warning says so. UserError where all of several
    nodes are sick: then the site's file is likelier wrong.
    """
    program = [sys.executable, "-P", str(Path(sniff.__file__))]
    command = [*program, "--quick"]
    if len(job.nodes) > 1:
        gres = slurm.node_gres
        command = [*step_command(job, job.nodes, gres, "all"), "--kill-on-bad-exit=0", "--mpi=none", *program]
    began, launched = time.monotonic(), time.time()
    answers, words = _answers(command, client_environment() | {"SLURMD_NODENAME": job.nodes[0]}, launched)
    sick, slow = judge(answers, slurm.gpus_per_node)
    silent = [node for node in job.nodes if node not in answers]
    if unable := {node: why for node, why in NOT_STARTED.findall(words) if node in silent}:
        sick |= {node: f"Slurm starts nothing there: {why}" for node, why in unable.items()}
    elif 2 * len(silent) > len(job.nodes):
        warn(f"the nodes were not looked at: {words.strip()[-300:] or 'no answer'}")
    else:
        sick |= dict.fromkeys(silent, f"no answer within {LONGEST:.0f} s")
    health = Health(sick, slow, round(time.monotonic() - began, 1))
    print(f"{len(job.nodes)} nodes looked at in {health.seconds} s{_listed(sick | slow)}", flush=True)
    if len(job.nodes) > 1 and len(sick) == len(job.nodes):
        raise UserError(f"all nodes are sick{_listed(sick)}; mend the site's slurm section, or set slurm.sniff: false")
    return health


def _answers(command: list[str], environment: dict[str, str], launched: float) -> tuple[dict[str, dict[str, Any]], str]:
    """Return each node's measurements, with bounds of its clock's offset in seconds, and the other words printed."""
    answers, words = {}, ""
    step = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    limit = threading.Timer(LONGEST, end_session, (step, 1.0))
    limit.start()
    try:
        for line in step.stdout:
            if not line.startswith("{"):
                words += line
                continue
            told = json.loads(line)
            told["ahead"] = told["clock"] - time.time()  # at least: the line took a while to come
            told["behind"] = launched - (told["clock"] - told["elapsed"])  # at least: so did the start
            answers[told["node"]] = told
    finally:
        limit.cancel()
        end_session(step, grace=1.0)
    return answers, words


def judge(answers: Mapping[str, Mapping[str, Any]], gpus: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sick and the slow nodes with reasons, by their measurements; `gpus` is the site's number of a node.

    Without nvidia-smi on any node nothing is said of GPUs. Room and speed are held against the other nodes'.
    """
    sick = {node: "; ".join(why) for node, told in answers.items() if (why := list(_ills(told, answers, gpus)))}
    throttled = {node: told["throttled"] for node, told in answers.items() if told.get("throttled")}
    slow = {node: f"{count} GPUs are slowed by their hardware" for node, count in throttled.items()}
    for name, (bound, worst) in SLOWER.items():
        times = {node: told[name] for node, told in answers.items() if name in told}
        usual = median_low(times.values()) if times else 0.0
        for node, seconds in times.items():
            if seconds > bound * usual:
                why = f"{name} {1000 * seconds:.1f} ms, the nodes' median {1000 * usual:.1f} ms"
                (sick if seconds > worst * usual else slow).setdefault(node, why)
    return sick, {node: why for node, why in slow.items() if node not in sick}


def _ills(told: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]], gpus: int) -> Iterator[str]:
    if any("gpus" in other for other in answers.values()) and (count := told.get("gpus", 0)) < gpus:
        yield f"{count} GPUs instead of {gpus}"
    if told.get("ecc"):
        yield f"{told['ecc']} uncorrected ECC errors"
    if told.get("xids"):
        yield f"Xid {', '.join(map(str, told['xids']))} within a day"
    for key, place in {"disk_mb": tempfile.gettempdir(), "shm_mb": "/dev/shm"}.items():  # noqa: S108
        most = max(other.get(key, 0) for other in answers.values())
        if told.get(key, most) < ROOM_MB <= most:
            yield f"{place} has {told[key]:.0f} MB free"
    for side in ("ahead", "behind"):
        if told[side] > CLOCK_SECONDS:
            yield f"its clock is {told[side]:.1f} s {side}"


def without_spares(job: Job, health: Health, needed: int) -> Job:
    """Give the nodes beyond `needed` back to Slurm, the sick first, then slow, then last ones; return the smaller job.

    The job's first node stays: this process runs there.
    """
    if len(job.nodes) <= needed:
        return job
    first, *others = job.nodes
    kept = {first, *sorted(others, key=lambda node: (node in health.sick, node in health.slow))[: needed - 1]}
    nodes = [node for node in job.nodes if node in kept]
    print(f"nodes given back: {', '.join(node for node in job.nodes if node not in kept)}", flush=True)
    update = ["scontrol", "update", f"JobId={job.id}", f"ReqNodeList={','.join(nodes)}"]
    try:
        with tempfile.TemporaryDirectory() as folder:  # scontrol leaves scripts in its working directory
            retry_unreachable(lambda: run_client(["env", f"--chdir={folder}", *update], client_environment()))
    except UserError as error:
        raise UserError(f"Slurm does not take spare nodes back; set slurm.spares: 0 ({error})") from None
    return retry_unreachable(lambda: job_of(job.id))


def _listed(nodes: Mapping[str, str]) -> str:
    return "".join(f"; {node}: {why}" for node, why in nodes.items())
