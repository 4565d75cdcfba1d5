"""Super's first two stages by NeMo-RL's own driver and its own ray.sub, between two of TRL's, on a test cluster."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from scripts.backends.nemo_rl.export import WORKER
from tests.conftest import Workflow
from tests.nemo_rl.loops import CPU, LEFT_OUT, rows_of, write_gym, write_model
from tests.slurm.cluster import Cluster
from tests.slurm.nemo_rl import commit
from tests.slurm.nemo_rl_chain import TRL, NemoRlChain

RELEASE = "v0.7.0"
ENTRY = "on_cpu/run_grpo_nemo_gym.py"
PROMPTS, RESPONSES, BATCHES, HOLDOUT = 2, 4, 16, 2
SERVERS = (
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
)
STEP = {"STAGECOACH_STEP_SECONDS": "2.5"}


def image_of(python: Path) -> dict[str, str]:
    """What the image of an environment for the CPU has in its environment; Ray is told of CPUs and GPUs."""
    return {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "RAY_OVERRIDE_RESOURCES": '{"GPU":8,"CPU":64}',
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
    }


def make_checkout(directory: Path, checkouts: Path) -> Path:
    """A checkout of the release as it is, and in ``on_cpu`` what replaces its policy and its generator."""
    shutil.copytree(checkouts / RELEASE, directory, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    shutil.copytree(CPU, directory / "on_cpu", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "on_cpu/on_cluster.py").rename(directory / ENTRY)
    return commit(directory, RELEASE)


class RealChain(NemoRlChain):
    """A tree with super3's recipe, cut to a tiny model, two stages, two hosts and a few rows."""

    def __init__(self, root: Path, cluster: Cluster, checkouts: Path, python: Path) -> None:
        Workflow.__init__(self, root)
        self.environment = cluster.environment
        self.cluster, self.results = cluster, root / "results/real"
        self.checkout = make_checkout(root / "checkout", checkouts)
        releases = root / "envs/nemo-rl.yaml"
        table = yaml.safe_load(releases.read_text())
        head = self.run("git", "-C", str(self.checkout), "rev-parse", "HEAD").stdout.strip()
        table["releases"][RELEASE] |= {"revision": head}
        releases.write_text(yaml.safe_dump(table))
        source = root / "source"
        source.mkdir()
        size = PROMPTS * BATCHES + HOLDOUT
        parts = (rows_of(range(number * size, (number + 1) * size)) for number in range(2))
        blends = dict(zip(("rlvr1", "rlvr2"), parts, strict=True))
        asked = [(row["question"], row["expected_answer"]) for row in blends["rlvr1"]]
        turns = [[{"role": "user", "content": it}, {"role": "assistant", "content": answer}] for it, answer in asked]
        blends["sft"] = [{"messages": messages} for messages in turns]
        blends["dpo"] = [{"prompt": it, "chosen": answer, "rejected": "no"} for it, answer in asked]
        for blend, rows in blends.items():
            (source / f"{blend}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_model(root / "model")
        write_gym(root / "gym", python)
        with (root / "train.sqsh").open("wb") as image:
            image.truncate(1 << 30)
        (root / "venvs").mkdir()
        (root / "venvs" / WORKER).symlink_to(python.parent.parent)
        self.write_recipe(root / "config/recipes/real.yaml")
        self.write_site(startup_seconds=180, save_seconds=5, stall_seconds=240)
        (root / "config/config.yaml").write_text(
            "recipe: config/recipes/real.yaml\nsite: config/sites/double.yaml\nrun: real\n"
        )

    def write_recipe(self, path: Path, evaluation: dict[str, Any] | None = None, **changes: Any) -> None:
        """Super's recipe, cut, and a stage of TRL before and after; `changes` to what NeMo-RL's stages share."""
        recipe = yaml.safe_load((self.root / "config/recipes/super3.yaml").read_text())
        stages = {name: recipe["stages"][name] | self._cut() | changes for name in ("rlvr1", "rlvr2")}
        for stage in stages.values():
            stage["grpo"] = stage["grpo"] | {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": RESPONSES}
        stages["rlvr1"]["environment"] = STEP | {
            "STAGECOACH_FAULT": "die 3",
            "STAGECOACH_STRUCK": str(self.root / "struck"),
        }
        stages["rlvr1"]["parent"] = "sft"
        by_trl = {"policy": TRL, "backend": "trl"}
        first = {"algorithm": "sft", "blend": "sft", "sft": {"max_num_steps": 2}} | by_trl
        last = {"algorithm": "dpo", "blend": "dpo", "parent": "rlvr2", "dpo": {"max_num_steps": 2}} | by_trl
        stages = {"sft": first, **stages, "dpo": last}
        kinds = {"sft": "demonstrations", "dpo": "preferences"}
        recipe.pop("start", None)
        recipe |= {
            "stages": stages,
            "model": {"name": str(self.root / "model")},
            "source": {"kind": "folder", "path": str(self.root / "source")},
            "blends": {name: {"kind": kinds.get(name, "prompts"), "holdout": HOLDOUT} for name in stages},
            "evaluation": evaluation,
        }
        path.write_text(yaml.safe_dump(recipe))

    def _cut(self) -> dict[str, Any]:
        """What a stage says otherwise than Super's."""
        genrm = {"resources_servers": {"genrm_compare": {"num_rollouts_per_prompt": RESPONSES}}}
        return {
            "entry": ENTRY,
            "reward": "verifier",
            "cluster": {"num_nodes": 2, "generation_nodes": 1},
            "policy": {
                "train_global_batch_size": PROMPTS * RESPONSES,
                "max_total_sequence_length": 96,
                "megatron_cfg": {"enabled": False},
                "dtensor_cfg": {"enabled": True, "_v2": False},
                "generation": {"vllm_cfg": {"enable_vllm_metrics_logger": False}},
            },
            "env": {
                "nemo_gym": {
                    "uv_venv_dir": str(self.root / "gym"),
                    "num_gpu_nodes": 0,
                    "genrm_compare_resources_server": genrm,  # as long as the config has it
                    "config_paths": list(SERVERS),
                    "policy_model": {"responses_api_models": {"vllm_model": {"num_workers": 1}}},
                }
            },
            "logger": {"monitor_gpus": False},
            "checkpointing": {"save_period": 1, "keep_last_k": 3},
            "overrides": [f"~env.nemo_gym.{name}" for name in LEFT_OUT],
            "environment": STEP,
            "sandbox": False,
        }
