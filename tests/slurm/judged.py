"""A stage of NeMo-RL's stand-in with judges: a pool in a second component of its Slurm job, and a server elsewhere."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.command import TOOLS, VLLM_PYTHON
from scripts.stage.training_folder import TrainingFolder
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl import STAND_IN
from tests.slurm.nemo_rl_chain import STEPS, NemoRlChain

SERVER = TOOLS / "serve_vllm_on_ray.py"
NL2BASH = "judges/nl2bash"
PATIENCE = 300.0


class Elsewhere:
    """A judge on the machine itself, which the hosts reach at `address`; what it was asked is in `log`."""

    def __init__(self, checkout: Path, host: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://{host}:{port}/v1", log
        with log.open("w") as output:
            command = [sys.executable, checkout / SERVER, "serve", NL2BASH, "--port", str(port)]
            self._server = subprocess.Popen([*command, "--served-model-name", NL2BASH], stdout=output, stderr=output)

    def stop(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.wait()


class JudgedChain(NemoRlChain):
    """A tree whose rlvr1 has a pool of replicas, each on a host, and a judge elsewhere.

    `real`: a checkout of NeMo-RL, whose tools take the place of the stand-ins, but for the replica's server; `balancer`:
    the Python of its load balancers.
    """

    def __init__(
        self, root: Path, cluster: Cluster, replicas: int = 2, real: Path | None = None, balancer: str | None = None
    ) -> None:
        super().__init__(root, cluster)
        self.balancer = balancer
        shutil.copy(STAND_IN / "ray.sub", self.checkout)  # a real one asks for Ray's dashboard
        for file in (real / TOOLS).iterdir() if real else ():
            if file.name != SERVER.name:
                shutil.copy(file, self.checkout / TOOLS)
        table = yaml.safe_load((root / "envs/nemo-rl.yaml").read_text())
        table["releases"]["v0.7.0"]["can"].append("external_judges")
        (root / "envs/nemo-rl.yaml").write_text(yaml.safe_dump(table))
        environment = (root / "venvs" / VLLM_PYTHON).parents[1]
        environment.symlink_to(sys.prefix)
        self.elsewhere = Elsewhere(self.checkout, cluster.addresses["machine"], root / "elsewhere.log")
        self.judges = {
            "genrm": {
                "server": "genrm_model.responses_api_models.genrm_model",
                "model": str(root / "genrm"),
                "replicas": replicas,
                "arguments": ["--compilation-config", '{"a b": ["c"]}'],
                "environment": {"VLLM_SAID": "a value"},
            },
            "nl2bash": {
                "server": "nl2bash_judge_model.responses_api_models.local_vllm_model",
                "model": NL2BASH,
                "address": self.elsewhere.address,
            },
        }
        loop = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "async_grpo": {"enabled": False}}
        self.changes = {"judges": self.judges, "grpo": loop, "max_num_steps": STEPS}
        slow = self.changes | {"overrides": ["++stand_in.step_seconds=3"]}
        self.write_recipe(root / "config/recipes/double.yaml", **slow)
        self.write_site()

    def write_site(self, **nemo_rl: Any) -> None:
        """The site; load balancers run by `balancer` where there is one."""
        super().write_site(**nemo_rl)
        path = self.root / "config/sites/double.yaml"
        site = yaml.safe_load(path.read_text())
        if getattr(self, "balancer", None):
            site["environment"]["EXTERNAL_VLLM_LB_PYTHON"] = self.balancer
        path.write_text(yaml.safe_dump(site))

    def wait_for(self, step: int, is_over: Callable[[], bool]) -> None:
        """Wait for the checkpoint of a step, or the end of the call."""
        run, deadline = self.results / "rlvr1/run", time.monotonic() + PATIENCE
        while not (run.exists() and any(it.step >= step for it in TrainingFolder(run).checkpoints)):
            if is_over() or time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def kill_replica(self) -> None:
        """Kill a server of the pool."""
        for host in self.cluster.hosts:
            if self.cluster.kill_processes(host, f"{SERVER.name} serve {self.root / 'genrm'}"):
                self.struck = host
                return

    def driver_logs(self) -> list[str]:
        """What each start of the driver printed, the first first."""
        logs = sorted(
            (self.results / "rlvr1/logs").glob("*-logs/ray-driver.log"), key=lambda path: path.stat().st_mtime
        )
        return [path.read_text() for path in logs]

    def jobs(self) -> list[dict[str, Any]]:
        """What the executor noted of trainings."""
        found = [
            job
            for file in (self.root / ".snakemake/stagecoach/slurm").glob("*.json")
            for job in json.loads(file.read_text())
        ]
        return [job for job in found if job["comment"].endswith("_rlvr1") and "train" in job["comment"]]
