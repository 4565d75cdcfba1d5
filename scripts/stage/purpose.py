"""What a job of rule train is for, as far as can be told before it starts: what it asks for follows from that."""

from dataclasses import dataclass
from enum import StrEnum

from scripts.stage.state import StageState

WAITED = "waited"
"""The outcome of an attempt that found its stage not trained and was not to train."""


class Kind(StrEnum):
    """What a job of rule train does."""

    TRAIN = "train"
    """It trains, on all of the stage's nodes."""
    PUBLISH = "publish"
    """It publishes what is trained, or what another process trains now."""
    FETCH = "fetch"
    """It takes what is trained from the remote store, then publishes."""
    WAIT = "wait"
    """It waits for the Slurm job of an earlier call that still trains the stage, then publishes."""


@dataclass(frozen=True)
class Purpose:
    """What a job of rule train is for; `slurm_job` is the one that it waits for, 0 for none."""

    kind: Kind
    slurm_job: int = 0

    @property
    def trains(self) -> bool:
        """Whether the job may train, so that it asks for all of the stage's nodes."""
        return self.kind is Kind.TRAIN

    @property
    def waits(self) -> bool:
        """Whether the job lasts as long as another one's training."""
        return self.kind is Kind.WAIT


def purpose_of(state: StageState, attempts: list[str], slurm_job: int, on_slurm: bool) -> Purpose:
    """Return what a job of rule train is for.

    `attempts` are the outcomes of this call's attempts on the stage, `slurm_job` is the job of an earlier call that
    still trains it (0: none). Without Slurm a fetching job asks for what a training asks for: both are of one machine.
    """
    if slurm_job:
        return Purpose(Kind.WAIT, slurm_job)
    # what was there by name was no sound checkpoint, so a job that may not train came for nothing
    if attempts and attempts[-1] == WAITED:
        return Purpose(Kind.TRAIN)
    is_training = state.state == "training" and not state.trains_other
    if state.is_fetched and on_slurm:
        return Purpose(Kind.FETCH)
    if state.is_trained or is_training:
        return Purpose(Kind.PUBLISH)
    return Purpose(Kind.TRAIN)
