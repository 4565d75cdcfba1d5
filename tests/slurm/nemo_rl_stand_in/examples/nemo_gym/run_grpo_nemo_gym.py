"""A stand-in for NeMo-RL's GRPO driver: all of its files, lines and ends, none of its learning."""

import json
import math
import random
import statistics
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from nemo_rl import RELEASE
from nemo_rl.dataloader import Collector, Loader, Rows
from nemo_rl.faults import hang
from nemo_rl.judges import judges_of, verdict
from nemo_rl.loop import Loop, settings_of_command

WAITING = "⏳ Buffer empty or not enough groups to form a full step, waiting..."
EXHAUSTED = "Collector status: {'running': False, 'data_exhausted': True, 'errored': False, 'error': None, 'inflight_workers': 0}"


class Grpo(Loop):
    """GRPO, by the synchronous loop or the asynchronous one."""

    algorithm = "grpo"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.asynchronous = self.own["async_grpo"]["enabled"]
        self._check()
        self.step = self.info["current_step" if self.asynchronous else "total_steps"]
        data = settings["data"]
        rows = _rows(data["train"]["data_path"])
        self.loader = Loader(rows, self.own["num_prompts_per_step"], data["num_workers"])
        if self.resumed:
            self.loader.load_state_dict(torch.load(self.resumed / "train_dataloader.pt"))

    def begin(self) -> dict[str, Any]:
        """What is known of a run that has not begun."""
        counts = dict.fromkeys(("consumed_samples", "current_step", "current_epoch", "total_steps"), 0)
        return counts | {"total_valid_tokens": 0.0}

    def _check(self) -> None:
        """Refuse what NeMo-RL refuses."""
        if self.own["max_val_samples"] is not None:
            raise ValueError("A non-null `grpo.max_val_samples` parameter is not supported.")
        if self.asynchronous:
            for feature in ("use_dynamic_sampling", "reward_scaling", "reward_shaping"):
                setting = self.own.get(feature, False)
                if setting["enabled"] if isinstance(setting, dict) else setting:
                    raise NotImplementedError(f"{feature} is not supported with async GRPO")
            if self.config["data"]["use_multiple_dataloader"]:
                raise NotImplementedError("use_multiple_dataloader is not supported with async GRPO")

    def train(self) -> None:
        """Run to an end, whichever it is."""
        self.start()
        if self.fault.strikes("refit_failed"):
            if not self.asynchronous:
                raise RuntimeError("Error: Updating weights for the generation policy failed during refit.")
            print("❌ Policy generation refit failed: no weights arrived", flush=True)
            return
        validates = self.own["val_at_start"] and not self.step
        if validates:
            self._validate()
        if not self.asynchronous:
            self._train_in_turn()
            return
        try:
            self._train_beside_rollouts()
        except Exception as error:
            if RELEASE == "main":
                raise
            print(f"❌ Error in async loop: {error}", flush=True)
            traceback.print_exc()
        print("Async GRPO training complete!", flush=True)

    def _train_in_turn(self) -> None:
        """The synchronous loop: some epochs over the rows, a rollout and a step at a time; no word at their end."""
        epochs, most = self.own["max_num_epochs"], self.own["max_num_steps"]
        while self.info["current_epoch"] < epochs and self.step < most:
            for rows in self.loader:
                began = time.monotonic()
                self._head(most)
                rollouts = self._roll_out(rows)
                self.scalars("train", rollouts, self.step + 1)
                metrics = rollouts | self._learn(rows)
                self.info["current_step"] += 1
                self.info["total_steps"] = self.step
                is_last_epoch = self.info["current_epoch"] + 1 == epochs
                last = self.step >= most or (is_last_epoch and self.info["current_step"] == len(self.loader))
                if self._end_step(metrics, rows, last, began, {"train_dataloader.pt": self.loader}):
                    return
            self.info["current_epoch"] += 1
            self.info["current_step"] = 0

    def _train_beside_rollouts(self) -> None:
        """The asynchronous loop, which knows no epochs; where the rollouts end, it waits."""
        most, age = self.own["max_num_steps"], self.own["async_grpo"]["max_trajectory_age_steps"]
        buffer = self.resumed and torch.load(self.resumed / "replay_buffer.pt")
        collector = Collector(self.loader, age, self.step, buffer, waits_for_last=RELEASE == "super-v3")
        if not collector.has(self.step):
            hang(f"  Wait iteration: step {self.step} ready=False")
        while self.step < most:
            began = time.monotonic()
            self._head(most)
            if (rows := collector.rows_of(self.step)) is None:
                if RELEASE == "main":
                    raise RuntimeError(
                        f"Trajectory collector stopped: dataloader exhausted at {self.step}. {EXHAUSTED}"
                    )
                hang(WAITING)
            metrics = self._roll_out(rows) | self._learn(rows)
            self.info["current_step"] = self.step
            collector.has_trained(self.step)
            loaders = {"train_dataloader.pt": self.loader, "replay_buffer.pt": collector}
            if self._end_step(metrics, rows, self.step == most, began, loaders):
                return

    def _head(self, most: int) -> None:
        print(f"\n{'=' * 25} Step {self.step + 1}/{most} {'=' * 25}", flush=True)
        if self.fault.strikes("hang", self.step + 1):
            hang()

    def _learn(self, rows: Rows) -> dict[str, float]:
        choice = self.learn(rows)
        self.info["consumed_samples"] += len(rows)
        penalized = self.config["loss_fn"]["reference_policy_kl_penalty"]
        return {
            "loss": choice.gauss(0, 0.01),
            "grad_norm": choice.uniform(0.1, 0.5),
            "lr": self.config["policy"]["megatron_cfg"]["optimizer"]["lr"],
            "gen_kl_error": choice.uniform(1e-4, 9e-4),
            "kl_penalty": choice.uniform(0.01, 0.02) if penalized else 0.0,
            "approx_entropy": 0.2 + math.exp(-self.step / 50),
            "token_mult_prob_error": choice.uniform(1.0, 1.02),
            "sampling_importance_ratio": choice.uniform(0.99, 1.01),
            "num_masked_seqs_by_logprob_error": 0.0,
            "num_valid_samples": float(len(rows) * self.own["num_generations_per_prompt"]),
        }

    def _roll_out(self, rows: Rows) -> dict[str, float]:
        """What the rollouts of these rows earn, made up from the weights' state; judges are asked, too."""
        for judge in judges_of(self.config["env"]["nemo_gym"]):
            scores = [verdict(judge, str(row["responses_create_params"])) for row in rows]
            print(f"judged by {judge['model']} at {judge['base_url']}: {scores}", flush=True)
        choice, mean = random.Random(self.state), 0.9 - 0.6 * math.exp(-(self.step + 1) / 20)
        groups = [
            [min(1.0, max(0.0, mean + choice.gauss(0, 0.05))) for _ in range(self.own["num_generations_per_prompt"])]
            for _ in rows
        ]
        agents = defaultdict(list)
        for row, group in zip(rows, groups, strict=True):
            agents[row["agent_ref"]["name"]] += group
        rewards = [reward for group in groups for reward in group]
        # The asynchronous loop rolls out one group at a time and logs the mean of what it measured of each.
        measured = groups if self.asynchronous else [rewards]
        spreads = [statistics.stdev(each) if len(each) > 1 else math.nan for each in measured]
        length = 200 + 2 * self.step + choice.random()
        return {
            "reward": statistics.mean(rewards),
            "total_reward/mean": statistics.mean(rewards),
            "total_reward/stddev": statistics.mean(spreads),
            **{f"{agent}/reward/mean": statistics.mean(each) for agent, each in agents.items()},
            "gen_tokens_per_sample/mean": length,
            "mean_gen_tokens_per_sample": length,
            "gen_tokens_per_sample/max": 3 * length,
            "truncation_rate": choice.uniform(0, 0.02),
        }

    def _end_step(
        self, metrics: dict[str, float], rows: Rows, last: bool, began: float, loaders: dict[str, Loader | Collector]
    ) -> bool:
        """Validate, save and log as is due; whether the run is over."""
        period = self.own["val_period"]
        due = (period > 0 and self.step % period == 0) or (self.own["val_at_end"] and last)
        validation = self._validate() if due else {}
        late = self.deadline.reached()
        self.info.pop("val_reward", None)
        if validation:
            self.info["val_reward"] = validation["accuracy"]
        if self.config["checkpointing"]["enabled"] and (late or self.is_due("save_period", last)):
            self.save(metrics, validation, {name: loader.state_dict() for name, loader in loaders.items()})
        self._log(metrics, rows, time.monotonic() - began)
        return self.is_told_to_end(late)

    def _validate(self) -> dict[str, float]:
        """Score the validation set, made up."""
        print(f"▶ Starting validation at step {self.step}...", flush=True)
        _rows(self.config["data"]["validation"]["data_path"])
        accuracy = 0.9 - 0.6 * math.exp(-self.step / 20)
        found = {"accuracy": accuracy, "total_reward/mean": accuracy}
        self.scalars("validation", found, self.step)
        return found

    def _log(self, metrics: dict[str, float], rows: Rows, seconds: float) -> None:
        print(f"\n📊 Training Results:\n  • Loss: {metrics['loss']:.4f}", flush=True)
        print(f"  • Generation KL Error: {metrics['gen_kl_error']:.4f}\n  • Avg Reward: {metrics['reward']:.4f}")
        print(f"\n⏱️  Timing:\n  • Total step time: {seconds:.2f}s", flush=True)
        self.scalars("train", metrics, self.step)
        before = (
            ("exposed_generation", "weight_sync")
            if self.asynchronous
            else ("generation", "prepare_for_generation/total")
        )
        phases = dict(zip((*before, "policy_training"), (0.5 * seconds, 0.1 * seconds, 0.3 * seconds), strict=True))
        self.scalars("timing/train", phases | {"total_step_time": seconds}, self.step)
        if self.asynchronous or not self.config["env"].get("should_log_nemo_gym_responses", False):
            lines = [
                {"content": "", "rewards": metrics["reward"], "agent_ref": row["agent_ref"], "idx": index}
                for index, row in enumerate(rows)
            ]
            _write_lines(self.logs / f"train_data_step{self.step}.jsonl", lines)


def _rows(path: str) -> Rows:
    """The rows of a data file; json.JSONDecodeError for a blank line."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for number, row in enumerate(rows, 1):
        if missing := {"agent_ref", "responses_create_params"} - row.keys():
            raise KeyError(f"row {number} of {path} lacks {', '.join(sorted(missing))}")
    return rows


def _write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    """Run what the command line says."""
    settings = settings_of_command()
    run = Grpo(settings)
    print(f"📊 Using log directory: {run.logs}", flush=True)
    run.train()


if __name__ == "__main__":
    main()
