"""What the tests share: rows as files, and a copy of the repository in which Snakemake really runs."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from xdist.scheduler import LoadScopeScheduling

from scripts.errors import UserError
from scripts.files import read_json

# The trainings of two test processes share the cores: a thread that waits for another's is to leave its core meanwhile.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).parents[1]
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SET_IN_TESTS = (*OF_A_RANK, "STAGECOACH_SEEN")
"""Variables that programs set in the process: TRL a rank's, and commands the store's notes on files."""
SHORT = Path(__file__).with_name("short.yaml")
EVERY_DAY = re.compile(
    r"tests/(unit/|workflow/test_(catalog|chain|docs_commands|edits|mistakes|resume)\."
    r"|slurm/test_(cluster|submission|workflow)\.)"
)
"""The files of which `make test` runs all that is not marked; tests of other files are slow."""


class Scheduling(LoadScopeScheduling):
    """Tests that share a cluster, a finished chain or TRL's slow imports run in one of pytest-xdist's processes."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if "tests/slurm/" in file:
            return "containers" if "nemo_rl" in file else "cluster"
        if re.search(r"test_(algorithms|trl_\w+|hugging_face|own_environment)\.", file):
            return "trl"
        needs_chain = re.search(r"test_(backend|chain|colleagues|edits|merge|quantize|sweep)\.", file)
        return "chain" if needs_chain or "tests/browser/" in file else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """The scheduler of `make test`, which keeps to the order below."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests."""
    parser.addoption("--forget", action="store_true", help="forget what earlier tests made once, before each test")


@pytest.fixture(autouse=True)
def globals_are_forgotten(request):
    """With `--forget`, no test profits from what an earlier one has made."""
    if request.config.getoption("--forget"):
        from tests.lazy_globals import forget

        forget()
        sys.setswitchinterval(1e-6)  # threads that race for a global then lose more often


@pytest.fixture(autouse=True)
def the_test_is_no_rank_afterwards():
    """TRL sets a rank's variables for vLLM, and accelerate then takes every later process for one of several ranks."""
    before = {name: os.environ.get(name) for name in SET_IN_TESTS}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def own_environments_are_forgotten():
    """An environment that a test registers rewards no row of another test."""
    before = sys.modules.get("scripts.rewards.registry")
    known = dict(before.SPECS) if before else None
    yield
    registry = sys.modules.get("scripts.rewards.registry")
    if registry is not None:
        registry.SPECS.clear()
        registry.SPECS.update(registry.environments() if known is None else known)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not of every day; those that take minutes begin first, so that no process is left alone with one.

    Those that mostly wait for Slurm come before those that compute meanwhile.
    """
    for item in items:
        if not EVERY_DAY.match(item.nodeid):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: ("tests/unit/" in item.nodeid, "tests/slurm/" not in item.nodeid))


def refusal(action: Callable, *arguments: Any, **options: Any) -> str:
    """The words of the mistake that a call must end with."""
    with pytest.raises(UserError) as error:
        action(*arguments, **options)
    return str(error.value)


class Workflow:
    """A working tree of its own, with the short recipe configured."""

    def __init__(self, root: Path, is_there: bool = False) -> None:
        """Make the tree below an empty folder; with `is_there`, an earlier call has, for the short recipe."""
        self.root, self.results = root, root / "results/short"
        self.environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        if is_there:
            return
        for part in ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs", "containers", "demo"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, root / part)
        shutil.copy(SHORT, root / "config/recipes/short.yaml")
        self.configure()

    def configure(self, recipe: str = "short", site: str = "laptop", run: str = "", **more: str) -> None:
        """Write config.yaml; a run without a name has that of its recipe."""
        told = {"recipe": f"config/recipes/{recipe}.yaml", "site": f"config/sites/{site}.yaml", "run": run or recipe}
        (self.root / "config/config.yaml").write_text(yaml.safe_dump(told | more))
        self.results = self.root / "results" / (run or recipe)

    def copied_to(self, root: Path) -> "Workflow":
        """A copy of the tree, at another path."""
        shutil.copytree(self.root, root, dirs_exist_ok=True, symlinks=True)
        workflow = copy.copy(self)
        workflow.root, workflow.results = root, root / self.results.relative_to(self.root)
        return workflow

    def run(self, *command: str, check: bool = True, typed: str | None = None) -> subprocess.CompletedProcess:
        """Run a command in the tree, with `typed` as its input; its output, both streams together, is in `stdout`."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            text=True,
            input=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout
        return done

    def begin(self, *command: str | Path) -> subprocess.Popen:
        """Start a command in the background; its output is added to what `said` returns."""
        with (self.root / "begun.log").open("a") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            return subprocess.Popen(command, cwd=self.root, env=self.environment, **options)

    def said(self) -> str:
        """What the commands in the background have printed."""
        log = self.root / "begun.log"
        return log.read_text() if log.exists() else ""

    def snakemake(self, *arguments: str, check: bool = True) -> str:
        """Run Snakemake in the tree; what it printed."""
        return self.run("snakemake", *arguments, check=check).stdout

    def planned_jobs(self, *arguments: str) -> defaultdict[str, set[str]]:
        """The stages of the jobs that a dry run plans, by rule."""
        found = defaultdict(set)
        for rule, stage in re.findall(r"^rule (\w+):(?: stage=(\S+);)?", self.snakemake("--dry-run", *arguments), re.M):
            found[rule].update([stage] if stage else [])
        return found

    def planned(self, *arguments: str) -> set[str]:
        """The stages that a dry run would train or merge."""
        planned = self.planned_jobs(*arguments)
        return planned["train"] | planned["merge"]

    def edit(self, old: str, new: str, file: str = "config/recipes/short.yaml") -> None:
        """Replace a piece of the recipe, or of another file."""
        path = self.root / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def untrained(self, stage: str) -> Path:
        """A copy of the results, beside them, in which of one stage nothing but its config is there."""
        copied = self.results.with_name("hand")  # links into the store lead there from its place
        shutil.copytree(self.results, copied, symlinks=True)
        shutil.rmtree(copied / stage)
        (copied / stage).mkdir()
        shutil.copy(self.results / stage / "config.yaml", copied / stage)
        return copied

    def content(self, stage: str) -> str:
        """The hash of a stage's published weights."""
        return read_json(self.results / stage / "ckpt/record.json")["files"]["model.safetensors"]["sha256"]


