"""Every recipe through its release's own loader and typed config, in a Python that imports the release."""

import os
from pathlib import Path

import pytest

from benchmarks.recipes import on_release, resolve
from scripts.backends.nemo_rl.releases import load_releases

CHECKOUTS, PYTHON = (os.environ.get(f"STAGECOACH_NEMO_RL{name}") for name in ("", "_PYTHON"))

pytestmark = pytest.mark.skipif(
    not (CHECKOUTS and PYTHON),
    reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts, or STAGECOACH_NEMO_RL_PYTHON no Python for a CPU",
)


@pytest.mark.parametrize("release", load_releases())
def test_a_release_takes_what_its_recipes_say_and_keeps_it(release):
    found = resolve(release, Path(CHECKOUTS), Path(PYTHON).absolute())
    assert [one.recipe for one in found] == [recipe.name for recipe in on_release(release)] != []
    for one in found:
        assert (one.unknown, one.refused, one.differ) == ([], [], []), one.recipe
        for stage, config in one.resolved.items():
            assert config["policy"]["tokenizer"]["name"] == config["policy"]["model_name"] == "/model", stage
            assert "/anywhere" in str(config["data"]), f"{one.recipe}: {stage}: its splits are told"
