"""A trainer's steps: log, report progress, seal checkpoints, stop."""

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from scripts.backends.protocol import TrainingJob
from scripts.backends.trl.grpo import ENVIRONMENT_PREFIX, REWARD_SECONDS, ROLLOUT_SECONDS
from scripts.backends.trl.ranks import as_rank_0_says, rank, wait_for_all_ranks
from scripts.errors import UserError
from scripts.evaluate.step_criteria import refuse_divergence
from scripts.stage.rundir import seal_checkpoint
from scripts.stage.store import prune_checkpoints


class StageCallback(TrainerCallback):
    """Log each step, report progress, seal whole checkpoints and stop, decided by rank 0 for all ranks.

    A step may be several updates (TRL counts updates) and ends with the last.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.updates = job, job.config.updates_per_step
        self.log_path = job.run / "metrics.jsonl"
        self.started = self.step_started = time.monotonic()
        self.first_step = 0
        self.tokens = 0.0
        self.saving_since = 0.0
        self.step_seconds: deque[float] = deque(maxlen=20)
        self.save_seconds: deque[float] = deque(maxlen=20)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Note the attempt's start, and end a line of the log that a kill cut."""
        self.started, self.first_step = time.monotonic(), state.global_step // self.updates
        self.tokens = state.num_input_tokens_seen  # what GRPO's count goes on from; the others begin at 0 again
        if rank() == 0 and self.log_path.exists() and not self.log_path.read_bytes().endswith(b"\n"):
            with self.log_path.open("ab") as file:  # a kill cut the last line; what follows must not join it
                file.write(b"\n")

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """End a diverging training; start the step's clock."""
        if state.global_step % self.updates == 0:
            if rank() == 0:
                refuse_divergence(
                    self.job.stage, self.job.settings.gate, self.job.run, state.global_step // self.updates
                )
            self.step_started = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint and an end at the job's last step, and when a stop is due."""
        if state.global_step % self.updates:
            return
        self.step_seconds.append(time.monotonic() - self.step_started)
        is_last = state.global_step == self.job.max_num_steps * self.updates
        if is_last or as_rank_0_says(rank() == 0 and self._stop_is_due()):
            control.should_save = control.should_training_stop = True
        self.saving_since = time.monotonic()

    def _stop_is_due(self) -> bool:
        """Asked with the longest of the last steps and saves; an unknown save is taken to last a step."""
        longest_step = max(self.step_seconds)
        return self.job.stop.is_due(longest_step, max(self.save_seconds, default=longest_step))

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the step to the log, and print progress now and then.

        Trainer's history of all steps, a part of every checkpoint, is cleared.
        """
        state.log_history.clear()
        if "loss" not in logs or rank() != 0:
            return
        now, step = time.monotonic(), state.global_step // self.updates
        entry: dict[str, Any] = {"step": step, "seconds": now - self.step_started}
        entry |= {ours: logs[theirs] for theirs, ours in self.job.config.metrics.items() if theirs in logs}
        if "num_tokens" in logs:
            entry["tokens"], self.tokens = logs["num_tokens"] - self.tokens, logs["num_tokens"]
        is_filtered = getattr(self.job.config.section, "overlong_filtering", None)
        if is_filtered is not None:
            entry["masked_share"] = entry.get("truncation_rate") if is_filtered else 0.0
        entry["environment_rewards"] = {
            key.removeprefix(ENVIRONMENT_PREFIX): value
            for key, value in logs.items()
            if key.startswith(ENVIRONMENT_PREFIX)
        }
        entry["timing"] = _phases(entry["seconds"], logs)
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        left = (now - self.started) / (step - self.first_step) * (self.job.max_num_steps - step)
        if step % max(1, self.job.max_num_steps // 20) == 0 or left == 0:
            print(f"{self.job.stage}: {_progress(entry, self.job.max_num_steps, left)}", flush=True)

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Seal the saved checkpoint, and remove checkpoints beyond the kept."""
        wait_for_all_ranks()
        if rank() != 0:
            return
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for name in rng_files(self.job.ranks):
            _wait_for(saved / name)
        seal_checkpoint(saved, self.job.run, state.global_step // self.updates)
        self.save_seconds.append(time.monotonic() - self.saving_since)
        prune_checkpoints(self.job.run, self.job.settings.checkpointing)


def _phases(seconds: float, logs: dict[str, Any]) -> dict[str, float] | None:
    """Return the seconds of a step by phase; None without rollouts."""
    if ROLLOUT_SECONDS not in logs:
        return None
    rollouts, rewards = logs[ROLLOUT_SECONDS], logs[REWARD_SECONDS]
    return {"generation": rollouts - rewards, "rewards": rewards, "update": seconds - rollouts}


def rng_files(ranks: int) -> list[str]:
    """Return the names of the ranks' random states in Trainer's checkpoints."""
    return [f"rng_state_{number}.pth" for number in range(ranks)] if ranks > 1 else ["rng_state.pth"]


def _wait_for(file: Path, seconds: float = 90) -> None:
    """Wait until this host sees a file of another host; a shared file system may take half a minute."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{file}: not seen after {seconds:.0f} s; results/ must be shared by all nodes of a stage")
        time.sleep(0.5)


def _progress(entry: dict[str, Any], last: int, left: float) -> str:
    parts = [f"step {entry['step']}/{last}"]
    if entry.get("reward_mean") is not None:
        parts.append(f"reward {entry['reward_mean']:.3f} ± {entry['reward_std']:.3f}")
        parts.append(f"length {entry['response_length_mean']:.1f}")
    else:
        parts.append(f"loss {entry['loss']:.3f}")
    parts += [f"{entry['seconds']:.2f} s/step", f"{left:.0f} s left"]
    return ", ".join(parts)
