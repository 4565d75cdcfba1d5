"""A training's folder and its copy in a remote store: choose what to push, and take in what is there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from scripts.errors import UserError
from scripts.files import (
    copy_file,
    filled_by_program,
    fsync_directory,
    link_or_copy,
    sha256_file,
    sync_tree,
    temporary_directory,
    write_json,
)
from scripts.names import NameFault, check_listed, fault_of_file, of_training
from scripts.recipe.config import Store
from scripts.records import ExportRecord, Files, Record, RunIdentity, read_if_there, read_record
from scripts.remote.remote_store import Manifest, RemoteStore
from scripts.stage.publish import export_name
from scripts.stage.rundir import ELSEWHERE, FILES, Checkpoint, newest_checkpoint, newest_step
from scripts.stage.store import LOGS, facts_in, identity_of

SMALL = ("identity.json", "config.yaml", *LOGS)
FETCHED = ".fetched"
NOTE = re.compile(r"exports/[0-9a-f]{16}\.json")


def manifest_of(run: Path, stage: str, checkpoint: Checkpoint, weights: bool, is_passing: bool) -> Manifest:
    """Return the manifest of a training's folder at a checkpoint: logs, checkpoint, and the checkpoint's export.

    Without `weights`, the checkpoint's own files stay out where an export stands for them.
    """
    files = _described(run, [*(run / name for name in SMALL), *run.glob("scores/*.parquet")])
    listed, place = read_record(checkpoint.path / FILES, Files), f"checkpoints/{checkpoint.path.name}"
    files |= _described(run, [checkpoint.path / FILES])
    note = run / "exports" / f"{export_name(listed)}.json"
    exported = read_if_there(note, ExportRecord)
    if exported:
        files |= _described(run, [note])
        files |= {f"exports/{exported['content']}/{name}": file for name, file in exported["files"].items()}
    if weights or not exported:
        files |= {f"{place}/{name}": file for name, file in listed.items()}
    lacking = [name for name, file in files.items() if not file["sha256"]]
    files |= _described(run, [run / name for name in lacking])
    _check_sendable(run, checkpoint.step, files)
    identity = read_record(run / "identity.json", RunIdentity)["identity"]
    has = {"weights": weights or not exported, "is_passing": is_passing}
    return Manifest(identity=identity, step=checkpoint.step, stage=stage, files=files, **has)


def _described(run: Path, paths: Collection[Path]) -> Files:
    """Return size and hash of the files of a training's folder that are there."""
    names = [str(path.relative_to(run)) for path in paths if path.exists()]
    _check_regular(run, names)
    return {name: {"bytes": (run / name).stat().st_size, "sha256": sha256_file(run / name)} for name in names}


def _check_regular(run: Path, names: Iterable[str]) -> None:
    """UserError unless the names are of regular files of a training's folder: no link may lead out."""
    for name in names:
        if fault := fault_of_file(run, name):
            raise UserError(f"{run / name}: {fault}, so nothing of this training is pushed")


def _check_sendable(run: Path, step: int, files: Files) -> None:
    """UserError unless files are such as a remote store keeps of a training, so that whoever pulls reads the list."""
    _check_regular(run, files)
    try:
        check_listed(files, of_training(step))
    except NameFault as fault:
        raise UserError(f"{run}: {fault}, so nothing of this training is pushed") from None


def push(
    store: RemoteStore, run: Path, stage: str, step: int | None = None, weights: bool = True, is_passing: bool = False
) -> int:
    """Push a training at a step (None: the newest) unless it is there; return the bytes sent.

    `weights`: with the checkpoint's own files; `is_passing`: until a later checkpoint is there.
    """
    checkpoint = newest_checkpoint(run, step)
    if checkpoint is None or step not in (None, checkpoint.step):
        raise UserError(f"{run}: has no sound checkpoint of step {step}, so nothing is pushed")
    if (checkpoint.path / ELSEWHERE).exists():
        return 0
    return store.push(manifest_of(run, stage, checkpoint, weights, is_passing), run)


def later_step(store: RemoteStore, identity: str, step: int, planned: int) -> int | None:
    """Return the store's newest step of a training after `step` and up to `planned`, or None."""
    return max((each for each in store.steps().get(identity, ()) if step < each <= planned), default=None)


def pull_newest(store: RemoteStore, run: Path, planned: int) -> None:
    """Take what the store has of a training beyond its folder, with the files that the rest of its steps needs.

    A training that has begun here goes on without a store that is out of reach.
    """
    newest = newest_step(run)
    try:
        step = later_step(store, run.name, newest, planned) or newest
    except UserError as error:
        if newest == 0:
            raise
        print(f"{error}; going on with what is here", flush=True)
        step = newest
    is_last = step >= planned
    if step > newest or (not is_last and (run / f"checkpoints/step_{step}" / ELSEWHERE).exists()):
        if not is_last and not store.manifest(run.name, step)["weights"]:
            print(
                f"{run}: {store.url} has step {step} without its checkpoint, so nothing goes on from there", flush=True
            )
            return
        print(f"{run}: fetching step {step} from {store.url}", flush=True)
        pull(store, run, step, not is_last)


