"""A stand-in for NeMo-RL's SFT driver: all of its files, lines and ends, none of its learning."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_rl.dataloader import Rows
from nemo_rl.epochs import Epochs
from nemo_rl.loop import settings_of_command


class Sft(Epochs):
    """SFT on conversations, which the assistant ends."""

    algorithm = "sft"
    measured = ("loss", "num_unmasked_tokens", "num_valid_samples", "global_valid_seqs", "global_valid_toks")

    def rows_of(self, data: dict[str, Any]) -> Rows:
        """The conversations; ValueError for another data set than that of OpenAI's format, which is not here."""
        if data["dataset_name"] != "openai_format":
            raise ValueError(f"Unsupported dataset_name={data['dataset_name']!r}")
        rows = super().rows_of(data)
        assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
        return rows

    def validate(self) -> dict[str, float]:
        """Score the validation conversations, made up."""
        print(f"▶ Starting validation at step {self.step}...", flush=True)
        found = {"val_loss": 1 / (1 + self.step)}
        self.scalars("validation", found, self.step)
        return found


if __name__ == "__main__":
    settings = settings_of_command()
    run = Sft(settings)
    run.rows_of(settings["data"]["validation"])
    run.train()
