"""The command `stagecoach`: what people type, from wherever in a clone they are."""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from scripts.commands import init
from scripts.commands.arguments import command_parser
from tests import programs
from tests.conftest import ROOT

OPTIONS = {
    "init": "--recipe --site",
    "plan": "--config --recipe --site --run --seed --model",
    "status": "--config --recipe --site --run --seed --model",
    "doctor": "--config --recipe --site --run --seed --model --command",
    "compare": "--output",
    "lineage": "--no-verify --json",
    "push": "--repository --card --license --public",
    "discard": "",
}
# In place of Python for `make setup`: it installs nothing, and all else is done by the Python of these tests.
PYTHON = f"""#!/bin/sh
case "$2" in
venv) {sys.executable} -m venv --without-pip "$4" && rm "$4/bin/python" && cp "$0" "$4/bin/python" ;;
pip) ;;
*) exec {sys.executable} "$@" ;;
esac
"""


# What pip makes of the package's entry point.
COMMAND = (
    f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\nfrom stagecoach import main\nmain()\n"
)


class Clone:
    """A clone after `make setup`, whose scripts and config are this one's."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root, self.command = root, root / ".venv/bin/stagecoach"
        for name in ("Makefile", "pyproject.toml", "envs", "scripts", "config"):
            (root / name).symlink_to(ROOT / name)
        (root / "python").write_text(PYTHON)
        (root / "python").chmod(0o755)
        subprocess.run(["make", "setup", "PYTHON=./python"], cwd=root, check=True, capture_output=True)
        self.command.write_text(COMMAND)
        self.command.chmod(0o755)

    def run(self, *arguments: str | Path, folder: str | Path = ".") -> subprocess.CompletedProcess:
        """Call the command in a folder."""
        command = [self.command, *map(str, arguments)]
        return subprocess.run(command, cwd=self.root / folder, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return Clone(tmp_path_factory.mktemp("a person's") / "clone of it")


# --- the commands ---


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_says_what_it_does_and_what_it_takes(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        command_parser().parse_args([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: stagecoach {command} ")
    assert all(option in text for option in OPTIONS[command].split())
    assert callable(import_module(f"scripts.commands.{command}").run)


def test_the_commands_are_listed_and_a_wrong_one_is_refused_with_their_names(clone):
    listed = clone.run("--help").stdout
    assert all(f"\n    {command} " in listed for command in OPTIONS)
    wrong = clone.run("plans")
    assert wrong.returncode == 2 and "invalid choice: 'plans' (choose from 'init', 'plan'" in wrong.stderr


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as end:
        command_parser().parse_args(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"stagecoach {version('stagecoach-workflow')}\n")


def test_help_waits_for_no_library():
    program = "import sys, scripts.commands.__main__; assert not {'pydantic', 'yaml', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--config", "no.yaml"),
        ("doctor", "--command", "rlvr"),
        ("compare", "results/a", "--output", "page.html"),
        ("lineage", "results/none"),
        ("push", "results/none/hf", "--repository", "org/model", "--card", "card.md", "--license", "mit"),
        ("discard", "results"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_status_1(arguments):
    done = programs.run("scripts.commands.__main__", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_would_stop_a_recipe_is_status_1_of_the_doctor(clone, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"recipe": "config/recipes/super3.yaml", "site": "config/sites/h100.yaml"}))
    found = clone.run("doctor", "--config", config)
    assert found.returncode == 1 and "6 stages: " in found.stdout and not found.stderr
    assert clone.run("doctor").returncode == 0


# --- where it is called ---


@pytest.mark.slow
def test_in_a_folder_of_the_clone_paths_are_meant_from_there(clone):
    (clone.root / "results/tiny").mkdir(parents=True, exist_ok=True)
    above = clone.run("plan", "--recipe", "../../config/recipes/tiny-omni.yaml", folder="results/tiny")
    assert above.returncode == 0 and "vision" in above.stdout
    absolute = clone.root / "config/recipes/tiny-omni.yaml"
    assert above.stdout == clone.run("plan", "--recipe", absolute).stdout
    assert clone.run("lineage", "sft", folder="results/tiny").stderr.startswith("error: results/tiny/sft: ")


def test_it_runs_the_clone_that_the_working_directory_lies_in(clone, tmp_path):
    commands = tmp_path / "scripts/commands"
    commands.mkdir(parents=True)
    (tmp_path / "scripts/__init__.py").touch()
    (commands / "__init__.py").touch()
    (tmp_path / "scripts/errors.py").write_text("def run_program(main): main()")
    (commands / "__main__.py").write_text("import sys\ndef main(): print(__file__, sys.argv[1:])")
    assert clone.run("plan", folder=commands).stdout == f"{commands / '__main__.py'} ['plan']\n"


def test_outside_of_a_project_it_says_so_in_one_line(clone, tmp_path):
    done = clone.run("status", folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    is_missing = f"error: {tmp_path}/config/config.yaml: no such file; "
    assert done.stderr == f"{is_missing}cd to a project, or make one: stagecoach init my-project\n"


@pytest.mark.parametrize("is_there", [False, True], ids=["a new folder", "an empty folder"])
def test_init_that_was_killed_anywhere_is_completed_by_the_next(is_there, tmp_path):
    whole = files_below(project_made(tmp_path / "whole"))
    killed = 0
    for number in range(4, 200, 21):
        target = tmp_path / f"struck{number}"
        if is_there:
            target.mkdir()
        killed += made_until(target, number)
        if not is_there:
            assert not target.exists() or files_below(target) == whole, "all of a project or nothing"
            shutil.rmtree(target, ignore_errors=True)
        if not target.exists() or files_below(target) != whole:
            project_made(target)
        assert files_below(target) == whole
        assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert killed > 1


def project_made(target: Path) -> Path:
    """Make a project; its folder."""
    init.run(Namespace(directory=target, recipe="tiny", site=None))
    return target


def files_below(folder: Path) -> set[str]:
    """The files of a project, but for those that a user puts there."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def made_until(target: Path, number: int) -> bool:
    """Begin a project in a process that dies at a change of a file; whether there were so many changes."""
    child = os.fork()
    if child == 0:
        changes = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove"}
        count = 0

        def die(event: str, arguments: tuple) -> None:
            nonlocal count
            of_project = event in changes and str(target.parent) in str(arguments[0])
            count += of_project
            if of_project and count == number:
                os._exit(9)

        sys.addaudithook(die)
        project_made(target)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9
