"""What is done before Snakemake reads the rules: other versions than the pinned ones are refused."""

import re

import pytest

from scripts.commands import prepare
from scripts.errors import UserError
from tests.conftest import ROOT

PACKAGES = (prepare.SNAKEMAKE, prepare.SLURM_PLUGIN)


def test_the_pinned_versions_are_taken():
    prepare.check_versions(ROOT / prepare.PINS, *PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_than_the_pinned_one_is_refused_and_the_message_says_what_to_install(monkeypatch, package):
    installed = prepare.version
    monkeypatch.setattr(prepare, "version", lambda name: "99.0" if name == package else installed(name))
    pinned = re.search(rf"^{package}==(.+)$", (ROOT / prepare.PINS).read_text(), re.MULTILINE)[1]
    with pytest.raises(UserError) as caught:
        prepare.check_versions(ROOT / prepare.PINS, *PACKAGES)
    assert f"{package} is 99.0" in str(caught.value) and f"pip install {package}=={pinned}" in str(caught.value)


def test_a_plugin_that_is_missing_is_named(monkeypatch):
    def version(name: str) -> str:
        raise prepare.PackageNotFoundError(name)

    monkeypatch.setattr(prepare, "version", version)
    with pytest.raises(UserError, match="not installed"):
        prepare.check_versions(ROOT / prepare.PINS, prepare.SLURM_PLUGIN)
