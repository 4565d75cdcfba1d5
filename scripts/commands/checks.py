"""Checks of a project and of stages before any job, each asked at its moment (scripts/finding.py).

Plan, dry run, start and doctor ask them; backends add checks of their stages, and a preflight has more.
"""

import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from scripts.backends.by_name import backend_of
from scripts.commands.project import Project
from scripts.errors import LongError, UserError
from scripts.finding import Check, Finding, Moment, ask, refusal_of, together
from scripts.model.model_source import check_source
from scripts.model.trainable import check_model_at_hand
from scripts.recipe.model import PretrainedModel
from scripts.recipe.resolve import own_environments
from scripts.remote.trust import lack_of_key
from scripts.rewards.own import check_text
from scripts.slurm.resources import check_site
from scripts.stage.candidate import Candidate
from scripts.stage.data_to_come import gone_files, is_fetched
from scripts.stage.held_out import large_holdouts
from scripts.stage.seeds import idle_seeds

PINNED = re.compile(r"""stagecoach\.snakefile\(["']([^"']+)["']\)""")


def findings(project: Project, *moments: Moment, stages: Collection[str] | None = None) -> list[Finding]:
    """Return the findings of some moments on a project and on `stages` (None: all).

    A finding that several stages share is one.
    """
    found = [*ask(OF_PROJECT, project, moments)]
    for stage in project.stages():
        if stages is None or stage.name in stages:
            checks = [*OF_STAGE, *backend_of(stage.settings.made_by).checks()]
            found += ask(checks, Candidate.on(project.site, stage), moments)
    return together(found)


def refuse(found: Iterable[Finding]) -> None:
    """Raise UserError with a line for each finding that stops, if any."""
    stopping = [finding.line for finding in found if finding.stops]
    if stopping:
        raise LongError("\n  ".join(stopping))


def check_version(_: Project) -> Iterator[Finding]:
    """Find a project pinned to a version that is not installed."""
    snakefile = Path("Snakefile")
    pinned = PINNED.search(snakefile.read_text(encoding="utf-8")) if snakefile.is_file() else None
    if pinned is None:
        return
    import stagecoach  # noqa: PLC0415 - installed in every project, but in no plain clone

    try:
        stagecoach.snakefile(pinned[1])
    except SystemExit as refusal:
        yield Finding(str(refusal).removeprefix("error: "))


def check_models(project: Project) -> Iterator[Finding]:
    """Find pretrained models that are missing, or unfit by their files at hand."""
    for name, model in project.recipe.graph.pretrained.items():
        yield from refusal_of(_check_model, model, project.results / name)


def _check_model(model: PretrainedModel, directory: Path) -> None:
    check_source(model, directory)
    check_model_at_hand(model, directory)


def check_environments(project: Project) -> Iterator[Finding]:
    """Find unusable files of the user's environments."""
    for name, path in own_environments(project.recipe).items():
        yield from refusal_of(check_text, name, path)


def check_rows_there(project: Project) -> Iterator[Finding]:
    """Find missing folders and files of rows."""
    recipe, results = project.recipe, project.results
    folders = [folder for blend in recipe.published.values() for folder in blend.own_folders(recipe.source)]
    with suppress(UserError):  # of a damaged record, which the stages' states tell
        if folders and not is_fetched(recipe, results):
            from scripts.data.download import lacking_files  # noqa: PLC0415 - the hub's client takes half a second

            for line in lacking_files(recipe):
                yield Finding(line)


def check_key(project: Project) -> Iterator[Finding]:
    """Find a remote store without a key, if anybody else may write to the store."""
    store = project.store
    lack = lack_of_key(store.remote, store.key) if store is not None and (store.pull or store.push) else None
    if lack is not None:
        yield Finding(lack)


def check_data(project: Project) -> Iterator[Finding]:
    """Find seeds without effect, large holdouts that nobody stated, and rows gone since the fetch."""
    recipe, results = project.recipe, project.results
    for says in (*idle_seeds(recipe, results), *large_holdouts(recipe, results), *gone_files(recipe, results)):
        yield Finding(says, stops=False)


def check_cluster(project: Project) -> Iterator[Finding]:
    """Find requests that the cluster cannot meet; without Slurm on this machine a warning."""
    site, stages = project.site, project.stages()
    if site.slurm is None:
        return
    asked = {stage.name: site.resources_of(stage.name, stage.settings) for stage in stages}
    beside = {stage.name: stage.settings.nodes_beside for stage in stages}
    try:
        check_site(project.site_file or site.name, site, asked, beside)
    except UserError as error:
        yield Finding(str(error), "all stages", stops=shutil.which("sinfo") is not None, trap=35)


def check_numbers(candidate: Candidate) -> Iterator[Finding]:
    """Find numbers in a stage's settings that are likely mistakes with any model."""
    for says in candidate.stage.settings.unlikely_values:
        yield candidate.warns(says)


OF_PROJECT: list[Check[Project]] = [
    Check(Moment.READ, check_version),
    Check(Moment.READ, check_models),
    Check(Moment.READ, check_environments),
    Check(Moment.PLAN, check_rows_there),
    Check(Moment.PLAN, check_key),
    Check(Moment.PLAN, check_data),
    Check(Moment.START, check_cluster),
]
OF_STAGE: list[Check[Candidate]] = [Check(Moment.PLAN, check_numbers)]
"""Of every stage; the backend's checks follow."""
