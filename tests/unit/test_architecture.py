"""The rooms' arrows run one way, and the controller needs neither torch nor Ray."""

import ast
import fnmatch
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from docs.schema import ENVIRONMENTS
from tests.conftest import ROOT

BASE = {
    "contents",
    "credentials",
    "errors",
    "files",
    "finding",
    "snakemake_notes",
    "installed",
    "names",
    "processes",
    "program",
    "python_files",
    "records",
}
RECIPE = BASE | {"recipe"}
ROWS = RECIPE | {"rows"}
STAGE = ROWS | {"rewards", "data", "slurm", "model", "remote", "stage"}
EVALUATE = STAGE | {"evaluate"}
BACKENDS = EVALUATE | {"backends"}
MAY_IMPORT = {
    "contents": {"errors", "files"},
    "python_files": {"files"},
    "credentials": set(),
    "errors": {"credentials"},
    "installed": set(),
    "files": {"errors", "processes"},
    "finding": {"errors"},
    "snakemake_notes": {"errors"},
    "names": set(),
    "processes": set(),
    "program": {"errors"},
    "records": {"errors", "files", "names"},
    "recipe": BASE,
    "rows": RECIPE,
    "rewards": ROWS,
    "data": ROWS | {"rewards"},
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
    "scripts.backends.merge.merge_weights",
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
    "scripts.backends.trl.collectives",
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
BACKEND_MODULES = {f"scripts.backends.{name}.backend" for name in ("merge", "nemo_rl", "trl")}
UNKNOWN = "*"
"""What stands for a part of a module's name that only a run tells."""
LOADERS = {
    "import_module": lambda name, *_: name,
    "__import__": lambda name, *_: name,
    "backend_module": lambda _, part: f"scripts.backends.{UNKNOWN}.{part}",
}
LOOKED_FOR = {"scripts.controller.retries": {"scripts.train.run", "scripts.train.merge_stage"}}
"""Programs' names that a module compares with the command lines of processes, and does not import."""
PLUGINS = {
    "scripts.installed": "scripts.rewards.environments.*",
    "scripts.recipe.recipe": "scripts.backends.*.settings",
}
"""What a module finds by name in a room that it may not import: packages that are added without a change of it."""


@cache
def imported(path: Path) -> set[str]:
    """The modules of scripts/ that a module imports, also inside functions, but for those for annotations alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & NAMES - {module_name(path)}


@cache
def imported_by_name(path: Path) -> set[str]:
    """The modules of scripts/ that a module imports by their names: patterns such as ``scripts.backends.*.backend``.

    The names are arguments of `import_module` and `backend_module`, or texts of tables (``module`` and
    ``module:function``). A text behind ``-m`` starts a process and imports nothing.
    """
    tree = ast.parse(path.read_text())
    constants = constants_of(tree)
    started = {second for first, second in neighbours(tree) if text_of(first, constants) == "-m"}
    patterns = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node) in LOADERS:
            patterns.add(LOADERS[called_name(node)](*(text_of(argument, constants) for argument in node.args)))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node not in started:
            named = text_of(node, constants).partition(":")[0]
            patterns |= {named} & NAMES
    patterns -= LOOKED_FOR.get(module_name(path), set())
    found = {name for pattern in patterns - {UNKNOWN} for name in fnmatch.filter(NAMES, pattern)}
    return found - {module_name(path)}


def constants_of(tree: ast.Module) -> dict[str, str]:
    """The texts that a module's names stand for."""
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        is_pair = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts, strict=False) if is_pair else [(target, value)]
        found |= {ast.unparse(name): text_of(text, found) for name, text in pairs}
    return found


def text_of(node: ast.AST, constants: dict[str, str]) -> str:
    """The text that an expression stands for, with ``*`` in place of what only a run tells."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, constants)
    return constants.get(ast.unparse(node), UNKNOWN)


def neighbours(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The items of lists and tuples that follow one another."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            yield from pairwise(node.elts)


def called_name(call: ast.Call) -> str:
    """The name of what is called, without the module before it."""
    return ast.unparse(call.func).rpartition(".")[2]


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_run_one_way(path):
    own = module_name(path).split(".")[1]
    assert rooms_of(imported(path)) - {own} <= MAY_IMPORT[own]
    plugins = imported_by_name(path) - {name for name in NAMES if name.split(".")[1] in {own, *MAY_IMPORT[own]}}
    assert plugins == {name for name in NAMES if fnmatch.fnmatch(name, PLUGINS.get(module_name(path), ""))}


def test_no_room_imports_the_demos_rows():
    assert not [path for path in MODULES if re.search(r"^\s*(from|import) demo\b", path.read_text(), re.MULTILINE)]


def test_no_two_rooms_may_import_each_other():
    TopologicalSorter({room: rooms - {room} for room, rooms in MAY_IMPORT.items()}).prepare()


def test_no_files_import_each_other_in_a_circle():
    """Imports by name count, which a linter does not see."""
    TopologicalSorter({module_name(path): imported(path) | imported_by_name(path) for path in MODULES}).prepare()


def test_the_recipes_files_import_each_other_in_no_circle_for_annotations_either():
    """Imports for annotations alone would hide a circle from the test above."""
    files = [path for path in MODULES if path.parent.name == "recipe"]
    assert files and not [path.name for path in files if "TYPE_CHECKING" in path.read_text()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('import_module("scripts.stage.store")', {"scripts.stage.store"}),
        ('importlib.import_module(f"scripts.backends.{name}.backend")', BACKEND_MODULES),
        ('BACKENDS = "scripts.backends"\nimport_module(f"{BACKENDS}.{name}.backend")', BACKEND_MODULES),
        ('def f():\n    return backend_module(name, "backend")', BACKEND_MODULES),
        ('TABLE = {"a": "scripts.stage.store:open"}', {"scripts.stage.store"}),
        ('PROGRAM = "scripts.stage.store"\nresolve_name(f"{PROGRAM}:open")', {"scripts.stage.store"}),
        ('command = [sys.executable, "-m", "scripts.stage.store"]', set()),
        ("import_module(found)", set()),
    ],
)
def test_an_import_by_name_is_seen(text, found, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.test_architecture.ROOT", tmp_path)
    path = tmp_path / "scripts/new.py"
    path.parent.mkdir()
    path.write_text(text)
    assert imported_by_name(path) == found


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
