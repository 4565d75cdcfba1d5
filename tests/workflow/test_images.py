"""The rules of container images: nothing is made unasked, and what changed is made again."""

import json
import os
import re

import pytest
import yaml

from tests.conftest import Workflow
from tests.unit.test_images import DIGEST, DOCKER, ENROOT, calls_of, program, sqsh

__all__ = ["program", "sqsh"]  # fixtures


@pytest.fixture
def workflow(tmp_path):
    (tmp_path / "tree").mkdir()
    return Workflow(tmp_path / "tree")


def test_nothing_is_made_unless_it_is_asked_for_by_name(workflow):
    plan = workflow.snakemake("--dry-run")
    assert not re.search(r"build_image|import_image|fetch_sif", plan)
    wanted = ("images/omni3-rl.sqsh", "images/nemo-rl-v0.7.0.sqsh", "images/sif/record.json")
    plan = workflow.snakemake("--dry-run", *wanted, "--config", "recipe=config/recipes/tiny.yaml")
    counts = dict(re.findall(r"^(build_image|import_image|fetch_sif|train)\s+(\d+)$", plan, re.MULTILINE))
    assert counts == {"build_image": "1", "import_image": "2", "fetch_sif": "1"}


def test_snakemake_builds_and_imports_and_a_changed_base_does_both_again(workflow, program, sqsh):
    """docker and enroot are recording programs."""
    workflow.environment["PATH"] = (
        f"{workflow.environment['PATH'].split(os.pathsep)[0]}{os.pathsep}{os.environ['PATH']}"
    )
    docker = program("docker", DOCKER.format(digest=DIGEST, found=DIGEST))
    enroot = program("enroot", ENROOT.format(digest=DIGEST, image=sqsh))
    workflow.snakemake("images/omni3-rl.sqsh")
    record = json.loads((workflow.root / "images/omni3-rl.sqsh.json").read_text())
    assert (record["image"], record["source"], record["digest"]) == (
        "omni3-rl",
        "dockerd://nemo-rl:omni3-98ba11c0a",
        DIGEST,
    )
    count = len(calls_of(docker)), len(calls_of(enroot))
    (workflow.root / "containers/omni.Dockerfile").touch()
    assert "Nothing to be done" in workflow.snakemake("images/omni3-rl.sqsh")
    assert (len(calls_of(docker)), len(calls_of(enroot))) == count
    path = workflow.root / "config/images.yaml"
    described = yaml.safe_load(path.read_text())
    described["images"]["omni3-rl"]["source"]["base"] += "@" + DIGEST
    path.write_text(yaml.safe_dump(described))
    workflow.snakemake("images/omni3-rl.sqsh")
    assert any(
        f"BASE_IMAGE=nvcr.io/nvidia/cuda-dl-base:25.05-cuda12.9-devel-ubuntu24.04@{DIGEST}" in call
        for call in calls_of(docker)
    )
    assert len(calls_of(enroot)) == 2 * count[1]


def test_a_recipe_without_swe2_says_so_when_task_images_are_asked_for(workflow):
    said = workflow.snakemake("--dry-run", "images/sif/record.json", check=False)
    assert "config/recipes/short.yaml: has no blend swe2, whose rows say which task images are needed" in said


def test_a_mistake_in_the_images_is_one_message_of_snakemake(workflow):
    path = workflow.root / "config/images.yaml"
    path.write_text(path.read_text().replace("kind: git", "kind: gti"))
    said = workflow.snakemake("--dry-run", check=False)
    assert re.search(
        r"config/images.yaml:\d+: images.nemo-skills-sandbox.source.kind: 'gti' is not known; did you mean git", said
    )
    assert "Traceback" not in said
