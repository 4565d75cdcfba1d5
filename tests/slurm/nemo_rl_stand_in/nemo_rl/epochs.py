"""The loop that SFT and DPO of the stand-in share: some epochs over the rows, no word at their end."""

import json
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from nemo_rl.dataloader import Loader, Rows
from nemo_rl.loop import Loop


class Epochs(Loop):
    """Some epochs over the rows of a file. A subclass says what a step measures and how it is validated."""

    measured: tuple[str, ...]

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.step = self.info["total_steps"]
        data, size = settings["data"], settings["policy"]["train_global_batch_size"]
        self.loader = Loader(self.rows_of(data["train"]), size, data["num_workers"])
        if self.resumed:
            self.loader.load_state_dict(torch.load(self.resumed / "train_dataloader.pt"))

    def rows_of(self, data: dict[str, Any]) -> Rows:
        """The rows of a data set of the configuration."""
        return [json.loads(line) for line in Path(data["data_path"]).read_text().splitlines()]

    def begin(self) -> dict[str, Any]:
        """What is known of a run that has not begun."""
        return dict.fromkeys(("epoch", "step", "total_steps", "consumed_samples"), 0) | {"total_valid_tokens": 0.0}

    def train(self) -> None:
        """Run to an end, whichever it is."""
        self.start()
        if self.own["val_at_start"] and not self.step:
            self.validate()
        epochs, most, size = self.own["max_num_epochs"], self.own["max_num_steps"], len(self.loader)
        while self.info["epoch"] < epochs and self.step < most:
            for rows in self.loader:
                began = time.monotonic()
                print(f"\n{'=' * 25} Step {self.step % size + 1}/{min(size, most)} {'=' * 25}", flush=True)
                choice = self.learn(rows)
                self.info["consumed_samples"] += len(rows)
                self.info |= {"step": self.step % size, "total_steps": self.step}
                metrics = {name: choice.random() for name in self.measured} | {"grad_norm": choice.uniform(0.1, 0.5)}
                metrics |= {"num_valid_samples": float(len(rows)), "lr": 1e-6}
                last = self.step >= most or self.step == epochs * size
                if self._end_step(metrics, last, began):
                    return
            self.info["epoch"] += 1
            self.info["step"] = 0

    def _end_step(self, metrics: dict[str, float], last: bool, began: float) -> bool:
        """Validate, save and log as is due; whether the run is over."""
        period = self.own["val_period"]
        due = (period > 0 and self.step % period == 0) or (self.own["val_at_end"] and last)
        validation = self.validate() if due else {}
        late = self.deadline.reached()
        self.note(validation)
        if self.config["checkpointing"]["enabled"] and (late or self.is_due("save_period", last)):
            self.save(metrics, validation, {"train_dataloader.pt": self.loader.state_dict()})
        print(f"\n📊 Training Results:\n  • loss: {metrics['loss']:.4f}", flush=True)
        seconds = time.monotonic() - began
        print(f"\n⏱️  Timing:\n  • Total step time: {seconds:.2f}s", flush=True)
        self.scalars("train", metrics, self.step)
        self.scalars("timing/train", {"policy_training": seconds, "total_step_time": seconds}, self.step)
        return self.is_told_to_end(late)

    def note(self, validation: dict[str, float]) -> None:
        """What training_info.json says of the validation."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Score the validation rows, made up."""
