"""Whether a training that was stopped and resumed ends with the weights of one that was not, to the bit.

    python benchmarks/exactness.py --output benchmarks/exactness.md

Trains a small pretrained model with random weights a few steps in every setting below, three minutes on two idle
cores: undisturbed, and again from the checkpoint halfway, each in processes of its own. Weights and optimizer are
compared bit for bit, and losses with those of the same precision in one process that takes a batch at once.
"""

import hashlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, head, row
from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.algorithm import Dtensor
from scripts.backends.trl.train import train_rank
from scripts.recipe.resolve import training_config
from tests.pretrained import save_pretrained
from tests.stages import Stages, checkpoint, logged

STEPS = 6
LORA = {"lora": {"dim": 4, "alpha": 8}}
BF16 = {"precision": "bfloat16"}
SHARES = {"enabled": True}
RECOMPUTED = {"activation_checkpointing": True}


@dataclass(frozen=True)
class Setting:
    """How a stage is trained; `policy` says what may change weights, `placing` what may not."""

    name: str
    processes: int = 1
    policy: dict[str, Any] | None = None
    placing: dict[str, Any] | None = None
    micro: int | None = None
    stages: tuple[str, ...] = ("sft", "dpo", "rlvr1")


SETTINGS = (
    Setting("all weights"),
    Setting("micro-batches", micro=2, stages=("sft",)),
    Setting("LoRA", policy=LORA, stages=("sft", "rlvr1")),
    Setting("bfloat16", policy=BF16, stages=("sft", "rlvr1")),
    Setting("copies", 2, stages=("sft", "dpo")),
    Setting("FSDP2", 2, placing=SHARES),
    Setting("FSDP2, micro-batches", 2, None, SHARES, 2, ("sft",)),
    Setting("FSDP2, LoRA", 2, LORA, SHARES, stages=("sft", "rlvr1")),
    Setting("FSDP2, bfloat16, activation checkpointing", 2, BF16, SHARES | RECOMPUTED, stages=("sft",)),
    Setting("FSDP2, LoRA, bfloat16", 2, BF16 | LORA, SHARES, stages=("sft", "rlvr1")),
)


class Trainings:
    """Trains stages of the tests' recipes in a directory, from a pretrained model."""

    def __init__(self, directory: Path, architecture: str) -> None:
        self.parent = directory / "model"
        save_pretrained(architecture, self.parent)
        self.pairs = Stages(directory / "pairs", ROOT / "tests/algorithms.yaml")
        self.rest = Stages(directory / "rest")

    def job(self, stage: str, run: str, setting: Setting, start: Path | None = None) -> TrainingJob:
        """The job of training a stage in this setting."""
        source = self.pairs if stage in ("dpo", "mpo") else self.rest
        job = source.job(stage, run, STEPS, parent_model=self.parent, resume_from=start)
        values = {name: value for name, value in job.config.values().items() if name != "model"}
        values["policy"] |= {"max_total_sequence_length": 400} | (setting.policy or {})
        if stage == "rlvr1":
            values["loss_fn"] |= {"reference_policy_kl_penalty": 0.05}
        placing = {"dtensor_cfg": Dtensor(**setting.placing or {}), "train_micro_batch_size": setting.micro}
        saving = job.settings.checkpointing.model_copy(update={"save_period": STEPS // 2})
        policy = job.settings.policy.model_copy(update=placing)
        settings = job.settings.model_copy(update={"policy": policy, "checkpointing": saving})
        return replace(job, config=training_config(values), settings=settings, processes=setting.processes)


def train(job: TrainingJob) -> Path:
    """Train a job in processes of its own, forks of this one, which spares them the imports; its last checkpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    forks = multiprocessing.get_context("fork")
    ranks = [forks.Process(target=train_as, args=(job, rank, port)) for rank in range(job.processes)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"{job.run.name}: ended with {[process.exitcode for process in ranks]}")
    return checkpoint(job.run, STEPS)


def train_as(job: TrainingJob, rank: int, port: int) -> None:
    """Train as one of the job's processes."""
    if job.processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.processes)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo")
    train_rank(job)
    if job.processes > 1:
        dist.destroy_process_group()


def digest(value: Any) -> Any:
    """A value with its tensors' bytes hashed."""
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: digest(found) for key, found in value.items()}
    return [digest(found) for found in value] if isinstance(value, list) else value


def weights_of(saved: Path) -> Any:
    """The weights of a checkpoint, or its adapters."""
    [file] = saved.glob("*.safetensors")
    return digest(load_file(file))


def moments_of(saved: Path) -> Any:
    """The optimizer's state in a checkpoint."""
    return digest(torch.load(saved / "optimizer.pt", weights_only=True))


def compare(trainings: Trainings, stage: str, setting: Setting, alone: dict[str, list[float]]) -> list[str]:
    """A row of the table: the setting, what is equal to the bit, how far losses are from those of one process."""
    name = f"{stage}.{setting.name.replace(' ', '_')}"
    straight = train(trainings.job(stage, name, setting))
    halfway = straight.with_name(f"step_{STEPS // 2}")
    resumed = train(trainings.job(stage, f"{name}.resumed", setting, halfway))
    losses = [step["loss"] for step in logged(straight.parents[1])]
    others = alone.setdefault(json.dumps(setting.policy), losses)
    apart = max(abs(loss - other) / max(abs(other), 1e-3) for loss, other in zip(losses, others, strict=True))
    samples_otherwise = stage == "rlvr1" and setting.processes > 1
    is_equal = [of(straight) == of(resumed) for of in (weights_of, moments_of)]
    equal = ["yes" if equal else "NO" for equal in is_equal]
    beside = "" if others is losses or samples_otherwise else f"{apart:.0e}"
    return [stage, setting.name, str(setting.processes), *equal, beside]


def report(architecture: str, rows: list[list[str]]) -> str:
    """The table as Markdown."""
    columns = ("stage", "setting", "processes", "weights equal", "optimizer equal", "losses beside one process's")
    above = f"""# Resumed to the bit

`python benchmarks/exactness.py` on two cores: a small {architecture} with random weights, {STEPS} steps, undisturbed
and resumed from step {STEPS // 2}. The last column is the largest relative difference of a step's loss from that of one
process, same precision, whole batches; GRPO (stage rlvr1, with a reference) draws other completions in another number
of processes. FSDP2 computes in bfloat16 what copies keep in float32."""
    return "\n".join([above, "", head(*columns), *(row(*cells) for cells in rows), ""])


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--stages", nargs="+", default=["sft", "dpo", "rlvr1"])
    parser.add_argument("--settings", default="", help="those whose name has this in it (default: all)")
    parser.add_argument("--architecture", default="qwen3")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.stages, arguments.settings = ["sft"], "all weights"
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        trainings = Trainings(Path(directory), arguments.architecture)
        for stage in arguments.stages:
            alone: dict[str, list[float]] = {}
            for setting in SETTINGS:
                if stage in setting.stages and arguments.settings in setting.name:
                    rows.append(compare(trainings, stage, setting, alone))
                    print(row(*rows[-1]), flush=True)
    if arguments.output:
        arguments.output.write_text(report(arguments.architecture, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
