"""What a job of rule train is for, by the stage's state and by what the call tried before."""

import pytest

from scripts.stage.purpose import Kind, Purpose, purpose_of
from scripts.stage.state import StageState

NEW = {"state": "new", "planned": 4}
TRAINED = NEW | {"state": "trained", "start": 4}
TRAINS = NEW | {"state": "training", "start": 2}
AWAY = NEW | {"start": 4, "is_fetched": True}
AWAY_IN_PART = NEW | {"start": 2, "is_fetched": True}


@pytest.mark.parametrize(
    ("state", "attempts", "slurm_job", "kind"),
    [
        (NEW, [], 0, Kind.TRAIN),
        (NEW | {"start": 3}, ["killed"], 0, Kind.TRAIN),
        (TRAINED, [], 0, Kind.PUBLISH),
        (TRAINED | {"start": 2, "end": 2}, [], 0, Kind.PUBLISH),
        (TRAINS, [], 0, Kind.PUBLISH),
        (TRAINS | {"trains_other": True}, [], 0, Kind.TRAIN),
        (AWAY, [], 0, Kind.FETCH),
        (AWAY_IN_PART, [], 0, Kind.FETCH),
        (TRAINED, ["waited"], 0, Kind.TRAIN),
        (AWAY, ["waited"], 0, Kind.TRAIN),
        (TRAINED, ["waited", "killed"], 0, Kind.PUBLISH),
        (NEW, [], 17, Kind.WAIT),
        (TRAINED, ["waited"], 17, Kind.WAIT),
    ],
)
def test_a_job_on_slurm_is_for_training_only_where_nothing_else_can_do(state, attempts, slurm_job, kind):
    purpose = purpose_of(StageState("sft", **state), attempts, slurm_job, on_slurm=True)
    assert purpose == Purpose(kind, slurm_job)
    assert (purpose.trains, purpose.waits) == (kind is Kind.TRAIN, kind is Kind.WAIT)


@pytest.mark.parametrize(("state", "kind"), [(AWAY, Kind.PUBLISH), (AWAY_IN_PART, Kind.TRAIN)])
def test_without_slurm_a_fetching_job_may_train_what_is_missing(state, kind):
    assert purpose_of(StageState("sft", **state), [], 0, on_slurm=False).kind is kind
