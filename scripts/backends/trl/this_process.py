"""Train in this process, as the only one of a stage or as one of its ranks."""

import sys

from scripts.backends.protocol import TrainingJob


def train_here(job: TrainingJob) -> None:
    """Train a stage in this process; torch and TRL are loaded now, after all that needs neither."""
    # peft imports bitsandbytes, which takes a second, for stages without 4 bits too
    if "bitsandbytes" not in job.settings.packages:
        sys.modules.setdefault("bitsandbytes", None)
    from scripts.backends.trl.train import train_rank  # noqa: PLC0415 - see above

    train_rank(job)
