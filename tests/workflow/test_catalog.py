"""What the workflow catalog and snakedeploy rely on: workflow/Snakefile, fetched by Git at a tag, and .test/."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

DEPLOYED = """
configfile: "config/config.yaml"


module stagecoach:
    snakefile:
        github("owner/stagecoach", path="workflow/Snakefile", tag="{tag}")
    config:
        config


use rule * from stagecoach
"""


def dry_run(folder, *options, **variables):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | variables
    command = ["snakemake", "--dry-run", "--cores", "2", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A folder as snakedeploy leaves it, Stagecoach installed as 1.2.3, a Git that finds GitHub's repository on this disk."""
    folder = tmp_path_factory.mktemp("deployed")
    repository = folder / "github/owner/stagecoach"
    for part in ("rules", "workflow", "envs", "docs/captions"):
        shutil.copytree(ROOT / part, repository / part)
    shutil.copy(ROOT / "Snakefile", repository)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=all"]):
        subprocess.run([*git, *arguments], check=True)
    for tag in ("v1.2.3", "v1.2.4"):
        subprocess.run([*git, "tag", tag], check=True)
    (folder / "gitconfig").write_text(f'[url "file://{folder}/github/"]\n\tinsteadOf = https://github.com/\n')
    metadata = folder / "installed/stagecoach_workflow-1.2.3.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: stagecoach-workflow\nVersion: 1.2.3\n")
    (folder / "without").mkdir()
    (folder / "without/stagecoach.py").write_text("raise ImportError")
    shutil.copytree(ROOT / "config", folder / "project/config")
    (folder / "project/workflow").mkdir()
    return folder


@pytest.mark.parametrize(
    ("tag", "packages", "expected"),
    [
        ("v1.2.3", ["installed", ROOT], r"(?m)^train +7$"),
        ("v1.2.4", ["installed", ROOT], r"(?m)^error: .* 1\.2\.4, and 1\.2\.3 is installed: python -m pip install"),
        (
            "v1.2.3",
            ["without"],
            r"Stagecoach is not installed .*: python -m pip install stagecoach-workflow==1\.2\.3\n",
        ),
    ],
)
def test_a_deployed_workflow_runs_by_the_installed_package_of_its_tag(deployed, tag, packages, expected):
    (deployed / "project/workflow/Snakefile").write_text(DEPLOYED.format(tag=tag))
    status, said = dry_run(
        deployed / "project",
        PYTHONPATH=os.pathsep.join(str(deployed / package) for package in packages),
        GIT_CONFIG_GLOBAL=str(deployed / "gitconfig"),
        XDG_CACHE_HOME=str(deployed / "cache"),
    )
    assert (status == 0) == ("train" in expected), said
    assert re.search(expected, said) and "Traceback" not in said, said


def test_the_catalogs_test_project_is_a_chain_to_its_report():
    status, said = dry_run(ROOT, "--directory", ".test", "--snakefile", "workflow/Snakefile", "--forceall")
    assert status == 0, said
    assert re.search(r"^train +3$", said, re.MULTILINE) and re.search(r"^report_html +1$", said, re.MULTILINE), said
