"""A Slurm of three hosts for the tests that need one."""

import os

import pytest

from tests.slurm.cluster import Cluster, reason_missing


@pytest.fixture(scope="session")
def possible():
    """Skip where no Slurm of several hosts can be brought up; fail where it is required."""
    if reason := reason_missing():
        (pytest.fail if os.environ.get("STAGECOACH_REQUIRE_SLURM") else pytest.skip)(reason)


@pytest.fixture(scope="session")
def slurm(possible, tmp_path_factory):
    """Three idle hosts, eight GPUs each; a test that harms one leaves it as it was."""
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
