"""A stage that trains through Slurm on a test cluster, to be struck by faults: what is lost, and what is said."""

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from scripts.stage.training_folder import TrainingFolder
from tests.conftest import Workflow
from tests.programs import until
from tests.slurm.cluster import Cluster, ClusterError

STAGE = "rlvr1"
STEPS, SAVE_PERIOD = 80, 10
ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")


def make_base(root: Path) -> Workflow:
    """A tree in which sft is trained, and all that rlvr1 needs is there."""
    root.mkdir(parents=True, exist_ok=True)
    base = Workflow(root)
    base.edit("max_num_steps: 3}", f"max_num_steps: {STEPS}}}")
    base.edit("lr: 1.0e-3", "lr: 1.0e-5")  # so that rewards differ to the end, and every step changes the weights
    base.edit("checkpointing: {save_period: 1}", f"checkpointing: {{save_period: {SAVE_PERIOD}}}")
    base.snakemake(str(base.results.relative_to(root) / STAGE / "preflight.json"))
    return base


class Chain:
    """A copy of the tree, whose next stage Snakemake trains on a cluster while somebody watches.

    As a context it watches inside, and ends its Snakemake on the way out.
    """

    def __init__(self, base: Workflow, root: Path, cluster: Cluster, nodes: int, runtime: int = 60, **slurm: Any):
        self.tree = base.copied_to(root)
        self.tree.environment = cluster.environment
        self.root, self.cluster, self.nodes, self.runtime = root, cluster, nodes, runtime
        self.directory = self.tree.results / STAGE
        self.run = self.directory / "run"
        site = {
            "name": "test",
            "threads": 1,
            "slurm": {
                "partition": "batch",
                "max_runtime": runtime,
                "margin": 15,
                "sniff": False,
                "object_store_mb": 100,
                "light": {"cpus": 1, "mem_mb": 2000, "runtime": 10},
                **slurm,
            },
            "stages": {STAGE: {"nodes": nodes}},
        }
        (root / "config/sites/test.yaml").write_text(yaml.safe_dump(site))
        self.tree.configure(site="test")
        self.calls: list[subprocess.Popen] = []
        self.at_once: list[str] = []
        self.struck = time.monotonic()
        self.reached: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Chain":
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()
        for call in self.calls:
            if call.poll() is None:
                call.kill()
                call.wait()
        for job in self.jobs(*ALIVE):
            self.cluster.run("scancel", job["id"])

    # Calls of Snakemake

    def start(self) -> None:
        """Call Snakemake for the stage's checkpoint, as a person would, but with shorter waits."""
        ckpt = str(self.directory.relative_to(self.root) / "ckpt")
        waits = ("--seconds-between-status-checks", "2", "--slurm-init-seconds-before-status-checks", "2")
        command = ("snakemake", "--profile", "profiles/slurm", ckpt, *waits, "--latency-wait", "5")
        self.calls.append(self.tree.begin(*command))

    def end(self, timeout: float = 900) -> int:
        """Wait for Snakemake to end by itself; its exit status."""
        return self.calls[-1].wait(timeout)

    def kill(self) -> None:
        """Kill Snakemake, and nothing that it started on the cluster."""
        self.calls[-1].send_signal(signal.SIGKILL)
        self.calls[-1].wait()

    def said(self) -> str:
        """What the calls printed."""
        return self.tree.said()

    # What happens

    def until(self, condition: Callable[[], Any], seconds: float = 600) -> Any:
        """Wait for a condition; what it returned."""
        return until(condition, seconds, lambda: f"Snakemake said last: {self.said()[-500:]}")

    def steps(self) -> list[int]:
        """The steps in the order in which they were logged."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}\n")]

    def until_step(self, step: int, seconds: float = 600) -> None:
        """Wait until a step has been logged."""
        self.until(lambda: max(self.steps(), default=0) >= step, seconds)

    def until_saved(self, step: int, seconds: float = 600) -> None:
        """Wait until a checkpoint of this step or a later one lies there."""
        self.until(lambda: any(it.step >= step for it in TrainingFolder(self.run).checkpoints), seconds)

    def jobs(self, *states: str) -> list[dict[str, str]]:
        """The stage's jobs in these states (all: none given), oldest first: id, state, nodes, gpus."""
        names = ("id", "state", "comment", "nodes", "gpus")
        lines = self.cluster.run("squeue", "--noheader", "--states=all", "--sort=i", "--format=%i|%T|%k|%N|%b")
        jobs = [dict(zip(names, line.split("|"), strict=True)) for line in lines.splitlines()]
        jobs = [job for job in jobs if job["comment"] == f"rule_train_wildcards_{STAGE}" and self._is_ours(job["id"])]
        return [job for job in jobs if not states or job["state"] in states]

    def _is_ours(self, job: str) -> bool:
        return f"WorkDir={self.root}\n" in self.cluster.run("scontrol", "show", "job", job, check=False)

    def job(self, *states: str) -> dict[str, str]:
        """The stage's newest job, once there is one in one of these states."""
        return self.until(lambda: self.jobs(*states))[-1]

    def hosts(self) -> list[str]:
        """The hosts on which the stage runs, the batch host first."""
        return self.cluster.run("scontrol", "show", "hostnames", self.job("RUNNING")["nodes"]).split()

    def processes(self) -> list[str]:
        """What runs on the hosts that are up."""
        found = []
        for host in self.cluster.hosts:
            try:
                found += [f"{host}: {line}" for line in self.cluster.processes(host)]
            except ClusterError:
                continue
        return found

    def strike(self) -> None:
        """Note that the fault happens now."""
        self.struck = time.monotonic()

    def _watch(self) -> None:
        """Note when each step was reached, and two jobs of the stage with GPUs at a time."""
        asked = 0.0
        while not self._over.wait(0.1):
            highest = max(self.steps(), default=0)
            if not self.reached or highest > self.reached[-1][1]:
                self.reached.append((time.monotonic(), highest))
            if time.monotonic() - asked > 2:
                asked = time.monotonic()
                try:
                    alive = [job for job in self.jobs(*ALIVE) if "gpu" in job["gpus"]]
                except (ClusterError, subprocess.TimeoutExpired):
                    continue
                if len(alive) > 1:
                    self.at_once.append(", ".join(f"{job['id']} {job['state']}" for job in alive))

    # What came of it

    def lost_steps(self) -> int:
        """How many steps were trained twice."""
        return sum(before - after + 1 for before, after in pairwise(self.steps()) if after <= before)

    def stood_still(self) -> float:
        """The longest time without a new step since the fault, in seconds."""
        times = [self.struck, *(when for when, _ in self.reached if when > self.struck)]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def weights(self) -> str:
        """The hash of the published weights."""
        record = json.loads((self.directory / "ckpt/record.json").read_text())
        assert record["step"] == STEPS, f"published is step {record['step']}"
        assert (self.directory / "ckpt/weights/model.safetensors").is_file()
        return record["files"]["model.safetensors"]["sha256"]

    def faults_of_the_log(self) -> list[str]:
        """What in the logs would mean that two trained at once, or more than a checkpoint interval was lost."""
        steps, attempts = self.steps(), TrainingFolder(self.run).attempts
        begun = [attempt["from"] + 1 for attempt in attempts]
        found = [f"two jobs at once: {it}" for it in dict.fromkeys(self.at_once)]
        if sorted(set(steps)) != list(range(1, STEPS + 1)):
            found.append(f"not every step from 1 to {STEPS} was logged")
        for before, after in pairwise([0, *steps]):
            if after != before + 1 and after not in begun:
                found.append(f"step {after} was logged after {before}, and no attempt began there")
            if after <= before and before - after + 1 > SAVE_PERIOD:
                found.append(f"{before - after + 1} steps were lost at once, and checkpoints lie {SAVE_PERIOD} apart")
        turns = sum(after <= before for before, after in pairwise(steps))
        if turns >= len(attempts):
            found.append(f"{len(attempts)} attempts logged {turns + 1} times")
        return found

    def submitted(self) -> int:
        """How many jobs of the stage the calls of Snakemake have submitted."""
        return self.said().count("has been submitted with SLURM jobid")

    def telling(self, pattern: str) -> str | None:
        """The last line of Snakemake's output or the stage's log that has a pattern."""
        log = self.directory / "logs/attempts.log"
        lines = (self.said() + (log.read_text(errors="replace") if log.exists() else "")).splitlines()
        return next((line.strip() for line in reversed(lines) if re.search(pattern, line)), None)
