"""The package as `pip install` brings it: built from this tree, installed into a folder, used from a project."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts.recipe.yaml_file import pinned_versions
from scripts.stage.provenance import code_revision
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(*arguments, folder=ROOT, check=True, **variables):
    """Run a module with this Python; its output, both streams together, is in `stdout`."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    python("hatchling", "build", "--target", "wheel", "--directory", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder that the wheel is installed into, without what it depends on: that is in this Python."""
    folder = tmp_path_factory.mktemp("installed")
    python(*("uv", "pip", "install", "--quiet", "--offline", "--no-deps"), "--target", folder, wheel)
    return folder


def test_the_wheel_holds_what_git_holds_of_its_parts_and_nothing_else(wheel):
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "--"]
    parts = ["src/stagecoach", *PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]]
    listed = subprocess.run([*git, *parts], cwd=ROOT, text=True, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this tree is no checkout")
    tree = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert {"Snakefile", "rules/start.smk", "config/recipes/super3.yaml", "profiles/slurm/config.yaml"} < tree
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {f"stagecoach/{name.removeprefix('src/stagecoach/')}" for name in tree}


def test_the_build_requirements_are_those_of_the_tests():
    names = [requirement.partition("==")[0] for requirement in PYPROJECT["build-system"]["requires"]]
    pins = pinned_versions("dev", names)
    assert [f"{name}=={pins[name]}" for name in names] == PYPROJECT["build-system"]["requires"]


def test_vllm_on_gpus_is_pinned_as_vllm_on_cpus():
    lines = (ROOT / "envs/vllm-gpu.txt").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if not line.startswith("#")]
    assert {"torch", "vllm", "trl", "transformers", "peft"} < {*names}
    assert pinned_versions("vllm-gpu", names) == pinned_versions("vllm", names)


def test_a_project_is_made_planned_and_refused_without_trl_by_the_installed_package(wheel, installed, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without/sitecustomize.py").write_text("import sys\nsys.modules['trl'] = None  # as if not installed\n")
    command = [installed / "bin/stagecoach", "init", "project", "--recipe", "tiny"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(installed)}, check=True)
    project = tmp_path / "project"
    assert f"stagecoach-workflow[trl] @ {wheel.as_uri()}" in (project / "requirements.txt").read_text().splitlines()
    with (project / "Snakefile").open("a") as snakefile:
        snakefile.write("print(stagecoach.ROOT)\n")
    planned = python("snakemake", "--dry-run", folder=project, PYTHONPATH=str(installed)).stdout
    assert "rule train:" in planned and str(installed / "stagecoach") in planned
    hidden = f"{tmp_path / 'without'}{os.pathsep}{installed}"
    refused = python("snakemake", "results/sft/ckpt", folder=project, check=False, PYTHONPATH=hidden)
    expected = (
        "error: stage sft (backend trl) needs trl: python -m pip install 'stagecoach-workflow[trl]' (in a clone: "
    )
    assert refused.returncode == 1 and expected in refused.stdout and "Traceback" not in refused.stdout
    assert not (project / "results/data").exists()


def test_records_name_the_installed_version_and_whether_its_files_were_changed(wheel, installed):
    package = installed / "stagecoach"
    as_built = code_revision(package)
    assert as_built["version"] == wheel.name.split("-")[1] and as_built["dirty"] is False
    assert as_built["scripts"] == code_revision(ROOT)["scripts"]
    errors = package / "scripts/errors.py"
    content = errors.read_bytes()
    errors.write_bytes(content + b"# changed\n")
    assert code_revision(package)["dirty"] is True
    errors.write_bytes(content)
