"""The project of a command: recipe, site and folder of results."""

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.files import write_json
from scripts.python_files import see_in
from scripts.recipe.config import Config, Store
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.records import read_if_there
from scripts.remote.remote_store import RemoteStore
from scripts.slurm.jobs import LatestJob, latest_jobs
from scripts.stage.earlier_tree import refuse_run_directories
from scripts.stage.outlook import Outlook, outlook_of
from scripts.stage.paths import StagePaths
from scripts.stage.stage import Stage
from scripts.stage.state import StageState, States

OPTIONS = ("config", "recipe", "site", "run", "seed", "model", "start")
NOTED = "settings/config.json"


@dataclass(frozen=True)
class Project:
    """Hold recipe, site and results; `root` holds the results of all runs, `again` what a call trains again.

    `site_file` is the site's path, for messages.
    """

    recipe: Recipe
    site: Site
    results: Path
    over_budget: bool = False
    root: Path | None = None
    store: Store | None = None
    again: Mapping[str, str] = field(default_factory=dict)
    site_file: str = ""

    def stages(self) -> list[Stage]:
        """Return every stage, parents first."""
        return [Stage(self.recipe, self.results, name, root=self.root) for name in self.recipe.graph.stage_names]

    def states(self) -> dict[str, StageState]:
        """Return the state of every stage, parents first."""
        return self._states().all()

    def outlook(self) -> Outlook:
        """Return what a call would train, sample and score."""
        return outlook_of(self._states(), self.site)

    @property
    def jobs(self) -> dict[str, LatestJob]:
        """The latest job of each stage, on a cluster."""
        return latest_jobs(self.results) if self.site.slurm else {}

    def _states(self) -> States:
        remote = RemoteStore.to_pull_from(self.store)
        return States(self.recipe, self.results, self.root, self.jobs, remote, again=self.again)


def note_config(config: Config) -> None:
    """Note the call of a run below its folder, by which commands judge the run while config.yaml names another."""
    called = config.model_dump(mode="json", include={*OPTIONS} - {"run"}, exclude_none=True)
    if read_if_there(path := Path(config.folder, NOTED), dict[str, Any]) != called:
        write_json(path, called)


def snakemake_command(target: Path, arguments: argparse.Namespace) -> str:
    """Return the command that makes a file of the project that a command's arguments name."""
    given = [f"{name}={value}" for name in OPTIONS[1:] if (value := getattr(arguments, name)) is not None]
    return shlex.join(["snakemake", str(target), *(["--config", *given] if given else [])])


def project_of(arguments: argparse.Namespace, may_be_earlier: bool = False) -> Project:
    """Return the project that a command's arguments name, else the last call of the run, or else the config.

    UserError where the run was trained by a version before 0.3.0, unless it `may_be_earlier`.
    """
    given = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    file = given.pop("config")
    config = load_config(file, given)
    if "run" in given and "recipe" not in given and config.run != load_config(file, {}).run:
        config = load_config(file, (read_if_there(Path(config.folder, NOTED), dict[str, Any]) or {}) | given)
    if "run" in given and not Path(config.folder).exists():
        print(f"{config.folder}: no such run yet; the recipe is {config.recipe}", file=sys.stderr)
    if config.alerts and config.alerts.urls:
        from scripts.controller.alerts import refuse_secrets  # noqa: PLC0415 (needs Snakemake's packages)

        refuse_secrets(config.alerts)
    see_in(Path(config.results))
    recipe = load_recipe(Path(config.recipe), config.seed, config.model, config.start)
    site = load_site(Path(config.site), recipe)
    if not may_be_earlier:
        refuse_run_directories(*(StagePaths(Path(config.folder, name)) for name in recipe.stages))
    return Project(
        recipe,
        site,
        Path(config.folder),
        config.over_budget,
        Path(config.results),
        config.store,
        site_file=config.site,
    )
