"""The rooms' arrows run one way, and the controller needs neither torch nor Ray."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs.schema import ENVIRONMENTS
from tests.conftest import ROOT

BASE = {"credentials", "errors", "files", "installed", "names", "processes", "program", "records"}
RECIPE = BASE | {"recipe"}
ROWS = RECIPE | {"rows"}
STAGE = ROWS | {"rewards", "data", "slurm", "model", "remote", "stage"}
EVALUATE = STAGE | {"evaluate"}
BACKENDS = EVALUATE | {"backends"}
MAY_IMPORT = {
    "credentials": set(),
    "errors": {"credentials"},
    "installed": set(),
    "files": {"errors", "processes"},
    "names": set(),
    "processes": set(),
    "program": {"errors"},
    "records": {"errors", "files", "names"},
    "recipe": BASE,
    "rows": RECIPE,
    "rewards": ROWS,
    "data": ROWS,
    "slurm": RECIPE,
    "model": ROWS,
    "remote": RECIPE,
    "stage": STAGE,
    "report": STAGE,
    "evaluate": EVALUATE,
    "sampling": EVALUATE,
    "backends": BACKENDS,
    "train": BACKENDS,
    "controller": STAGE,
    "commands": BACKENDS | {"train", "report", "controller"},
}
# File names that several rooms may use: a backend's modules, by which others find it, and the programs of its steps.
OF_BACKENDS = {"settings", "backend", "train", "training", "export"}
NEED_TORCH_OR_RAY = {
    "scripts.rewards.gym_application",  # and NeMo-Gym, in whose environment it runs
    "scripts.model.pretrained",
    "scripts.backends.quantize",
    "scripts.backends.trl.train",
    "scripts.backends.trl.driver",
    "scripts.backends.trl.measuring",
    "scripts.backends.trl.merge_weights",
    "scripts.backends.trl.grpo_trainer",
    "scripts.backends.trl.distillation_trainer",
    "scripts.backends.trl.offline_trainers",
    "scripts.backends.trl.validation",
    "scripts.backends.trl.rows",
    "scripts.backends.trl.setup",
    "scripts.backends.trl.skipping",
    "scripts.backends.trl.small_model",
    "scripts.backends.trl.trial_run",
    "scripts.backends.nemo_rl.safetensors",
    "scripts.model.loading",
    "scripts.model.merge",
    "scripts.model.processor",
    "scripts.backends.trl.ranks",
    "scripts.model.generate",
    "scripts.evaluate.turns",
    "scripts.evaluate.score",
    "scripts.evaluate.tasks",
    "scripts.sampling.vllm_engine",
    "scripts.backends.trl.probe",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = sorted(path for path in (ROOT / "scripts").rglob("*.py") if path.name != "__init__.py")
NAMES = {module_name(path) for path in MODULES}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of scripts/ that a module imports, inside functions too, and the names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("scripts."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scripts"):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_run_one_way(path):
    rooms = {name.split(".")[1] for name in imported(ast.parse(path.read_text())) if name != "scripts"}
    own = module_name(path).split(".")[1]
    assert rooms - {own} <= MAY_IMPORT[own]


def test_no_room_imports_the_demos_rows():
    assert not [path for path in MODULES if re.search(r"^\s*(from|import) demo\b", path.read_text(), re.MULTILINE)]


def test_no_two_rooms_may_import_each_other():
    TopologicalSorter({room: rooms - {room} for room, rooms in MAY_IMPORT.items()}).prepare()


def modules_imported(path: Path) -> set[str]:
    """The other modules that a module imports, but for those for annotations alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return {*imported(tree)} & NAMES - {module_name(path)}


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter({module_name(path): modules_imported(path) for path in MODULES}).prepare()


def test_a_file_name_stands_in_one_room():
    rooms = defaultdict(set)
    for path in MODULES:
        rooms[path.stem].add(path.parent)
    commands = ROOT / "scripts/commands"
    double = {name: folders - {commands} for name, folders in rooms.items() if name not in OF_BACKENDS}
    assert {name for name, folders in double.items() if len(folders) > 1} == set()


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


@pytest.mark.parametrize("parts", [*ENVIRONMENTS.values(), ("controller", "apprise")], ids="-".join)
def test_an_environment_pins_a_package_once(parts):
    text = "".join((ROOT / f"envs/{part}.txt").read_text() for part in parts)
    names = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    assert [name for name, count in Counter(names).items() if count > 1] == []
