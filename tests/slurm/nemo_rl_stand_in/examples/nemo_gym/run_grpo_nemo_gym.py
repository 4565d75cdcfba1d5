"""A stand-in for NeMo-RL's GRPO driver: all of its files, lines and ends, none of its learning."""

import argparse
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from nemo_rl import RELEASE, checkpoint, config, weights

FAULTS = {
    "async_error": "an exception that the asynchronous loop swallows",
    "sync_error": "an exception that ends the process",
    "refit_failed": "the generation engine does not take the weights at the start",
    "exhausted": "the data end",
    "hang": "neither a new step nor an end",
    "die": "killed at the first save from this step on, half of it written",
    "same_weights": "every save repeats the first one's weights",
    "slow_start": "stand_in.start_seconds pass before the loop",
    "oom": "CUDA out of memory",
}
UNCAUGHT = ("sync_error", "oom")


class ResourceInsufficientError(Exception):
    """Ray has fewer GPUs than the run needs."""


class Fault:
    """How the run goes wrong, if at all."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name, self.at, self.once = settings["fault"], settings["at"], settings["once"]
        if self.name not in {None, *FAULTS}:
            raise ValueError(f"stand_in.fault={self.name} is none of {', '.join(FAULTS)}")
        if self.once and Path(self.once).exists():
            self.name = None

    def strikes(self, name: str, step: int | None = None) -> bool:
        """Whether the fault of this name comes now; a `step` must be its own."""
        if self.name != name or step not in {None, self.at}:
            return False
        if self.once:
            Path(self.once).touch()
        return True


class Deadline:
    """The time by which a run wants to have saved, counted from here on, less the mean time of a step."""

    def __init__(self, text: str | None) -> None:
        units = zip(text.split(":"), (86400, 3600, 60, 1), strict=True) if text else ()
        self.seconds = sum(int(part) * unit for part, unit in units) if text else math.inf
        self.began = time.monotonic()
        self.steps = 0

    def reached(self) -> bool:
        """Whether the next step may be too late."""
        self.steps += 1
        passed = time.monotonic() - self.began
        return passed + passed / self.steps >= self.seconds


class Run:
    """A run of the resolved configuration."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config, self.grpo, self.stand_in = settings, settings["grpo"], settings["stand_in"]
        self.fault = Fault(self.stand_in)
        self.asynchronous = self.grpo["async_grpo"]["enabled"]
        self.logs = _next_experiment(Path(settings["logger"]["log_dir"]))
        settings["logger"]["log_dir"] = str(self.logs)
        self.rows = _rows(settings["data"]["train"]["data_path"])
        self._check()
        self.progress = checkpoint.resume(Path(settings["checkpointing"]["checkpoint_dir"]))
        if self.progress is None:
            policy = settings["policy"]
            again = policy.get("megatron_cfg", {}).get("force_reconvert_from_hf", False)
            model = weights.imported(policy["model_name"], again)
            self.progress = checkpoint.Progress(weights.digest(model, str(self.grpo["seed"])))
        self.first_saved: str | None = None
        self.writer = None

    def _check(self) -> None:
        """Refuse what NeMo-RL refuses."""
        if self.grpo["max_val_samples"] is not None:
            raise ValueError("A non-null `grpo.max_val_samples` parameter is not supported.")
        if self.asynchronous:
            for feature in ("use_dynamic_sampling", "reward_scaling", "reward_shaping"):
                setting = self.grpo.get(feature, False)
                if setting["enabled"] if isinstance(setting, dict) else setting:
                    raise NotImplementedError(f"{feature} is not supported with async GRPO")
            if self.config["data"]["use_multiple_dataloader"]:
                raise NotImplementedError("use_multiple_dataloader is not supported with async GRPO")

    @property
    def steps_an_epoch(self) -> int:
        return len(self.rows) // self.grpo["num_prompts_per_step"]

    def train(self) -> None:
        """Run to an end, whichever it is."""
        if self.fault.strikes("slow_start"):
            time.sleep(self.stand_in["start_seconds"])
        if self.fault.strikes("refit_failed"):
            print("❌ Policy generation refit failed: no weights arrived", flush=True)
            return
        if self.config["logger"]["tensorboard_enabled"]:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(self.logs / "tensorboard"))
        print(f"🚀 Running {'async' if self.asynchronous else 'synchronous'} GRPO training", flush=True)
        try:
            self._loop()
        except Exception as error:
            if not self.asynchronous or RELEASE == "main" or self.fault.name in UNCAUGHT:
                raise
            print(f"❌ Error in async loop: {error}", flush=True)
            traceback.print_exc()
        finally:
            if self.writer:
                self.writer.close()
        if self.asynchronous:
            print("Async GRPO training complete!", flush=True)

    def _loop(self) -> None:
        deadline = Deadline(self.config["checkpointing"]["checkpoint_must_save_by"])
        most = self.grpo["max_num_steps"]
        if not self.asynchronous:
            most = min(most, self.steps_an_epoch * self.grpo["max_num_epochs"])
        validation = self.validate() if self.grpo["val_at_start"] and not self.progress.step else {}
        while self.progress.step < most:
            began = time.monotonic()
            step = self.progress.step + 1
            print(f"\n{'=' * 25} Step {step}/{most} {'=' * 25}", flush=True)
            self._strike(step)
            rows = self._next_rows()
            time.sleep(self.stand_in["step_seconds"])
            self.progress.state = weights.digest(self.progress.state, *(json.dumps(row) for row in rows))
            self.progress.step, self.progress.rows = step, self.progress.rows + len(rows)
            last, period = step >= most, self.grpo["val_period"]
            due = (period > 0 and step % period == 0) or (self.grpo["val_at_end"] and last)
            validation = self.validate() if due else {}
            metrics = self._metrics(rows)
            late = deadline.reached()
            if last or late or step % self.config["checkpointing"]["save_period"] == 0:
                self._save(metrics, validation)
            self._log(metrics, rows, time.monotonic() - began)
            if late:
                print("Timeout has been reached, stopping training early", flush=True)
                return
        if self.progress.step >= self.grpo["max_num_steps"]:
            print("Max number of steps has been reached, stopping training early", flush=True)

    def _strike(self, step: int) -> None:
        if self.fault.strikes("async_error", step) or self.fault.strikes("sync_error", step):
            raise RuntimeError("a rollout failed")
        if self.fault.strikes("oom", step):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.fault.strikes("hang", step):
            _hang()

    def _next_rows(self) -> list[dict]:
        """The rows of a step; where there are none, what the release does."""
        size = self.grpo["num_prompts_per_step"]
        start = self.progress.rows
        if not self.asynchronous:
            start = start % (self.steps_an_epoch * size)
        rows = self.rows[start : start + size]
        if len(rows) == size and not self.fault.strikes("exhausted", self.progress.step + 1):
            return rows
        if RELEASE == "main":
            raise RuntimeError("dataloader exhausted before max_num_steps")
        _hang("⏳ Buffer empty or not enough groups to form a full step, waiting...")

    def _metrics(self, rows: list[dict]) -> dict[str, float]:
        """What a step of these rows would log, made up from the weights' state."""
        choice = random.Random(self.progress.state)
        agents = defaultdict(list)
        for row in rows:
            agents[row["agent_ref"]["name"]].append(
                min(1.0, max(0.0, 0.9 - 0.6 * math.exp(-self.progress.step / 20) + choice.gauss(0, 0.05)))
            )
        rewards = [reward for each in agents.values() for reward in each]
        length = 200 + 2 * self.progress.step + choice.random()
        penalized = self.config["loss_fn"]["reference_policy_kl_penalty"]
        return {
            "reward": sum(rewards) / len(rewards),
            "total_reward/mean": sum(rewards) / len(rewards),
            "total_reward/stddev": choice.uniform(0.1, 0.3),
            **{f"{agent}/reward/mean": sum(each) / len(each) for agent, each in agents.items()},
            "loss": choice.gauss(0, 0.01),
            "grad_norm": choice.uniform(0.1, 0.5),
            "lr": self.config["policy"]["megatron_cfg"]["optimizer"]["lr"],
            "gen_kl_error": choice.uniform(1e-4, 9e-4),
            "kl_penalty": choice.uniform(0.01, 0.02) if penalized else 0.0,
            "gen_tokens_per_sample/mean": length,
            "gen_tokens_per_sample/max": 3 * length,
            "truncation_rate": choice.uniform(0, 0.02),
            "approx_entropy": 0.2 + math.exp(-self.progress.step / 50),
            "token_mult_prob_error": choice.uniform(1.0, 1.02),
        }

    def _save(self, metrics: dict[str, float], validation: dict[str, float]) -> None:
        if not self.config["checkpointing"]["enabled"]:
            return
        print(f"Saving checkpoint for step {self.progress.step}...", flush=True)
        self.first_saved = self.first_saved or self.progress.state
        state = self.first_saved if self.fault.strikes("same_weights") else self.progress.state
        named = {f"train:{name}": value for name, value in metrics.items()}
        named |= {f"val:{name}": value for name, value in validation.items()}

        def halfway() -> None:
            if self.progress.step >= self.fault.at and self.fault.strikes("die"):
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.save(self.config, self.progress, state, named, halfway)

    def validate(self) -> dict[str, float]:
        """Score the validation set, made up."""
        print(f"▶ Starting validation at step {self.progress.step}...", flush=True)
        _rows(self.config["data"]["validation"]["data_path"])
        accuracy = 0.9 - 0.6 * math.exp(-self.progress.step / 20)
        found = {"accuracy": accuracy, "total_reward/mean": accuracy}
        self._scalars("validation", found)
        return found

    def _log(self, metrics: dict[str, float], rows: list[dict], seconds: float) -> None:
        print(f"\n📊 Training Results:\n  • Loss: {metrics['loss']:.4f}", flush=True)
        print(f"  • Generation KL Error: {metrics['gen_kl_error']:.4f}\n  • Avg Reward: {metrics['reward']:.4f}")
        print(f"\n⏱️  Timing:\n  • Total step time: {seconds:.2f}s", flush=True)
        self._scalars("train", metrics)
        self._scalars("timing/train", {"total_step_time": seconds})
        if not self.config["env"].get("should_log_nemo_gym_responses", False):
            lines = [
                {"content": "", "rewards": metrics["reward"], "agent_ref": row["agent_ref"], "idx": index}
                for index, row in enumerate(rows)
            ]
            _write_lines(self.logs / f"train_data_step{self.progress.step}.jsonl", lines)

    def _scalars(self, prefix: str, values: dict[str, float]) -> None:
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(f"{prefix}/{name}", value, self.progress.step)
            self.writer.flush()

    def collect(self) -> None:
        """Roll out the validation set once, and write what each rollout earned, one agent after the other."""
        if not (self.grpo["val_period"] > 0 or self.grpo["val_at_start"] or self.grpo["val_at_end"]):
            raise TypeError("'NoneType' object is not iterable")  # no validation is asked for, so no rows are loaded
        choice = random.Random(self.progress.state)
        agents = defaultdict(list)
        for row in _rows(self.config["data"]["validation"]["data_path"]):
            output = [{"type": "message", "generation_str": f"an answer to {row['responses_create_params']['input']}"}]
            line = {
                "agent_ref": row["agent_ref"],
                "reward": float(choice.random() < 0.5),
                "response": {"output": output},
            }
            agents[row["agent_ref"]["name"]].append(line)
        lines = [line for each in agents.values() for line in each]
        _write_lines(self.logs / "trajectory_collection.jsonl", lines)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    settings = config.load(arguments.config, overrides)
    print(f"Loaded configuration from: {arguments.config}\nOverrides: {overrides}", flush=True)
    if settings["stand_in"]["ray"]:
        reserve(settings)
    run = Run(settings)
    print(f"📊 Using log directory: {run.logs}", flush=True)
    if settings["env"]["nemo_gym"].get("is_trajectory_collection"):
        run.collect()
    else:
        run.train()


def reserve(settings: dict[str, Any]) -> None:
    """Reserve the GPUs in Ray; ResourceInsufficientError if there are too few, and no end if they lack for the judges."""
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
    for count in (nodes, settings["env"]["nemo_gym"].get("num_gpu_nodes", 0)):
        if count:
            group = ray.util.placement_group([{"GPU": gpus}] * count, strategy="STRICT_SPREAD")
            while not group.wait(60):
                print(f"Waiting for {count} nodes of {gpus} GPUs", flush=True)


def _hang(words: str = "") -> None:
    while True:
        if words:
            print(words, flush=True)
        time.sleep(0.5)


def _next_experiment(directory: Path) -> Path:
    numbers = [int(path.name[4:]) for path in directory.glob("exp_*") if path.name[4:].isdigit()]
    path = directory / f"exp_{max(numbers, default=0) + 1:03d}"
    path.mkdir(parents=True)
    return path


def _rows(path: str) -> list[dict]:
    """The rows of a data file; json.JSONDecodeError for a blank line."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for number, row in enumerate(rows, 1):
        if missing := {"agent_ref", "responses_create_params"} - row.keys():
            raise KeyError(f"row {number} of {path} lacks {', '.join(sorted(missing))}")
    return rows


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
