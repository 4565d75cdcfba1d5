"""The rooms' arrows run one way, and the controller needs neither torch nor Ray."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

BASE = {"errors", "files"}
MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "drawing": set(),
    "recipe": BASE | {"backends"},
    "rewards": BASE | {"recipe"},
    "data": BASE | {"recipe", "rewards"},
    "launch": BASE | {"recipe"},
    "images": BASE | {"recipe", "data"},
    "model": BASE,
    "stage": BASE | {"drawing", "recipe", "rewards", "data", "launch", "backends", "snakemake"},
    "evaluate": BASE | {"recipe", "rewards", "data", "launch", "stage", "model", "backends"},
    "backends": BASE | {"recipe", "rewards", "data", "launch", "stage", "model", "evaluate"},
    "train": BASE | {"recipe", "rewards", "data", "launch", "stage", "backends"},
    "report": BASE | {"drawing", "recipe", "stage"},
    "snakemake": BASE | {"launch", "stage"},
    "commands": BASE
    | {"drawing", "recipe", "data", "launch", "model", "stage", "backends", "report", "lineage", "card"},
    "lineage": BASE | {"drawing", "recipe", "stage"},
    "card": BASE | {"recipe", "model", "stage", "lineage"},
    "track": BASE | {"lineage"},
}
NEED_TORCH_OR_RAY = {
    "scripts.backends.trl.train",
    "scripts.backends.trl.callback",
    "scripts.backends.trl.driver",
    "scripts.backends.trl.grpo",
    "scripts.backends.trl.preferences",
    "scripts.backends.trl.setup",
    "scripts.backends.trl.sft",
    "scripts.backends.trl.vllm",
    "scripts.backends.trl.worker",
    "scripts.backends.nemo_rl.safetensors",
    "scripts.model.load",
    "scripts.backends.trl.ranks",
    "scripts.model.random_init",
    "scripts.evaluate.generate",
    "scripts.evaluate.score",
    "scripts.evaluate.probe",
}
MODULES = sorted(path for path in (ROOT / "scripts").rglob("*.py") if path.name != "__init__.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_run_one_way(path):
    room = module_name(path).split(".")[1]
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            if name.startswith("scripts."):
                other = name.split(".")[1]
                assert other == room or other in MAY_IMPORT[room], f"{room} imports {other}"


def test_what_the_controller_runs_imports_without_torch_and_ray():
    names = [module_name(path) for path in MODULES if module_name(path) not in NEED_TORCH_OR_RAY]
    program = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'trl', 'datasets', 'accelerate', 'ray'): sys.modules[name] = None\n"
        "import importlib\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_controllers_requirements_name_neither_torch_nor_ray():
    pins = (ROOT / "envs/controller.txt").read_text()
    assert not any(line.startswith(("torch=", "transformers=", "trl=", "ray=")) for line in pins.splitlines())


def test_the_required_versions_are_pinned():
    pins = "".join((ROOT / "envs" / name).read_text() for name in ("controller.txt", "trl.txt"))
    for pin in (
        "snakemake==9.27.1",
        "snakemake-executor-plugin-slurm==2.8.0",
        "torch==2.13.0",
        "transformers==5.23.0",
        "trl==1.16.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "ray==2.60.0",
    ):
        assert f"{pin}\n" in pins
