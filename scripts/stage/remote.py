"""A training's folder and its copy in a remote store: choose what to push, and take in what is there."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.errors import UserError
from scripts.files import (
    copy_file,
    filled_by_program,
    fsync_directory,
    in_threads,
    link_or_copy,
    sha256_file,
    sync_tree,
    temporary_directory,
    write_json,
)
from scripts.names import NameFault, check_listed, fault_of_file, of_training
from scripts.processes import PARENT
from scripts.recipe.config import Store
from scripts.records import ExportRecord, Files, Record, RunIdentity, read_if_there, read_record
from scripts.remote.remote_store import GoneError, Manifest, RemoteStore
from scripts.stage.owner import hold
from scripts.stage.publish import export_name
from scripts.stage.rundir import ELSEWHERE, FILES, Checkpoint
from scripts.stage.store import LOGS, facts_in, identity_of
from scripts.stage.training_folder import TrainingFolder

SMALL = ("identity.json", "config.yaml", *LOGS)
FETCHED = ".fetched"
FETCHING = ".fetching.json"
"""The lock of a process that fetches into a training's folder."""
DAY = 86400.0
"""What a killed fetch left is removed once it is this old, in seconds."""
TRIES = 5
NOTE = re.compile(r"exports/[0-9a-f]{16}\.json")


@dataclass(frozen=True)
class Copy:
    """A training to push: the manifest, and the place of every file."""

    manifest: Manifest
    paths: dict[str, Path]


def copy_of(
    training: TrainingFolder, stage: str, checkpoint: Checkpoint, weights: bool, is_passing: bool, kept: Path
) -> Copy:
    """Return the files of a training to push at a checkpoint: logs, checkpoint, and the checkpoint's export.

    Without `weights`, an export stands for the checkpoint's files. Logs, which grow while the stage trains, are copied
    to the folder `kept` and pushed from there.
    """
    run = training.path
    paths: dict[str, Path] = {}
    for path in (*(run / name for name in SMALL), *run.glob("scores/*.parquet")):
        name = str(path.relative_to(run))
        if path.exists():
            _check_regular(run, [name])
            paths[name] = kept / name
            paths[name].parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, paths[name])
    listed, place = checkpoint.files, f"checkpoints/{checkpoint.path.name}"
    paths[f"{place}/{FILES}"] = checkpoint.path / FILES
    note = training.exports / f"{export_name(listed)}.json"
    exported = read_if_there(note, ExportRecord)
    if exported:
        paths[f"exports/{note.name}"] = note
    _check_regular(run, paths)
    files = _described(paths)
    if exported:
        files |= {f"exports/{exported['content']}/{name}": file for name, file in exported["files"].items()}
    if weights or not exported:
        files |= {f"{place}/{name}": file for name, file in listed.items()}
    paths |= {name: run / name for name in files if name not in paths}
    unhashed = {name: paths[name] for name, file in files.items() if not file["sha256"]}
    _check_regular(run, unhashed)
    files |= _described(unhashed)
    _check_sendable(run, checkpoint.step, files)
    identity = read_record(training.identity_file, RunIdentity)["identity"]
    has = {"weights": weights or not exported, "is_passing": is_passing}
    return Copy(Manifest(identity=identity, step=checkpoint.step, stage=stage, files=files, **has), paths)


def _described(paths: Mapping[str, Path]) -> Files:
    """Return size and hash of files."""
    return {name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for name, path in paths.items()}


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
    store: RemoteStore,
    training: TrainingFolder,
    stage: str,
    step: int | None = None,
    weights: bool = True,
    is_passing: bool = False,
    is_hashed: bool = False,
) -> int:
    """Push a training at a step (None: the newest) unless it is there; return the bytes sent.

    `weights`: with the checkpoint's files; `is_passing`: until a later checkpoint is there; `is_hashed`: objects there
    are read and hashed, and sent again after damage.
    """
    if step is not None and training.checkpoint(step).is_elsewhere:
        return 0
    is_again = training.name.startswith(f"{training.identity}.")
    if is_again and store.steps().get(training.identity):
        print(f"{training.path}: not pushed, for {store.url} has the training before, of the same identity", flush=True)
        return 0
    checkpoint = training.newest_checkpoint(step)
    if checkpoint is None or step not in (None, checkpoint.step):
        raise UserError(f"{training.path}: has no sound checkpoint of step {step}, so nothing is pushed")
    from scripts.remote.sending import send  # noqa: PLC0415 - imports fsspec, a tenth of what plan takes

    with tempfile.TemporaryDirectory(prefix="push-") as kept:
        copy = copy_of(training, stage, checkpoint, weights, is_passing, Path(kept))
        return send(store, copy.manifest, copy.paths, is_hashed)


