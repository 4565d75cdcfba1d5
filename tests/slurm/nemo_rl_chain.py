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
from scripts.stage.attempts import read_attempts
from scripts.stage.progress import read_log
from tests.conftest import Workflow
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl import CONFIG, make_checkout

QUICK = ("--seconds-between-status-checks", "2", "--slurm-init-seconds-before-status-checks", "2")
STEPS, SAVE_PERIOD, PROMPTS = 6, 2, 4
AGENTS = ("reasoning_gym_simple_agent", "ns_tools_simple_agent")
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TRL = {"max_total_sequence_length": 64, "train_global_batch_size": 4, "optimizer": {"lr": 1e-3}}


class NemoRlChain(Workflow):
    """A tree with a recipe for the stand-in."""

    def __init__(self, root: Path, cluster: Cluster) -> None:
        super().__init__(root)
        self.environment = cluster.environment
        self.cluster, self.results = cluster, root / "results/double"
        self.checkout = make_checkout(root / "checkout")
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
        (root / "config/config.yaml").write_text(
            "recipe: config/recipes/double.yaml\nsite: config/sites/double.yaml\nrun: double\n"
        )

    def _write_inputs(self) -> None:
        rows = [
            {
                "agent_ref": {"type": "responses_api_agents", "name": AGENTS[number % 2]},
                "responses_create_params": {"input": f"task {number}"},
                "question": f"task {number}",
                **(
                    {"expected_answer": "1"} if number % 2 else {"answer": "1", "metadata": {"source_dataset": "tasks"}}
                ),
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
        shared = {
            "backend": "nemo_rl",
            "reward": "verifier",
            "config": str(CONFIG),
            "cluster": {"num_nodes": 2, "generation_nodes": 1},
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": 4,
                "async_grpo": {"enabled": True},
            },
            "policy": {
                "train_global_batch_size": 16,
                "max_total_sequence_length": 512,
                "megatron_cfg": {
                    "tensor_model_parallel_size": 4,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": 8,
                },
            },
            "checkpointing": {"save_period": SAVE_PERIOD, "keep_last_k": 3},
            "resources": {"runtime": 60, "mem_mb": 0},
            "sandbox": True,
        } | changes
        stages = {
            "sft": {"algorithm": "sft", "blend": "sft", "sft": {"max_num_steps": 2}, "policy": TRL},
            "rlvr1": {"algorithm": "grpo", "blend": "rlvr1", "parent": "sft"},
            "tuned": {
                "algorithm": "sft",
                "backend": "nemo_rl",
                "blend": "sft",
                "parent": "rlvr1",
                "config": "examples/configs/sft.yaml",
                "entry": "examples/run_sft.py",
                "cluster": {"num_nodes": 1},
                "policy": {"max_total_sequence_length": 64, "train_global_batch_size": 8},
                "sft": {"val_global_batch_size": 8},
                "max_num_steps": 2,
            },
            "dpo": {"algorithm": "dpo", "blend": "dpo", "parent": "rlvr1", "dpo": {"max_num_steps": 2}, "policy": TRL},
        }
        kinds = {"sft": "demonstrations", "rlvr1": "prompts", "dpo": "preferences"}
        recipe = {
            "name": "double",
            "release": "v0.7.0",
            "model": dict(zip(SIZES, (16, 32, 1, 2, 1), strict=True)),
            "source": {"kind": "folder", "path": str(self.root / "source")},
            "blends": {name: {"kind": kind, "holdout": 3} for name, kind in kinds.items()},
            "defaults": {"grpo": shared},
            "stages": stages,
        }
        path.write_text(yaml.safe_dump(recipe))

    def write_site(self, **nemo_rl: Any) -> None:
        """The site; `nemo_rl` to its section on NeMo-RL."""
        site = {
            "name": "double",
            "threads": 1,
            "slurm": {
                "partition": "batch",
                "margin": 10,
                "cpus_per_node": 4,
                "light": {"cpus": 1, "mem_mb": 2000, "runtime": 10},
            },
            "mounts": [f"{self.root}:{self.root}"],
            "environment": {"NEMO_RL_VENV_DIR": str(self.root / "venvs")},
            "nemo_rl": {
                "checkouts": {"v0.7.0": str(self.checkout)},
                "images": {"train": str(self.root / "train.sqsh"), "sandbox": str(self.root / "sandbox.sqsh")},
                "cache": str(self.root / "cache"),
                "startup_seconds": 20,
                "save_seconds": 2,
                "stall_seconds": 150,
            }
            | nemo_rl,
        }
        (self.root / "config/sites/double.yaml").write_text(yaml.safe_dump(site))

    def train(self, *targets: str, check: bool = True) -> str:
        """Call Snakemake as a person would; what it printed."""
        return self.snakemake("--profile", "profiles/slurm", *QUICK, *targets, check=check)

    def train_at_once(self, name: str, *overrides: str, deadline: float | None = None, fresh: bool = True) -> str:
        """Train rlvr1 as stage ``results/<name>``, in a Slurm job without Snakemake; what the trainer printed.

        `overrides` are the driver's, `deadline` seconds from now; not `fresh`: go on with what an earlier call left.
        """
        directory, recipe = self.results.with_name(name) / "rlvr1", self.root / f"config/recipes/{name}.yaml"
        if fresh:
            self.write_recipe(recipe, overrides=list(overrides))
            told = ("--config", f"recipe={recipe.relative_to(self.root)}", f"run={name}")
            self.snakemake(
                "--profile",
                "profiles/slurm",
                *told,
                "--dry-run",
                "--",
                str(directory.relative_to(self.root) / "preflight.json"),
            )
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
        return read_attempts(self.results / stage / "run")

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
