"""Every recipe through its release's own loader and typed config, in a Python that imports the release."""

from pathlib import Path

import pytest

from benchmarks.recipes import on_release, resolve
from tests.production import CHECKOUTS, PYTHON, TRIED, needs_nemo_rl

pytestmark = needs_nemo_rl


@pytest.mark.parametrize("release", TRIED)
def test_a_release_takes_what_its_recipes_say_and_keeps_it(release):
    found = resolve(release, Path(CHECKOUTS), Path(PYTHON).absolute())
    assert [one.recipe for one in found] == [recipe.name for recipe in on_release(release)] != []
    for one in found:
        assert (one.unknown, one.refused, one.differ) == ([], [], []), one.recipe
        for stage, config in one.resolved.items():
            assert config["policy"]["tokenizer"]["name"] == config["policy"]["model_name"] == "/model", stage
            assert "/anywhere" in str(config["data"]), f"{one.recipe}: {stage}: its splits are told"
