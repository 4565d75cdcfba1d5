"""Prepare a call of Snakemake: versions, the jobs' environment, corrections of Snakemake."""

import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from scripts.controller.controller_lock import keep_locks_of_others, remove_dead_lock
from scripts.controller.stale import correct_ancient, let_inputs_pass
from scripts.errors import UserError
from scripts.files import check_readable
from scripts.installed import version_of
from scripts.processes import share_cores
from scripts.recipe.config import Config
from scripts.recipe.recipe import TAKEN_STAGES
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import installation
from scripts.slurm.jobs import export_orphans
from scripts.stage.paths import STORE

SNAKEMAKE, SLURM_PLUGIN = "snakemake", "snakemake-executor-plugin-slurm"
SHARED = {"benchmarks", "samples"}
"""Folders next to the runs', of responses and answers that runs share (rules/generate.smk, rules/sweep.smk)."""
TESTED = {SNAKEMAKE: ">=9.20.0,<10", SLURM_PLUGIN: ">=2.6.1,<3"}
"""Versions in which tests pass; envs/controller.txt pins the newest."""


def prepare(workflow: Any, results: Path, site: Site) -> int:
    """Prepare this process; return the number of this call of Snakemake, which its jobs inherit.

    Jobs run ``python -m scripts...`` with this Python and find the package whatever their working directory.
    """
    for other in ("scripts/__init__.py", "scripts.py"):  # which python -m would take for ours
        if Path(other).is_file() and Path.cwd() != installation():
            raise UserError(f"{Path.cwd() / other}: a package of Stagecoach has the same name; rename the folder")
    check_versions(SNAKEMAKE, *([SLURM_PLUGIN] if site.slurm else []))
    os.environ.update(
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        PYTHONPATH=str(installation()),
        STAGECOACH_SNAKEFILE=str(workflow.main_snakefile),
    )
    os.environ.update(site.environment)
    share_cores()
    call = int(os.environ.setdefault("STAGECOACH_CALL", str(int(time.time()))))
    correct_ancient()
    let_inputs_pass()
    keep_locks_of_others()
    if workflow.is_main_process:
        if (records := Path(".snakemake/metadata")).is_dir():  # Snakemake leaves them to its user and group
            check_readable(records)
        for line in remove_dead_lock(Path(".snakemake")):
            print(line, file=sys.stderr)
        if site.slurm:
            from scripts.slurm.executor import use_executor  # noqa: PLC0415  (the plugin is for Slurm alone)

            use_executor(results)
            export_orphans(results)
    return call


def refuse_taken_folder(config: Config, stages: Collection[str] = ()) -> None:
    """UserError where results without a run occupy the run's folder, or a stage's folder is one that runs share."""
    if config.run is None:
        for stage in SHARED & {*stages}:
            folder = Path(config.results, stage)
            if not (folder / "config.yaml").is_file():  # results of an earlier version stay
                raise UserError(f"stage {stage}: {folder} is a folder that all runs share; choose another name")
        return
    folder = Path(config.results, config.run)
    has_runs = any(folder.glob("*/config.yaml"))
    is_stage = (folder / "config.yaml").is_file()
    is_of_results = config.run in TAKEN_STAGES and folder.is_dir() and not has_runs
    if is_stage or is_of_results or config.run == STORE:
        raise UserError(f"run={config.run}: {folder} has results of a run without a name; choose another name")
    if config.run in SHARED and not has_runs:
        raise UserError(f"run={config.run}: {folder} is a folder that all runs share; choose another name")


def check_versions(*packages: str) -> None:
    """UserError unless the installed versions of these packages lie in the tested range."""
    for package in packages:
        wanted = f"{package}{TESTED[package]}"
        installed = version_of(package)
        if installed is None or installed not in SpecifierSet(TESTED[package]):
            has = f"{package} is {installed or 'not installed'}"
            raise UserError(f"{has}, but Stagecoach works with {wanted}: python -m pip install '{wanted}'")