def later_step(store: RemoteStore, identity: str, step: int, planned: int) -> int | None:
    """Return the store's newest step of a training after `step` and up to `planned`, or None.

    A damaged or untrusted manifest is named and passed over; UserError where no sound manifest is left.
    """
    steps = [each for each in store.steps().get(identity, ()) if step < each <= planned]
    problems = []
    for each in reversed(steps):
        try:
            problem = store.entry(identity, each).problem
        except GoneError:
            continue
        if problem:
            problems.append(problem)
            continue
        for problem in problems:
            warn_once(f"{problem}; going on with step {each}")
        return each
    if problems:
        raise problems[0]
    return None


@cache
def warn_once(problem: str) -> None:
    """Print a problem in the store, once a process."""
    print(problem, flush=True)


def pull_newest(store: RemoteStore, training: TrainingFolder, planned: int) -> bool:
    """Take a training's later steps from the store, with the files for the remaining steps; return whether any were.

    A training begun here goes on without a store out of reach. After a step was removed meanwhile, in favour of a later
    step, the store is listed again.
    """
    run = training.path
    for _ in range(TRIES):
        now = training.read_again()
        newest = now.newest_step
        try:
            step = later_step(store, training.name, newest, planned) or newest
        except UserError as error:
            if newest == 0:
                raise
            print(f"{error}; going on with what is here", flush=True)
            step = newest
        is_last = step >= planned
        if step == newest and (is_last or not now.checkpoint(step).is_elsewhere):
            remove_fetched(training)
            return False
        try:
            if not is_last and not store.manifest(training.name, step)["weights"]:
                says = f"{store.url} has step {step} without its checkpoint, so nothing goes on from there"
                print(f"{run}: {says}", flush=True)
                return False
            print(f"{run}: fetching step {step} from {store.url}", flush=True)
            pull(store, training, step, not is_last)
            return True
        except GoneError as error:
            store.look_again()
            if step in store.steps().get(training.name, ()):
                raise
            print(f"{error}; removed meanwhile, so looking again", flush=True)
    raise UserError(f"{run}: every step in {store.url} was removed during the fetch; start again")


@contextmanager
def pushed_beside(
    store: RemoteStore | None, training: TrainingFolder, stage: str, seconds_left: Callable[[], float]
) -> Iterator[None]:
    """Let a process of low priority push each new checkpoint while the block trains; no store: nothing is pushed.

    At the end, `seconds_left` remain to push the newest checkpoint.
    """
    if store is None:
        yield
        return
    asked = Store(remote=store.url, mb_per_second=store.pace and store.pace / 1e6, key=store.key).model_dump_json()
    command = [sys.executable, "-m", "scripts.stage.push", "--store", asked, "--stage", stage, "--run"]
    command.append(str(training.path))
    environment = os.environ | {PARENT: str(os.getpid())}
    with subprocess.Popen(command, env=environment, preexec_fn=_step_back) as pushing:  # noqa: PLW1509, S603
        try:
            yield
        finally:
            pushing.terminate()
            seconds = seconds_left()
            try:
                pushing.wait(None if seconds == math.inf else seconds)
            except subprocess.TimeoutExpired:
                print(f"{stage}: the last checkpoint was not pushed within {seconds:.0f} s, and stays here", flush=True)
            finally:
                pushing.kill()


def _step_back() -> None:
    """Give a process low priority; signals to end wait until the process listens."""
    os.nice(10)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def pull(store: RemoteStore, training: TrainingFolder, step: int, is_whole: bool) -> None:
    """Take a training at a step from the store into its folder; the checkpoint comes last.

    Unless `is_whole`, an export stands for the checkpoint's files, and these stay in the store. Logs of a later step
    than the folder's replace the folder's. One process at a time fetches into a folder; the next process finds the
    files. Every file already here is hashed, and fetched again after damage.
    """
    with hold(training.path / FETCHING, math.inf):
        _pull(store, training.read_again(), step, is_whole)


