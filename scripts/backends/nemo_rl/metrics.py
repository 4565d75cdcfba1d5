"""NeMo-RL's TensorBoard events as lines of ``metrics.jsonl``."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from scripts.files import append_json
from scripts.stage.progress import read_log

NAMES = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8"))
KL = "train/kl_penalty"
LAST_OF_A_STEP = "seconds"
LEARNED = "loss"
_VERDICT = re.compile(r"train/(.+)/(\w+)/mean")
_PHASE = "timing/train/"


class StepLog:
    """Follow the events of all starts of a driver, and add a line to ``metrics.jsonl`` for each finished step.

    A resumed step is logged again. A step without a loss was not trained: the synchronous loop logs rollouts before
    training. `measures_kl`: whether a reference model is loaded; NeMo-RL logs a KL of 0 without. `samples`: samples of
    a step, with masked samples; None: unknown.
    """

    def __init__(self, logs: Path, output: Path, measures_kl: bool, samples: int | None = None) -> None:
        self.logs, self.output, self.measures_kl, self.samples = logs, output, measures_kl, samples
        self._loaders: dict[Path, EventFileLoader] = {}
        self._open: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        self.last_step, self.last_seconds = 0, 0.0
        self._read_events()
        for entry in read_log(output):
            self._open.pop(entry["step"], None)
        self.follow(is_over=True)  # logged by an attempt after its watch was killed

    def follow(self, is_over: bool = False) -> int:
        """Log the steps finished since the last call, all trained steps once training `is_over`; return the count."""
        self._read_events()
        newest = max(self._open, default=0)
        trained = [step for step in sorted(self._open) if LEARNED in self._open[step]]
        ended = [step for step in trained if is_over or step < newest or LAST_OF_A_STEP in self._open[step]]
        entries = [{"step": step, **self._with_shares(self._open.pop(step))} for step in ended]
        if entries:
            self.last_step, self.last_seconds = ended[-1], entries[-1].get(LAST_OF_A_STEP, 0.0)
            for entry in entries:
                append_json(self.output, entry)
        return len(ended)

    def _with_shares(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Add shares of the step's samples, the largest of several for a column, and of the step's time."""
        for column, share in entry.pop("shares", {}).values():
            entry[column] = max(share, entry.get(column, 0.0))
        if self.samples is not None and "valid_samples" in entry:
            entry["masked_share"] = max(0.0, 1 - entry["valid_samples"] / self.samples)
        timing, seconds = entry.get("timing", {}), entry.get(LAST_OF_A_STEP)
        for column, phases in NAMES["phases"].items():
            spent = [timing[phase] for phase in phases if phase in timing]
            if spent and seconds:
                entry[column] = sum(spent) / seconds
        return entry

    def _read_events(self) -> None:
        for path in sorted(self.logs.glob("exp_*/tensorboard/**/events.out.tfevents.*")):
            if path not in self._loaders:
                self._loaders[path] = EventFileLoader(str(path))
            for event in self._loaders[path].Load():
                self._take(event)

    def _take(self, event: Any) -> None:
        for value in event.summary.value if event.HasField("summary") else ():
            array = make_ndarray(value.tensor) if value.HasField("tensor") else None
            if array is None or array.size != 1 or array.dtype.kind not in "fiu" or event.step < 1:
                continue  # a text, a histogram, ...
            number = float(array.item())
            verdict = _VERDICT.fullmatch(value.tag)
            if value.tag in NAMES["columns"]:
                self._open[event.step][NAMES["columns"][value.tag]] = number
            elif value.tag == KL and self.measures_kl:
                self._open[event.step]["kl"] = number
            elif value.tag.startswith(_PHASE):
                # a logged step is not opened again for a phase after the step's whole time
                if event.step in self._open and not value.tag.endswith("_per_gpu"):
                    self._open[event.step].setdefault("timing", {})[value.tag.removeprefix(_PHASE)] = number
            elif value.tag in NAMES["counts"] and self.samples:
                shares = self._open[event.step].setdefault("shares", {})
                shares[value.tag] = NAMES["counts"][value.tag], number / self.samples
            elif verdict and verdict[2] in NAMES["verdicts"]:
                shares = self._open[event.step].setdefault("shares", {})
                shares[value.tag] = NAMES["verdicts"][verdict[2]], number
            elif verdict and verdict[2] == "reward":
                self._open[event.step].setdefault("environment_rewards", {})[verdict[1]] = number
