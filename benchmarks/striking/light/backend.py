"""Trains: every step moves the weights by what its rows' bytes say, with a momentum that a checkpoint holds too."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from scripts.backends.protocol import Allocation, Backend, TrainingJob
from scripts.files import temporary_directory, write_json
from scripts.stage.store import prune_checkpoints

SIZE = 4096


class Light(Backend):
    """Its weights are one tensor."""

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Train up to the job's last step, or until it is to stop."""
        folder = job.resume_from or job.parent_model
        weights = load_file(folder / "model.safetensors")["weights"] if folder else np.zeros(SIZE, np.float32)
        momentum = (
            load_file(folder / "optimizer.safetensors")["momentum"] if job.resume_from else np.zeros_like(weights)
        )
        teachers = [load_file(folder / "model.safetensors")["weights"] for folder in job.roles.values()]
        rows = job.train_split.read_bytes().splitlines()
        for step in range(job.start + 1, job.max_num_steps + 1):
            began, first = time.monotonic(), (step - job.begun - 1) * job.config.batch
            chosen = b"".join(rows[number % len(rows)] for number in range(first, first + job.config.batch))
            seed = int.from_bytes(hashlib.sha256(chosen).digest()[:8], "big") + job.config.seed
            gradient = weights - np.random.default_rng(seed).standard_normal(SIZE, np.float32)
            gradient += sum(weights - teacher for teacher in teachers)
            momentum = np.float32(0.9) * momentum + gradient
            weights = weights - np.float32(0.01) * momentum
            seconds = time.monotonic() - began
            entry = {"step": step, "loss": float(np.square(gradient).mean()), "grad_norm": 1.0, "seconds": seconds}
            with (job.run / "metrics.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
            stops = job.stop.is_due(seconds, seconds)
            if stops or step == job.max_num_steps or step % job.settings.checkpointing.save_period == 0:
                save(job, step, weights, momentum)
            if stops:
                return


def save(job: TrainingJob, step: int, weights: np.ndarray, momentum: np.ndarray) -> None:
    """Seal a checkpoint, and remove those that are kept no longer."""
    with temporary_directory(job.run / "saving") as folder:
        save_file({"weights": weights}, folder / "model.safetensors")
        save_file({"momentum": momentum}, folder / "optimizer.safetensors")
        write_json(Path(folder, "config.json"), {"model_type": "light"})
        job.training.seal(folder, step)
    prune_checkpoints(job.training, job.settings.checkpointing)


BACKEND = Light()
