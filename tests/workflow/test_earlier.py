"""Trees of versions before 0.3.0 after `stagecoach migrate`: all is fresh, lineage verifies, a half-trained stage resumes.

tests/recorded/trees/ holds them, named by commit and recipe; tests/recorded/README.md says how they were made.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from scripts.files import read_json
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT, Workflow
from tests.workflow.test_recorded import write_metadata

TREES = sorted((ROOT / "tests/recorded/trees").glob("*.tar.xz"))
ENDS = {"families": ("text", "vision"), "choices": ("best", "early")}
PAGES = {"stage_page", "pages", "report_html"}
HALF_TRAINED = {"families": "dpo", "choices": "rlvr.lr-0.002"}


@pytest.fixture(params=TREES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def tree(request, tmp_path):
    """A migrated tree, with the notes that Snakemake made of its outputs; `run_name` is its recipe's and run's name."""
    workflow = Workflow(tmp_path)
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="tar")
    workflow.run_name = request.param.name.removesuffix(".tar.xz").partition("-")[2]
    workflow.configure(workflow.run_name)
    for output, noted in json.loads((tmp_path / "snakemake.json").read_text()).items():
        write_metadata(tmp_path, output, noted)
    workflow.run("python", "-m", "scripts.commands", "migrate")
    return workflow


def weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by file and name."""
    files = sorted(folder.glob("*.safetensors"))
    return {f"{path.name}: {name}": tensor for path in files for name, tensor in load_file(path).items()}


def furthest(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference between two checkpoints in any element."""
    return max((tensor - others[name]).abs().max().item() for name, tensor in some.items())


def test_nothing_but_pages_is_to_be_made_and_every_lineage_verifies(tree):
    assert {rule for rule, stages in tree.planned_jobs().items() if stages} <= PAGES
    for end in ENDS[tree.run_name]:
        told = tree.run("python", "-m", "scripts.commands", "lineage", str(tree.results / end / "ckpt"), "--json")
        assert json.loads(told.stdout)["problems"] == []


def test_a_half_trained_stage_resumes_to_the_same_weights(tree):
    """Equal to the rounding of another kind of CPU: a thousandth of what step 2 moved; test_resume.py compares bits."""
    stage = tree.results / HALF_TRAINED[tree.run_name]
    first, last = (weights(stage / f"run/checkpoints/step_{step}") for step in (1, 2))
    identity = read_json(stage / "ckpt/record.json")["identity"]
    for folder in (stage / "run/checkpoints/step_2", stage / "ckpt", stage / "hf", stage / "exports"):
        shutil.rmtree(folder)
    tree.snakemake(f"results/{tree.run_name}/{stage.name}/ckpt/record.json")
    record = read_json(stage / "ckpt/record.json")
    assert (record["step"], record["identity"]) == (2, identity)
    resumed = weights(stage / "ckpt/weights")
    assert resumed.keys() == last.keys()
    assert 1000 * furthest(resumed, last) <= furthest(first, last)
    assert [attempt["from"] for attempt in TrainingFolder(stage / "run").attempts] == [0, 1]
