"""A stand-in for NeMo-RL's DPO driver: all of its files, lines and ends, none of its learning."""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from nemo_rl.dataloader import Loader
from nemo_rl.loop import Loop, settings_of_command

MEASURED = (
    *("loss", "sft_loss", "preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"),
    *("num_valid_samples", "global_valid_seqs", "global_valid_toks"),
)


class Dpo(Loop):
    """DPO: some epochs over the pairs; no word at their end."""

    algorithm = "dpo"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.step = self.info["total_steps"]
        data, size = settings["data"], settings["policy"]["train_global_batch_size"]
        pairs = [json.loads(line) for line in Path(data["train"]["data_path"]).read_text().splitlines()]
        self.loader = Loader(pairs, size, data["num_workers"])
        if self.resumed:
            self.loader.load_state_dict(torch.load(self.resumed / "train_dataloader.pt"))

    def begin(self) -> dict[str, Any]:
        """What is known of a run that has not begun."""
        return dict.fromkeys(("epoch", "step", "total_steps", "consumed_samples"), 0) | {"total_valid_tokens": 0.0}

    def train(self) -> None:
        """Run to an end, whichever it is."""
        self.start()
        if self.own["val_at_start"] and not self.step:
            self._validate()
        epochs, most, size = self.own["max_num_epochs"], self.own["max_num_steps"], len(self.loader)
        while self.info["epoch"] < epochs and self.step < most:
            for pairs in self.loader:
                began = time.monotonic()
                print(f"\n{'=' * 25} Step {self.step % size + 1}/{min(size, most)} {'=' * 25}", flush=True)
                choice = self.learn(pairs)
                self.info["consumed_samples"] += len(pairs)
                self.info |= {"step": self.step % size, "total_steps": self.step}
                metrics = {name: choice.random() for name in MEASURED} | {"grad_norm": choice.uniform(0.1, 0.5)}
                metrics |= {"num_valid_samples": float(len(pairs)), "lr": 1e-6}
                last = self.step >= most or self.step == epochs * size
                if self._end_step(metrics, last, began):
                    return
            self.info["epoch"] += 1
            self.info["step"] = 0

    def _end_step(self, metrics: dict[str, float], last: bool, began: float) -> bool:
        """Validate, save and log as is due; whether the run is over."""
        period = self.own["val_period"]
        due = (period > 0 and self.step % period == 0) or (self.own["val_at_end"] and last)
        validation = self._validate() if due else {}
        late = self.deadline.reached()
        stale = [name for name in self.info if name.startswith("val") and not name.endswith("_num_valid_samples")]
        self.info = {name: value for name, value in self.info.items() if name not in stale} | validation
        if self.config["checkpointing"]["enabled"] and (late or self.is_due("save_period", last)):
            self.save(metrics, validation, {"train_dataloader.pt": self.loader.state_dict()})
        print(f"\n📊 Training Results:\n  • loss: {metrics['loss']:.4f}", flush=True)
        seconds = time.monotonic() - began
        print(f"\n⏱️  Timing:\n  • Total step time: {seconds:.2f}s", flush=True)
        self.scalars("train", metrics, self.step)
        self.scalars("timing/train", {"policy_training": seconds, "total_step_time": seconds}, self.step)
        return self.is_told_to_end(late)

    def _validate(self) -> dict[str, float]:
        """Score the validation pairs, made up."""
        print(f"▶ Starting validation at step {self.step} for `default` set..", flush=True)
        found = dict.fromkeys(MEASURED, 1 / (1 + self.step))
        self.scalars("validation-default", found, self.step)
        return {f"validation-default_{name}": value for name, value in found.items()}


if __name__ == "__main__":
    Dpo(settings_of_command()).train()
