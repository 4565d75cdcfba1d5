"""The purpose of a job of rule train, as known before the start; nodes and options follow from the purpose."""

from dataclasses import dataclass
from enum import StrEnum

from scripts.stage.state import StageState

WAITED = "waited"
"""The outcome of an attempt that found its stage not trained and was not to train."""


class Kind(StrEnum):
    """Work of a job of rule train."""

    TRAIN = "train"
    """Train, on all of the stage's nodes."""
    PUBLISH = "publish"
    """Publish a trained stage, or a stage in training by another process."""
    FETCH = "fetch"
    """Take the training from the remote store, then publish."""
    WAIT = "wait"
    """Wait for the training Slurm job of an earlier call, then publish."""


@dataclass(frozen=True)
class Purpose:
    """The purpose of a job of rule train; `slurm_job` is waited for, 0: none."""

    kind: Kind
    slurm_job: int = 0

    @property
    def trains(self) -> bool:
        """Whether the job may train, and asks for all of the stage's nodes."""
        return self.kind is Kind.TRAIN

    @property
    def waits(self) -> bool:
        """Whether the job lasts as long as another one's training."""
        return self.kind is Kind.WAIT


def purpose_of(state: StageState, attempts: list[str], slurm_job: int, on_slurm: bool) -> Purpose:
    """Return the purpose of a job of rule train.

    `attempts` are the outcomes of this call's attempts on the stage, `slurm_job` is the job of an earlier call that
    still trains the stage (0: none). Without Slurm a fetching job asks for the same as a training: one machine.
    """
    if slurm_job:
        return Purpose(Kind.WAIT, slurm_job)
    # what was there by name was no sound checkpoint, so a job that may not train came for nothing
    if attempts and attempts[-1] == WAITED:
        return Purpose(Kind.TRAIN)
    is_training = state.state == "training" and not state.trains_other
    if state.is_fetched and on_slurm:
        return Purpose(Kind.FETCH)
    is_trained = state.is_trained and not state.is_foreseen  # what is foreseen is told by no record of this run
    if is_trained or is_training:
        return Purpose(Kind.PUBLISH)
    return Purpose(Kind.TRAIN)
