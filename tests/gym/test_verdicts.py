"""What is counted as failed or unjudged of NeMo-RL's events are fields of verdicts of NeMo-Gym's servers and agents."""

import os
import re
from pathlib import Path

import pytest

from scripts.backends.nemo_rl.metrics import NAMES
from tests.gym.verify import PYTHON, needs_gym

NEWER = {"oom_killed", "eval_oom_killed", "sandbox_failed"}  # than 0.4.0, the Gym of v0.7.0


def fields_of(folder: Path) -> set[str]:
    """The fields of a yes or a no in a Gym's servers and agents; NeMo-RL logs their means by agent."""
    files = [path for kind in ("responses_api_agents", "resources_servers") for path in folder.glob(f"{kind}/*/app.py")]
    return {name for path in files for name in re.findall(r"^    (\w+): (?:Optional\[)?bool\b", path.read_text(), re.M)}


@needs_gym
def test_the_gym_of_the_release_has_all_but_the_newer_fields():
    (folder,) = PYTHON.parents[1].glob("lib/python3*/site-packages")
    assert set(NAMES["verdicts"]) - fields_of(folder) == NEWER


@pytest.mark.skipif("STAGECOACH_NEMO_GYM" not in os.environ, reason="STAGECOACH_NEMO_GYM names no checkout of NeMo-Gym")
def test_a_newer_gym_has_every_field():
    assert set(NAMES["verdicts"]) <= fields_of(Path(os.environ["STAGECOACH_NEMO_GYM"]))
