"""Make the remote store; list, verify, push, fetch and prune its trainings."""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.commands.project import Project, project_of
from scripts.commands.status import aligned
from scripts.errors import UserError
from scripts.files import amount
from scripts.records import CheckpointRecord, read_record
from scripts.remote.remote_store import Manifest, RemoteStore
from scripts.stage.owner import hold
from scripts.stage.paths import STORE, StagePaths, owner_of
from scripts.stage.push import push_published
from scripts.stage.remote import pull
from scripts.stage.rundir import ELSEWHERE


def listed(project: Project, store: RemoteStore) -> Iterator[str]:
    """Yield a line a training in the store, and a line a manifest that is wrong."""
    rows, wrong = [["training", "step", "stage", "size", ""]], []
    for manifest in store.manifests():
        if isinstance(manifest, UserError):
            wrong.append(str(manifest))
            continue
        folder = _checkpoint_of(project, manifest)
        where = "its checkpoint only there" if (folder / ELSEWHERE).exists() else "here, too" if folder.is_dir() else ""
        size = amount(sum(file["bytes"] for file in manifest["files"].values()))
        rows.append([manifest["identity"], str(manifest["step"]), manifest["stage"], size, where])
    yield from (*aligned(rows, left={0, 2, 4}), *wrong)


def _checkpoint_of(project: Project, manifest: Manifest) -> Path:
    return project.root / STORE / manifest["identity"] / f"checkpoints/step_{manifest['step']}"


def verified(store: RemoteStore, content: bool) -> Iterator[str]:
    """Yield what is wrong in the store: manifests, and objects that are missing, cut or, with `content`, changed."""
    objects, hashed = store.objects(), cache(store.hashed)
    for manifest in store.manifests():
        if isinstance(manifest, UserError):
            yield str(manifest)
            continue
        training = f"{manifest['identity']} step {manifest['step']} ({manifest['stage']})"
        for name, file in manifest["files"].items():
            digest = file["sha256"]
            if objects.get(digest) != file["bytes"]:
                yield f"{training}: {name}: {objects.get(digest, 'no')} bytes instead of {file['bytes']}; push it again"
            elif content and hashed(digest) != digest:
                yield f"{training}: {name}: has other content; stagecoach store prune, and push it again"


def pruned(project: Project, store: RemoteStore, names: list[str], is_dry: bool) -> str:
    """Remove named trainings, and objects that no other training has; return what that frees."""
    kept: set[str] = set()
    doomed: list[Manifest] = []
    for manifest in store.manifests():
        if isinstance(manifest, UserError):
            raise UserError(f"nothing is removed while a manifest cannot be read: {manifest}")
        if manifest["identity"] not in names:
            kept |= {file["sha256"] for file in manifest["files"].values()}
        elif (_checkpoint_of(project, manifest) / ELSEWHERE).exists():
            raise UserError(f"{manifest['identity']}: the store has the last copy of its checkpoint; fetch it first")
        else:
            doomed.append(manifest)
    left = {digest: size for digest, size in store.objects().items() if digest not in kept}
    if not is_dry:
        store.remove([(manifest["identity"], manifest["step"]) for manifest in doomed], left)
    return f"trainings: {len(doomed)}, {'to be freed' if is_dry else 'freed'}: {amount(sum(left.values()))}"


def fetch(project: Project, store: RemoteStore, stage: str) -> str:
    """Fetch what the store alone has of a stage's published checkpoint."""
    paths = StagePaths(project.results / stage)
    record = read_record(paths.record, CheckpointRecord)
    run = project.root / STORE / record["identity"]
    with hold(owner_of(run)):
        pull(store, run, record["step"], is_whole=True)
    return f"{stage}: step {record['step']} is whole in {run}"


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
            said = [pruned(project, store, names, arguments.dry_run)]
        case "push":
            paths = [StagePaths(project.results / name) for name in names or project.recipe.stages]
            pushed = (push_published(store, each.ckpt, weights=True) for each in paths if names or each.record.exists())
            said = (f"{each['identity']} step {each['step']}: {amount(each['sent'])} sent" for each in pushed)
        case "fetch":
            said = (fetch(project, store, name) for name in names)
    for line in said:
        print(line)
    return int(arguments.action == "verify" and bool(said))
