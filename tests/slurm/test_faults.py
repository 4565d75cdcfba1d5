"""What a person is promised of faults, with some of them caused for real; benchmarks/faults.py causes many more."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.slurm.chain import make_base
from tests.slurm.faults import FAULTS, suffer


@pytest.fixture(scope="module")
def base(possible, tmp_path_factory):
    """A tree whose next stage trains through Slurm."""
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "name",
    [
        "scancel-pending",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("limit", "snakemake-killed-pending")),
    ],
)
def test_nothing_is_lost_and_one_message_says_why(base, slurm, tmp_path, name):
    outcome = suffer(FAULTS[name], base, tmp_path, slurm)
    slurm.wait_idle()
    assert outcome.problems == []