def _pull(store: RemoteStore, training: TrainingFolder, step: int, is_whole: bool) -> None:
    run = training.path
    manifest, is_later = store.manifest(training.name, step), step > training.newest_step
    place, files = f"checkpoints/step_{step}", manifest["files"]
    exports = {name.split("/")[1] for name in files if name.startswith("exports/") and name.count("/") > 1}
    own = {name for name in files if name.startswith(f"{place}/") and name != f"{place}/{FILES}"}
    if is_whole and not manifest["weights"]:
        raise UserError(f"{store.url}: holds step {step} of {run.name} without its checkpoint; push checkpoints, too")
    left = {*own} if exports and not is_whole else set()

    # What is here and sound is not fetched.
    wanted = {name: file for name, file in files.items() if name not in left}
    here = _sound(run, wanted)
    lacking = {name: file for name, file in wanted.items() if name not in here}
    paths = {files[name]["sha256"]: run / name for name in here}
    paths |= store.fetch(lacking, run / FETCHED)
    _check(run.name, place, manifest, paths)

    # The logs, then the exports, then the checkpoint.
    folders = [*(f"exports/{content}" for content in sorted(exports)), place]
    for name in lacking:
        path = run / name
        if not any(name.startswith(f"{folder}/") for folder in folders) and (is_later or not path.exists()):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A copy: logs of equal content would else be one file, to which two are appended.
            with filled_by_program(path) as fresh:
                copy_file(paths[files[name]["sha256"]], fresh)
    for folder in folders:
        inside = [name for name in lacking if name.startswith(f"{folder}/")]
        settled = {name.removeprefix(f"{folder}/"): paths[files[name]["sha256"]] for name in inside}
        if folder == place and (left or not own):
            write_json(run / FETCHED / ELSEWHERE, {"remote": store.url})
            settled[ELSEWHERE] = run / FETCHED / ELSEWHERE
        _settle(settled, run / folder)
    if own and not left:
        (run / place / ELSEWHERE).unlink(missing_ok=True)
    shutil.rmtree(run / FETCHED)


def _sound(run: Path, files: Files) -> set[str]:
    """Return the files of a training in the folder with the right size and hash."""

    def is_sound(name: str) -> bool:
        path, file = run / name, files[name]
        return path.is_file() and path.stat().st_size == file["bytes"] and sha256_file(path) == file["sha256"]

    return {name for name, sound in zip(files, in_threads(is_sound, files), strict=True) if sound}


def is_here(training: TrainingFolder, manifest: Manifest) -> bool:
    """Whether a training's folder has the checkpoint of a manifest, or else the export, by hash."""
    place = f"checkpoints/step_{manifest['step']}/" if manifest["weights"] else "exports/"
    files = {name: file for name, file in manifest["files"].items() if name.startswith(place)}
    return bool(files) and _sound(training.path, files) == files.keys()


def _take_file(source: Path, target: Path) -> None:
    """Put a fetched file in place by one rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with filled_by_program(target) as fresh:
        link_or_copy(source, fresh)


def remove_fetched(training: TrainingFolder) -> int:
    """Remove files left in a training's folder by a killed fetch over a day ago; return the bytes."""
    folder = training.path / FETCHED
    if not folder.is_dir():
        return 0
    states = [path.stat() for path in (folder, *folder.iterdir())]
    if time.time() - max(state.st_mtime for state in states) < DAY:
        return 0
    try:
        with hold(training.path / FETCHING):
            shutil.rmtree(folder)
    except UserError:  # a fetch is at work there
        return 0
    return sum(state.st_size for state in states[1:])


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
    """Make a folder of fetched files by one rename; add files to an existing folder by renames."""
    if folder.is_dir():
        for name, path in paths.items():
            _take_file(path, folder / name)
        return
    with temporary_directory(folder) as filled:
        for name, path in paths.items():
            (filled / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, filled / name)
        sync_tree(filled)
        filled.rename(folder)
        fsync_directory(folder.parent)
