"""Make the remote store; list, verify, push, fetch and prune its trainings."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from scripts.commands.project import Project, project_of
from scripts.commands.status import aligned
from scripts.errors import UserError
from scripts.files import amount
from scripts.records import CheckpointRecord, read_record
from scripts.remote.pruning import prune
from scripts.remote.remote_store import RemoteStore
from scripts.stage.again import trained_in
from scripts.stage.owner import hold
from scripts.stage.paths import STORE, StagePaths
from scripts.stage.push import push_published
from scripts.stage.remote import is_here, pull, remove_fetched
from scripts.stage.training_folder import TrainingFolder


def listed(project: Project, store: RemoteStore) -> Iterator[str]:
    """Yield a line a training in the store, and a line a manifest with a problem."""
    rows, wrong = [["training", "step", "stage", "size", ""]], []
    for entry in store.entries():
        if entry.problem:
            wrong.append(str(entry.problem))
        if entry.manifest is None:
            continue
        checkpoint = _training_of(project, entry.identity).checkpoint(entry.step)
        where = "here, too" if checkpoint.path.is_dir() else ""
        if checkpoint.is_elsewhere:
            where = "its checkpoint only there"
        size = amount(sum(file["bytes"] for file in entry.manifest["files"].values()))
        words = ", ".join(filter(None, ["not taken" if entry.problem else "", where]))
        rows.append([entry.identity, str(entry.step), entry.manifest["stage"], size, words])
    yield from (*aligned(rows, left={0, 2, 4}), *wrong)


def _training_of(project: Project, identity: str) -> TrainingFolder:
    return TrainingFolder(project.root / STORE / identity)


def verified(store: RemoteStore, content: bool) -> Iterator[str]:
    """Yield all problems in the store: manifests, and objects missing, cut or, with `content`, changed.

    A changed object is marked, to be sent again by the next push.
    """
    objects, hashed, marked = store.objects(), cache(store.hashed), cache(store.mark_damaged)
    for entry in store.entries():
        if entry.problem:
            yield str(entry.problem)
        if entry.manifest is None:
            continue
        training = f"{entry.identity} step {entry.step} ({entry.manifest['stage']})"
        for name, file in entry.manifest["files"].items():
            digest = file["sha256"]
            if objects.get(digest) != file["bytes"]:
                yield f"{training}: {name}: {objects.get(digest, 'no')} bytes instead of {file['bytes']}; push it again"
            elif content and hashed(digest) != digest:
                again = "push it again" if marked(digest) else "push it again with --content"
                yield f"{training}: {name}: has other content; {again}"


@dataclass(frozen=True)
class Prune:
    """The options of a prune: identities of trainings, the word for last copies, and a dry run."""

    names: tuple[str, ...] = ()
    last_copies: bool = False
    is_dry: bool = False


def pruned(project: Project, store: RemoteStore, asked: Prune) -> Iterator[str]:
    """Remove named trainings, and objects without a training; yield the bytes freed.

    UserError for an unknown name, and for a checkpoint not sound here, without the word for last copies.
    """
    if unknown := [name for name in asked.names if name not in store.steps()]:
        raise UserError(f"{store.url}: has no training {', '.join(unknown)}; see stagecoach store list")
    doomed: list[tuple[str, int]] = []
    last: list[str] = []
    for entry in store.entries():
        if entry.identity not in asked.names:
            if entry.problem:
                yield str(entry.problem)
            continue
        doomed.append((entry.identity, entry.step))
        if entry.manifest and not is_here(_training_of(project, entry.identity), entry.manifest):
            last.append(f"{entry.identity} step {entry.step} ({entry.manifest['stage']})")
    copies = f"of {', '.join(last)} no sound copy is in {project.root / STORE}, so the store may have the last one"
    if last and not asked.last_copies:
        raise UserError(f"{store.url}: {copies}; fetch first, or remove for good: --last-copy")
    if last:
        yield copies
    found = prune(store, doomed, is_dry=asked.is_dry)
    here = [] if asked.is_dry else (project.root / STORE).glob("[!.]*")
    left = sum(remove_fetched(TrainingFolder(path)) for path in here)
    freed = "to be freed" if asked.is_dry else "freed"
    yield f"trainings: {found.trainings}, {freed}: {amount(found.freed)}"
    if found.too_young:
        yield f"in no training, but younger than a day, so kept: {amount(found.too_young)}"
    if left:
        yield f"left here by killed fetches, freed: {amount(left)}"


def fetch(project: Project, store: RemoteStore, stage: str) -> str:
    """Fetch the missing files of a stage's published checkpoint; files already here are hashed."""
    paths = StagePaths(project.results / stage)
    record = read_record(paths.record, CheckpointRecord)
    training, step = _training_of(project, trained_in(record)), record["step"]
    with hold(training.owner_file):
        pull(store, training, step, is_whole=True)
    if damage := training.checkpoint(step).damage():
        raise UserError(f"{training.path}: step {step}: {damage}, even after the fetch; fetch again")
    return f"{stage}: step {step} is whole in {training.path}"


def begun(store: RemoteStore) -> str:
    """Make the store that the config names; return what was done."""
    if not store.begin():
        return f"{store.url}: is a store already; nothing was changed"
    return f"{store.url}: made; stages are pushed to it and taken from it from now on"


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked; return 1 where a verification finds something."""
    project, names = project_of(arguments), arguments.names
    if project.store is None:
        raise UserError(f"{arguments.config}: names no store; add one: store: {{remote: s3://bucket/prefix}}")
    store = RemoteStore.of(project.store)
    match arguments.action:
        case "init":
            said = [begun(store)]
        case "list":
            said = listed(project, store)
        case "verify":
            said = [*verified(store, arguments.content)]
        case "prune":
            from_options = Prune(tuple(names), arguments.last_copy, arguments.dry_run)
            said = pruned(project, store, from_options)
        case "push":
            paths = [StagePaths(project.results / name) for name in names or project.recipe.stages]
            found = [each.ckpt for each in paths if names or each.record.exists()]
            pushed = (push_published(store, ckpt, weights=True, is_hashed=arguments.content) for ckpt in found)
            said = (f"{each['identity']} step {each['step']}: {amount(each['sent'])} sent" for each in pushed)
        case "fetch":
            said = (fetch(project, store, name) for name in names)
    for line in said:
        print(line)
    return int(arguments.action == "verify" and bool(said))
