"""A stand-in for NeMo-RL's DPO driver: all of its files, lines and ends, none of its learning."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_rl.epochs import Epochs
from nemo_rl.loop import settings_of_command


class Dpo(Epochs):
    """DPO on pairs."""

    algorithm = "dpo"
    measured = (
        *("loss", "sft_loss", "preference_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"),
        *("num_valid_samples", "global_valid_seqs", "global_valid_toks"),
    )

    def note(self, validation: dict[str, float]) -> None:
        """All that was measured by the last validation."""
        stale = [name for name in self.info if name.startswith("val") and not name.endswith("_num_valid_samples")]
        self.info = {name: value for name, value in self.info.items() if name not in stale} | validation

    def validate(self) -> dict[str, float]:
        """Score the validation pairs, made up."""
        print(f"▶ Starting validation at step {self.step} for `default` set..", flush=True)
        found = dict.fromkeys(self.measured, 1 / (1 + self.step))
        self.scalars("validation-default", found, self.step)
        return {f"validation-default_{name}": value for name, value in found.items()}


if __name__ == "__main__":
    Dpo(settings_of_command()).train()