@contextmanager
def pushed_beside(store: RemoteStore | None, run: Path, stage: str) -> Iterator[None]:
    """Let a process of low priority push each new checkpoint while the block trains; no store: nothing is pushed."""
    if store is None:
        yield
        return
    asked = Store(remote=store.url, mb_per_second=store.pace and store.pace / 1e6).model_dump_json()
    command = [sys.executable, "-m", "scripts.stage.push", "--store", asked, "--stage", stage, "--run", str(run)]
    with subprocess.Popen(command, preexec_fn=partial(os.nice, 10)) as pushing:  # noqa: PLW1509, S603
        try:
            yield
        finally:
            pushing.terminate()


def pull(store: RemoteStore, run: Path, step: int, is_whole: bool) -> None:
    """Take a training at a step from the store into its folder, which the caller holds; the checkpoint comes last.

    Unless `is_whole`, the checkpoint's own files stay in the store where an export stands for them. Logs of a later
    step than the folder's replace the folder's.
    """
    manifest, is_later = store.manifest(run.name, step), step > newest_step(run)
    place, files = f"checkpoints/step_{step}", manifest["files"]
    exports = {name.split("/")[1] for name in files if name.startswith("exports/") and name.count("/") > 1}
    own = {name for name in files if name.startswith(f"{place}/") and name != f"{place}/{FILES}"}
    if is_whole and not manifest["weights"]:
        raise UserError(f"{store.url}: holds step {step} of {run.name} without its checkpoint; push checkpoints, too")
    left = {*own} if exports and not is_whole else set()
    paths = store.fetch({name: file for name, file in files.items() if name not in left}, run / FETCHED)
    _check(run.name, place, manifest, paths)
    folders = [*(f"exports/{content}" for content in sorted(exports)), place]
    for name in files:
        path = run / name
        if not any(name.startswith(f"{folder}/") for folder in folders) and (is_later or not path.exists()):
            path.parent.mkdir(exist_ok=True)
            with filled_by_program(path) as fresh:
                copy_file(paths[files[name]["sha256"]], fresh)
    for folder in folders:
        inside = [name for name in files if name.startswith(f"{folder}/") and name not in left]
        settled = {name.removeprefix(f"{folder}/"): paths[files[name]["sha256"]] for name in inside}
        if folder == place and (left or not own):
            write_json(run / FETCHED / ELSEWHERE, {"remote": store.url})
            settled[ELSEWHERE] = run / FETCHED / ELSEWHERE
        _settle(settled, run / folder)
    if own and not left:
        (run / place / ELSEWHERE).unlink(missing_ok=True)
    shutil.rmtree(run / FETCHED)


def _check(identity: str, place: str, manifest: Manifest, paths: Mapping[str, Path]) -> None:
    """UserError where a manifest's records are not of its training, or list other files than the manifest."""
    files = manifest["files"]

    def record(name: str, kind: type[Record]) -> Record:
        if name not in files:
            raise UserError(f"{identity}: its manifest in the remote store lacks {name}; push the training again")
        return read_record(paths[files[name]["sha256"]], kind)

    held = record("identity.json", RunIdentity)
    if identity_of(facts_in(held)) != identity:
        raise UserError(f"{identity}: the identity.json in the remote store is another training's; push it again")
    listed = {f"{place}/{name}": file for name, file in record(f"{place}/{FILES}", Files).items()}
    for note in filter(NOTE.fullmatch, files):
        exported = record(note, ExportRecord)
        listed |= {f"exports/{exported['content']}/{name}": file for name, file in exported["files"].items()}
    for name, file in files.items():
        if name.count("/") > 1 and Path(name).name != FILES and listed.get(name) not in (file, file | {"sha256": None}):
            raise UserError(f"{identity}: {name} in the remote store is not the file that was trained; push it again")


def _settle(paths: Mapping[str, Path], folder: Path) -> None:
    """Make a folder of fetched files by one rename; into one that is there, put the files that it lacks."""
    is_there = folder.is_dir()
    with nullcontext(folder) if is_there else temporary_directory(folder) as filled:
        for name, path in paths.items():
            if not (filled / name).exists():
                (filled / name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, filled / name)
        sync_tree(filled)
        if not is_there:
            filled.rename(folder)
            fsync_directory(folder.parent)