@pytest.fixture
def fresh(tmp_path):
    """A tree in which nothing has run."""
    return Workflow(tmp_path)


def _run_chain(root: Path) -> Workflow:
    """Make a tree and run its chain to the report."""
    root.mkdir()
    workflow = Workflow(root)
    workflow.output = workflow.snakemake()
    return workflow


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A tree whose chain has run to its report; tests that change it work on a copy.

    Of the processes of pytest-xdist the first to need it runs the chain, and each of the others gets a copy.
    """
    own = tmp_path_factory.mktemp("finished") / "tree"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _run_chain(own)
    of_all = tmp_path_factory.getbasetemp().parent
    first, output = of_all / "finished", of_all / "finished.log"
    with FileLock(of_all / "finished.lock"):
        if not output.exists():
            shutil.rmtree(first, ignore_errors=True)  # of a process in which the chain failed
            output.write_text(_run_chain(first).output)
    workflow = Workflow(first, is_there=True).copied_to(own)
    workflow.output = output.read_text()
    return workflow


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished tree, at another path."""
    return finished.copied_to(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two published stages, for tests that only read them."""
    from tests.published import make_chain

    return make_chain(tmp_path_factory.mktemp("made") / "short", "sft", "rlvr1")


@pytest.fixture
def chain(made, tmp_path):
    """A copy of them that a test may change."""
    from tests.published import copy_chain

    return copy_chain(made, tmp_path / "short")


@pytest.fixture
def write_rows(tmp_path):
    """Write rows (objects, or bytes for a damaged line) as a JSONL file."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.write_bytes(
            b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
        )
        return path

    return write


@pytest.fixture
def edited(tmp_path):
    """Load a shipped recipe with pieces of its text replaced."""
    from scripts.recipe.load import load_recipe

    def load(name: str, *pairs: tuple[str, str], **options: Any) -> Any:
        path, text = tmp_path / f"{name}.yaml", (ROOT / f"config/recipes/{name}.yaml").read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text)
        return load_recipe(path, **options)

    return load


@pytest.fixture
def refused(edited, tmp_path):
    """The message for such a recipe, without its folder; `{line}` stands for the first edit's line."""
    from scripts.errors import UserError

    def load(name: str, *pairs: tuple[str, str]) -> str:
        with pytest.raises(UserError) as error:
            edited(name, *pairs)
        line = (ROOT / f"config/recipes/{name}.yaml").read_text().partition(pairs[0][0])[0].count("\n") + 1
        return str(error.value).replace(f"{tmp_path}/", "").replace(f"{name}.yaml:{line}:", f"{name}.yaml:{{line}}:")

    return load
