"""Files of several sources, of the hub or of folders, fetched some at a time and recorded."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

from huggingface_hub import constants

from scripts.data.compose import PublishedFile
from scripts.data.hub import Snapshot, download, near, open_snapshot
from scripts.data.source_record import describe_file, files_below
from scripts.errors import UserError
from scripts.files import amount, explain_write_errors, link_or_copy
from scripts.recipe.source import FolderSource, HubSource

THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Wanted:
    """A file of a source, and its path below the output folder; None leaves it in the cache or the source's folder."""

    source: HubSource | FolderSource
    file: str
    target: str | None = None


class Fetcher:
    """Put files of several sources below one folder; each revision of the hub is resolved once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.described: dict[str, dict[str, Any]] = {}
        """The record of each file below `directory`, by its path."""
        self.brought: dict[Wanted, tuple[Path, dict[str, Any]]] = {}
        """The path and the record of each file without a target."""
        self.snapshots: dict[HubSource, Snapshot] = {}

    def fetch(self, wanted: list[Wanted]) -> None:
        """Fetch all files, four at once; no file is downloaded if one is missing or the disk is too small."""
        by_source: dict[HubSource, list[str]] = defaultdict(list)
        for item in wanted:
            if isinstance(item.source, HubSource):
                by_source[item.source].append(item.file)
        for source, files in by_source.items():
            _refuse_missing(self.snapshot(source, files), files)
        folders = {item: _find(item) for item in wanted if isinstance(item.source, FolderSource)}
        self._check_space(wanted, folders)
        self.map(lambda item: self._place(item, folders.get(item)), wanted)

    def snapshot(self, source: HubSource, files: Iterable[str] = ()) -> Snapshot:
        """Return the snapshot of a source: with `files`, as far as they need it; without, with all its names."""
        known = self.snapshots.get(source)
        if known is None or not (known.is_whole or known.sizes.keys() >= {*files} > set()):
            self.snapshots[source] = open_snapshot(source.repository, source.revision, [*files])
        return self.snapshots[source]

    def names(self, source: HubSource | FolderSource) -> set[str]:
        """Return the names of a source's files; without the hub, of the files in the cache."""
        return files_below(_folder(source)) if isinstance(source, FolderSource) else {*self.snapshot(source).sizes}

    def bring(self, wanted: list[Wanted]) -> list[PublishedFile]:
        """Fetch files that are read where they lie."""
        self.fetch([item for item in wanted if item not in self.brought])
        return [PublishedFile(self.brought[item][0], _shown(item)) for item in wanted]

    def origin(self, source: HubSource | FolderSource) -> dict[str, str]:
        """Return the record of a fetched source: its name and revision."""
        if isinstance(source, FolderSource):
            return {"source": str(Path(source.path)), "revision": "folder"}
        return {"source": self.snapshots[source].repository, "revision": self.snapshots[source].commit}

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of the work on each item, in order, from a few threads; the first failure is raised."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _place(self, item: Wanted, path: Path | None) -> None:
        described = None
        if path is None:
            path, described = download(self.snapshots[item.source], item.file)
        if item.target is None:
            self.brought[item] = path, described or describe_file(path)
            return
        placed = self.directory / item.target
        placed.parent.mkdir(parents=True, exist_ok=True)
        with explain_write_errors(placed):
            link_or_copy(path, placed)
        self.described[item.target] = described or describe_file(placed)

    def _check_space(self, wanted: list[Wanted], folders: dict[Wanted, Path]) -> None:
        """UserError when the disk of the hub's cache or, where it is another one, of the output has too little room."""
        cache = next(path for path in Path(constants.HF_HUB_CACHE, "x").absolute().parents if path.exists())
        here, to_load, to_copy = self.directory.stat().st_dev, 0, 0
        for item in wanted:
            if (path := folders.get(item)) is None:
                snapshot = self.snapshots[item.source]
                size, disk = snapshot.sizes[item.file], cache.stat().st_dev
                to_load += 0 if snapshot.cached(item.file) else size
            else:
                size, disk = path.stat().st_size, path.stat().st_dev
            to_copy += size if item.target is not None and disk != here else 0
        for path, needed, where in (
            (cache, to_load, f"the hub's cache {constants.HF_HUB_CACHE} (HF_HOME says where it is)"),
            (self.directory, to_copy, str(self.directory.parent)),
        ):
            if needed > (free := disk_usage(path).free):
                raise UserError(
                    f"{where}: {amount(needed)} are to come and {amount(free)} are free; make room, or move it"
                )


def _refuse_missing(snapshot: Snapshot, files: list[str]) -> None:
    for name in files:
        if name not in snapshot.sizes and snapshot.is_whole:
            raise UserError(f"{name} of {snapshot}: the repository has no such file; {near(name, snapshot.sizes)}")
        if name not in snapshot.sizes:
            raise UserError(
                f"{name} of {snapshot}: the hub cannot be asked (HF_HUB_OFFLINE, or no connection), and the cache "
                f"{constants.HF_HUB_CACHE} does not have it; fetch on a machine that has the network"
            )


def _shown(item: Wanted) -> str:
    is_folder = isinstance(item.source, FolderSource)
    return str(Path(item.source.path, item.file)) if is_folder else f"{item.source.repository}/{item.file}"


def _folder(source: FolderSource) -> Path:
    folder = Path(source.path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, but the recipe's source is there; correct the path")
    return folder


def _find(item: Wanted) -> Path:
    """Return the path of a folder's file; UserError where it is missing."""
    folder = _folder(item.source)
    path = folder / item.file
    if not path.is_file():
        hint = near(item.file, sorted(files_below(folder)))
        raise UserError(f"{path}: no such file, but the recipe's source should have it; {hint}")
    with path.open("rb"):
        return path
