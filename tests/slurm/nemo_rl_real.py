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
from tests.slurm.nemo_rl_chain import RECIPE, NemoRlChain

RELEASE = "v0.7.0"
ENTRY = "on_cpu/run_grpo_nemo_gym.py"
PROMPTS, RESPONSES, BATCHES, HOLDOUT = 2, 4, 16, 2
CUT = Path(__file__).with_name("real.yaml")
TRL = yaml.safe_load(RECIPE.read_text())["stages"]["sft"]["policy"]


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
        self.cluster, self.checkout = cluster, make_checkout(root / "checkout", checkouts)
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
        self.configure("real", "double")

    def write_recipe(self, path: Path, evaluation: dict[str, Any] | None = None, **changes: Any) -> None:
        """Super's recipe, cut, and a stage of TRL before and after; `changes` to what NeMo-RL's stages share."""
        recipe = yaml.safe_load((self.root / "config/recipes/super3.yaml").read_text())
        cut = yaml.safe_load(CUT.read_text().replace("ROOT", str(self.root)))
        cut["overrides"] = [f"~env.nemo_gym.{name}" for name in LEFT_OUT]
        stages = {name: recipe["stages"][name] | cut | changes for name in ("rlvr1", "rlvr2")}
        for stage in stages.values():
            stage["grpo"] = stage["grpo"] | {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": RESPONSES}
        fault = {"STAGECOACH_FAULT": "die 3", "STAGECOACH_STRUCK": str(self.root / "struck")}
        stages["rlvr1"]["environment"] = cut["environment"] | fault
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
