"""No response escapes, hangs or forges the verdict of a verifier in a confined process (`tests.unit.hostile`)."""

import os
import subprocess
import sysconfig

import pytest

from tests.conftest import ROOT
from tests.unit import hostile


def test_the_confined_verifiers_survive_what_is_meant_for_them():
    assert not any(hostile.confined(seconds=0.3).values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_confined_verifiers_survive_it_as_another_user_too():
    """By the system's Python, since nobody may not read root's; it must be of the version of our packages."""
    program = ["/usr/bin/python3", "-m", "tests.unit.hostile", "--confined", "--seconds", "0.3"]
    packages = os.pathsep.join([str(ROOT), sysconfig.get_path("platlib")])
    done = subprocess.run(
        program,
        cwd="/",
        env={"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    if "Permission denied" in done.stderr or "No module named" in done.stderr:
        pytest.skip("nobody cannot read this repository, or the packages are not of the system's Python")
    assert done.stdout == "{}\n", done.stderr
