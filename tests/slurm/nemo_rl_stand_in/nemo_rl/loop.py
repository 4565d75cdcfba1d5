"""What the training loops of the stand-in share: files, lines, saves and ends."""

import argparse
import json
import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from nemo_rl import checkpoint, config, weights
from nemo_rl.dataloader import Rows
from nemo_rl.faults import Deadline, Fault


class Loop(ABC):
    """A run of the resolved configuration, which goes on from the newest checkpoint.

    `info` is what training_info.json says of where it is. A subclass says in `algorithm` which section is its own.
    """

    algorithm: str

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config, self.stand_in, self.own = settings, settings["stand_in"], settings[self.algorithm]
        self.fault = Fault(self.stand_in)
        self.logs = _next_experiment(Path(settings["logger"]["log_dir"]))
        settings["logger"]["log_dir"] = str(self.logs)
        self.step = 0
        self.info = self.begin()
        self.resumed = checkpoint.newest(Path(settings["checkpointing"]["checkpoint_dir"]))
        if self.resumed:
            self.state = checkpoint.state_of(self.resumed)
            self.info = json.loads((self.resumed / "training_info.json").read_text())
        else:
            policy = settings["policy"]
            again = policy.get("megatron_cfg", {}).get("force_reconvert_from_hf", False)
            self.state = weights.digest(weights.imported(policy["model_name"], again), str(self.own["seed"]))
        self.writer = None

    @abstractmethod
    def begin(self) -> dict[str, Any]:
        """What is known of a run that has not begun."""

    @abstractmethod
    def train(self) -> None:
        """Train to an end, whichever it is."""

    def start(self) -> None:
        """What comes before the first step."""
        if self.config["logger"]["tensorboard_enabled"]:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.logs / "tensorboard"))
        self.deadline = Deadline(self.config["checkpointing"]["checkpoint_must_save_by"])

    def learn(self, rows: Rows) -> random.Random:
        """Train on the rows of a step; what chooses the numbers that it logs."""
        if self.fault.strikes("error", self.step + 1):
            raise RuntimeError("a worker failed")
        time.sleep(self.stand_in["step_seconds"])
        self.state = weights.digest(self.state, *(json.dumps(row) for row in rows))
        self.step += 1
        self.info["total_valid_tokens"] += 1000.0 * len(rows)
        return random.Random(self.state)

    def save(self, metrics: dict[str, float], validation: dict[str, float], loaders: dict[str, dict[str, Any]]) -> None:
        """Save the step with what was measured in it and the states of what loads the data."""
        print(f"Saving checkpoint for step {self.step}...", flush=True)
        named = {f"train:{name}": value for name, value in metrics.items()}
        named |= {f"val:{name}": value for name, value in validation.items()}
        name = self.config["checkpointing"]["metric_name"]
        info = {key: value for key, value in self.info.items() if key != name} | checkpoint.chosen(name, named)

        def halfway() -> None:
            if self.step >= self.fault.at and self.fault.strikes("die"):
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.save(self.config, self.step, self.state, info, loaders, halfway)

    def is_due(self, key: str, last: bool) -> bool:
        """Whether a step is the one in `key` of the section on checkpoints that saves, or the last of all."""
        return last or self.step % self.config["checkpointing"][key] == 0

    def scalars(self, prefix: str, values: dict[str, float], step: int) -> None:
        """Log numbers of a step, if curves are wanted."""
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(f"{prefix}/{name}", value, step)
            self.writer.flush()

    def is_told_to_end(self, late: bool) -> bool:
        """Say so where the run ends after a step: its deadline has come, or it was the last that is wanted."""
        if late:
            print("Timeout has been reached, stopping training early", flush=True)
        elif self.step >= self.own["max_num_steps"]:
            print("Max number of steps has been reached, stopping training early", flush=True)
        else:
            return False
        return True


def settings_of_command() -> dict[str, Any]:
    """The configuration that the command line asks for; its GPUs are reserved in Ray."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    settings = config.load(arguments.config, overrides)
    print(f"Loaded configuration from: {arguments.config}\nOverrides: {overrides}", flush=True)
    if settings["stand_in"]["ray"]:
        _reserve(settings)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray's driver does
    return settings


class ResourceInsufficientError(Exception):
    """Ray has fewer GPUs than the run needs."""


def _reserve(settings: dict[str, Any]) -> None:
    """Reserve the GPUs; ResourceInsufficientError if there are too few, and no end if they lack for the judges."""
    import ray

    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it leaves a token in the home, for every later Ray
        ray.init(log_to_driver=False, include_dashboard=False)
    gpus, nodes = settings["cluster"]["gpus_per_node"], settings["cluster"]["num_nodes"]
    tries = int(os.environ.get("NRL_VIRTUAL_CLUSTER_MAX_RETRIES", "6"))
    for attempt in range(tries):
        if (found := int(ray.cluster_resources().get("GPU", 0))) >= nodes * gpus:
            break
        print(f"Not enough GPUs available. Requested {nodes * gpus} GPUs, but only {found} are available.", flush=True)
        time.sleep(2**attempt)
    else:
        raise ResourceInsufficientError(f"Maximum number of retries reached ({tries}).")
    judges = settings.get("env", {}).get("nemo_gym", {}).get("num_gpu_nodes", 0)
    for count in (nodes, judges):
        if count:
            group = ray.util.placement_group([{"GPU": gpus}] * count, strategy="STRICT_SPREAD")
            while not group.wait(60):
                print(f"Waiting for {count} nodes of {gpus} GPUs", flush=True)


def _next_experiment(directory: Path) -> Path:
    numbers = [int(path.name[4:]) for path in directory.glob("exp_*") if path.name[4:].isdigit()]
    path = directory / f"exp_{max(numbers, default=0) + 1:03d}"
    path.mkdir(parents=True)
    return path
