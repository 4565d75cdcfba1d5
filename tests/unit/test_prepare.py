"""What is done before Snakemake reads the rules: versions out of the tested range are refused."""

import re

import pytest

from scripts.controller import prepare
from scripts.errors import UserError
from tests.conftest import ROOT


@pytest.mark.parametrize("package", prepare.TESTED)
@pytest.mark.parametrize("other", ["99.0", "0.1", None])
def test_a_version_out_of_the_range_is_refused_with_the_command_that_installs_one(monkeypatch, package, other):
    prepare.check_versions(package)
    monkeypatch.setattr(prepare, "version_of", lambda name: other)
    with pytest.raises(UserError) as caught:
        prepare.check_versions(package)
    wanted = f"python -m pip install '{package}{prepare.TESTED[package]}'"
    assert f"{package} is {other or 'not installed'}" in str(caught.value) and wanted in str(caught.value)


def test_the_pinned_versions_are_the_newest_tested_and_the_snakefile_asks_for_the_oldest():
    pins = (ROOT / "envs/controller.txt").read_text()
    for package, tested in prepare.TESTED.items():
        assert re.search(rf"^{package}==(\S+)$", pins, re.MULTILINE)[1] in prepare.SpecifierSet(tested)
    oldest = re.search(r"min_version\(\"(\S+)\"\)", (ROOT / "Snakefile").read_text())[1]
    assert prepare.TESTED["snakemake"].startswith(f">={oldest},"), oldest
