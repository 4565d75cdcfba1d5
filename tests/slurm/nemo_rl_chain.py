"""A chain of both backends through Snakemake's Slurm executor: TRL, a stand-in for NeMo-RL in doubled containers, TRL."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.export import WORKER
from scripts.stage.progress import read_log
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import Workflow
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl import make_checkout

QUICK = ("--seconds-between-status-checks", "2", "--slurm-init-seconds-before-status-checks", "2")
RECIPE, SITE = (Path(__file__).with_name(name) for name in ("double.yaml", "double_site.yaml"))
STEPS, PROMPTS = 6, 4
AGENTS = ("reasoning_gym_simple_agent", "ns_tools_simple_agent")


class NemoRlChain(Workflow):
    """A tree with a recipe for the stand-in."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        super().__init__(root)
        self.environment = cluster.environment
        self.cluster, self.checkout = cluster, make_checkout(root / "checkout")
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=self.checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
        releases = root / "envs/nemo-rl.yaml"
        table = yaml.safe_load(releases.read_text())
        table["releases"]["v0.7.0"] |= {"revision": head}
        table["releases"]["v0.7.0"]["converter"]["ranks"] = 2  # as many as this machine has cores
        table["releases"]["v0.7.0"]["sandbox_command"] = "exec python -m http.server $NGINX_PORT"
        releases.write_text(yaml.safe_dump(table))
        self._write_inputs()
        self.write_recipe(root / "config/recipes/double.yaml")
        self.write_site()
        self.configure("double", "double")

    def _write_inputs(self) -> None:
        answered = {"answer": "1", "metadata": {"source_dataset": "tasks"}}
        rows = [
            {
                "agent_ref": {"type": "responses_api_agents", "name": AGENTS[number % 2]},
                "responses_create_params": {"input": f"task {number}"},
                "question": f"task {number}",
                **({"expected_answer": "1"} if number % 2 else answered),
            }
            for number in range(PROMPTS * (STEPS + 2) + 3)
        ]
        source = self.root / "source"
        source.mkdir()
        asked = [row["question"] for row in rows]
        turns = [{"role": "user", "content": question} for question in asked]
        blends = {
            "sft": [{"messages": [turn, {"role": "assistant", "content": "1"}]} for turn in turns],
            "rlvr1": rows,
            "dpo": [{"prompt": question, "chosen": "1", "rejected": "none"} for question in asked],
        }
        for blend, lines in blends.items():
            (source / f"{blend}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for image in ("train.sqsh", "sandbox.sqsh"):
            with (self.root / image).open("wb") as file:
                file.truncate(1 << 30)
        (self.root / "venvs").mkdir()
        (self.root / "venvs" / WORKER).symlink_to(sys.prefix)  # as the image would hold it

    def write_recipe(self, path: Path, **changes: Any) -> None:
        """A recipe; `changes` to what NeMo-RL's stages share."""
        recipe = yaml.safe_load(RECIPE.read_text())
        recipe["source"]["path"] = str(self.root / "source")
        recipe["defaults"]["grpo"] |= changes
        path.write_text(yaml.safe_dump(recipe))

    def write_site(self, **nemo_rl: Any) -> None:
        """The site; `nemo_rl` to its section on NeMo-RL."""
        site = yaml.safe_load(SITE.read_text().replace("ROOT", str(self.root)))
        site["nemo_rl"] |= nemo_rl
        (self.root / "config/sites/double.yaml").write_text(yaml.safe_dump(site))

    def train(self, *targets: str, check: bool = True) -> str:
        """Call Snakemake as a person would; what it printed."""
        return self.snakemake("--profile", "profiles/slurm", *QUICK, *targets, check=check)

    def train_at_once(
        self, name: str, *overrides: str, deadline: float | None = None, fresh: bool = True, **changes: Any
    ) -> str:
        """Train rlvr1 as stage ``results/<name>``, in a Slurm job without Snakemake; what the trainer printed.

        `overrides` are the driver's, `deadline` seconds from now, `changes` to the recipe as of `write_recipe`; not
        `fresh`: go on with what an earlier call left.
        """
        directory, recipe = self.results.with_name(name) / "rlvr1", self.root / f"config/recipes/{name}.yaml"
        if fresh:
            self.write_recipe(recipe, overrides=list(overrides), **changes)
            told = ("--config", f"recipe={recipe.relative_to(self.root)}", f"run={name}", "--dry-run", "--")
            preflight = str(directory.relative_to(self.root) / "preflight.json")
            self.snakemake("--profile", "profiles/slurm", *told, preflight)
            shutil.rmtree(directory.with_name("sft"))
            os.utime(self.results / "sft/config.yaml", (0, 0))  # older than what was made of it, whoever read it since
            for made in ("data", "sft"):
                (directory.parent / made).symlink_to(self.results / made)
        command = [
            *(sys.executable, "-m", "scripts.train.run", f"--recipe={recipe}", f"--results={directory.parent}"),
            *("--stage=rlvr1", "--site=config/sites/double.yaml", f"--root={directory.parent.parent}"),
            *([f"--deadline={time.time() + deadline}"] if deadline else []),
        ]
        log = directory / "output"
        options = ("--nodes=2", "--exclusive", "--gres=gpu:8", "--no-requeue", f"--output={log}", "--open-mode=append")
        job = self.run("sbatch", "--parsable", *options, f"--wrap=exec {shlex.join(command)}").stdout.strip()
        while self.run("squeue", "--noheader", f"--jobs={job}", "--states=PD,R,CF,CG").stdout.strip():
            time.sleep(0.5)
        return log.read_text()

    def attempts(self, stage: str) -> list[dict[str, Any]]:
        """The attempts at a stage."""
        return TrainingFolder(self.results / stage / "run").attempts

    def log(self, stage: str) -> str:
        """What the attempts at a stage printed."""
        return (self.results / stage / "logs/attempts.log").read_text()

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """The logged steps of a stage."""
        return read_log(self.results / stage / "run/metrics.jsonl")

    def weights(self, stage: str) -> bytes:
        """The published weights."""
        folder = self.results / stage / "ckpt/weights/policy/weights/iter_0000000"
        return b"".join(path.read_bytes() for path in sorted(folder.glob("*.distcp")))

    def containers(self) -> list[dict[str, Any]]:
        """The containers that were asked for so far, a record a task."""
        return [json.loads(line) for line in (self.cluster.directory / "containers.jsonl").read_text().splitlines()]
