"""Files of several sources, of the hub or of folders, brought some at a time and recorded."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

from huggingface_hub import constants

from scripts.data.compose import PublishedFile
from scripts.data.hub import HubClient, near
from scripts.data.hub_cache import HubFile, Kind, Snapshot
from scripts.data.source_record import describe_file
from scripts.errors import UserError
from scripts.files import amount, explain_write_errors, link_or_copy
from scripts.recipe.source import FolderSource, HubSource

THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Wanted:
    """A file of a source, and the path below the output folder that it gets; None: it is read where it is."""

    source: HubSource | FolderSource
    file: str
    target: str | None = None


class Fetcher:
    """Puts files of several sources below one folder, some at a time; each hub revision is looked up once."""

    def __init__(self, directory: Path, kind: Kind = "dataset") -> None:
        self.directory = directory
        self.described: dict[str, dict[str, Any]] = {}
        self.brought: dict[Wanted, tuple[Path, dict[str, Any]]] = {}
        """Of files that are read where they are: the path, and what was recorded."""
        self.snapshots: dict[HubSource, Snapshot] = {}
        self.kind = kind
        self._hub = HubClient(kind)

    def fetch(self, wanted: list[Wanted]) -> None:
        """Fetch all files; the first that fails ends the others, and what came of them stays in the hub's cache."""
        from_hub = [item for item in wanted if isinstance(item.source, HubSource)]
        for source in dict.fromkeys(item.source for item in from_hub):
            if source in self.snapshots and self.snapshots[source].names is not None:
                continue
            files = [item.file for item in from_hub if item.source == source]
            self.snapshots[source] = self._hub.find_snapshot(source.repository, source.revision, files)
        located = self.map(lambda item: self._hub.locate(self.snapshots[item.source], item.file), from_hub)
        folders = {item: _find(item) for item in wanted if isinstance(item.source, FolderSource)}
        found = [*zip(from_hub, located, strict=True), *folders.items()]
        _check_space(located, [file for item, file in found if item.target is not None], self.directory)
        self.map(lambda pair: self._place(*pair), found)

    def names(self, source: HubSource | FolderSource) -> tuple[str, ...]:
        """The files that a source has; those in the cache where the hub cannot be asked."""
        if isinstance(source, FolderSource):
            return files_below(_folder(source))
        if source not in self.snapshots or self.snapshots[source].names is None:
            there = ["config.json" if self.kind == "model" else "."]
            self.snapshots[source] = self._hub.find_snapshot(source.repository, source.revision, there, are_all=False)
        known = self.snapshots[source]
        return known.names or files_below(known.pointer("."))

    def bring(self, wanted: list[Wanted]) -> list[PublishedFile]:
        """Fetch files that are read where they are."""
        self.fetch([item for item in wanted if item not in self.brought])
        return [PublishedFile(self.brought[item][0], _shown(item)) for item in wanted]

    def origin(self, source: HubSource | FolderSource) -> dict[str, str]:
        """What the record says of a source that was fetched from."""
        if isinstance(source, FolderSource):
            return {"source": str(Path(source.path)), "revision": "folder"}
        return {"source": self.snapshots[source].repository, "revision": self.snapshots[source].commit}

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The results of the work on each item, in order, from a few threads."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._hub.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _place(self, item: Wanted, file: HubFile | Path) -> None:
        described = self._hub.fetch(file) if isinstance(file, HubFile) else None
        path = file.pointer if isinstance(file, HubFile) else file
        if item.target is None:
            self.brought[item] = path, described or describe_file(path)
            return
        placed = self.directory / item.target
        placed.parent.mkdir(parents=True, exist_ok=True)
        with explain_write_errors(placed):
            link_or_copy(path, placed)
        self.described[item.target] = described or describe_file(placed)


def _shown(item: Wanted) -> str:
    is_folder = isinstance(item.source, FolderSource)
    return str(Path(item.source.path, item.file)) if is_folder else f"{item.source.repository}/{item.file}"


def files_below(folder: Path) -> tuple[str, ...]:
    """The files of a folder and of those in it, by their paths from it."""
    return tuple(sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()))


def _folder(source: FolderSource) -> Path:
    folder = Path(source.path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, but the recipe's source is there; correct the path")
    return folder


def _find(item: Wanted) -> Path:
    """The path of a folder's file, which can be read."""
    folder = _folder(item.source)
    path = folder / item.file
    if not path.is_file():
        hint = near(item.file, files_below(folder))
        raise UserError(f"{path}: no such file, but the recipe's source should have it; {hint}")
    with path.open("rb"):
        return path


def _check_space(from_hub: list[HubFile], linked: list[HubFile | Path], directory: Path) -> None:
    """UserError when the disk of the hub's cache or, where it is another one, of the output has too little room."""
    cache = next(path for path in Path(constants.HF_HUB_CACHE, "x").absolute().parents if path.exists())
    here = directory.stat().st_dev
    sizes = [
        (file.size, cache.stat().st_dev) if isinstance(file, HubFile) else (file.stat().st_size, file.stat().st_dev)
        for file in linked
    ]
    to_copy = sum(size for size, disk in sizes if disk != here)
    to_load = sum(max(0, file.size - file.bytes_here) for file in from_hub)
    for path, needed, where in (
        (cache, to_load, f"the hub's cache {constants.HF_HUB_CACHE} (HF_HOME says where it is)"),
        (directory, to_copy, str(directory.parent)),
    ):
        free = disk_usage(path).free
        if needed > free:
            raise UserError(f"{where}: {amount(needed)} are to come and {amount(free)} are free; make room, or move it")
