"""NeMo-RL's real loops on a CPU and the stand-in, on the same schedules: ends, checkpoints, lines and steps are the same.

Real are the release's drivers, loops, loss, data loader, replay buffer, checkpoints, logger, Gym and Ray; its policy and
its generator are classes for the CPU. A start takes a minute, so this runs where it is asked for.
"""

import json
import os
from pathlib import Path

import pytest

from tests.nemo_rl.loops import Real, StandIn, Start, write_inputs

RELEASE = os.environ.get("STAGECOACH_NEMO_RL_RELEASE", "v0.7.0")
CHECKOUTS, PYTHON = (os.environ.get(f"STAGECOACH_NEMO_RL{name}") for name in ("", "_PYTHON"))
REPORT = os.environ.get("STAGECOACH_PARITY_REPORT")
BATCHES = 5
SCHEDULES = {
    "fresh": [Start(most=2)],
    "deadline": [Start(at_once=True)],
    "killed in a save and resumed twice": [Start(fault=("die", 2)), Start(at_once=True), Start()],
    "end of data and resumed": [Start(), Start(most=6)],
    "exception": [Start(fault=("raise", 2))],
    "weights not taken": [Start(fault=("refit", 0))],
}
PAIRS = [
    (kind, name)
    for kind in ("sync", "async", "dpo", "sft")
    for name in SCHEDULES
    if kind not in ("dpo", "sft") or name != "weights not taken"
]

pytestmark = pytest.mark.skipif(
    not (CHECKOUTS and PYTHON),
    reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts, or STAGECOACH_NEMO_RL_PYTHON no Python for a CPU",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny model and rows for a few steps."""
    directory = tmp_path_factory.mktemp("parity")
    write_inputs(directory, BATCHES)
    return directory


@pytest.fixture(scope="module")
def stand_in(inputs):
    """The stand-in."""
    return StandIn(inputs, RELEASE)


@pytest.fixture(scope="module")
def real(inputs):
    """The release's own loops."""
    with Real(inputs, Path(CHECKOUTS, RELEASE).resolve(), Path(PYTHON).absolute()) as loops:
        yield loops


@pytest.mark.parametrize(("kind", "schedule"), PAIRS)
def test_the_stand_in_does_as_the_real_loop(inputs, real, stand_in, kind, schedule):
    found = {}
    for loops in (stand_in, real):
        run = inputs / "runs" / type(loops).__name__ / kind / schedule.replace(" ", "-")
        found[type(loops).__name__] = [loops.train(kind, start, run) for start in SCHEDULES[schedule]]
    if REPORT:
        with Path(REPORT).open("a") as file:
            file.write(json.dumps({"kind": kind, "schedule": schedule} | found) + "\n")
    assert found["StandIn"] == found["Real"]
