"""Files of several sources, of the hub or of folders, fetched some at a time and recorded."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from scripts.data.hub import download, near, open_snapshot
from scripts.data.published import PublishedFile
from scripts.data.source_record import describe_file, files_below
from scripts.errors import UserError
from scripts.files import copy_file, explain_write_errors, file_inside, link_or_copy
from scripts.recipe.source import FolderSource, HubSource

THREADS = 4


@dataclass(frozen=True)
class Wanted:
    """A file of a source, and its path below the output folder; None leaves it in the cache or the source's folder."""

    source: HubSource | FolderSource
    file: str
    target: str | None = None


def name_of(source: HubSource | FolderSource) -> str:
    """Return the name of a source in messages and records."""
    return source.repository if isinstance(source, HubSource) else str(Path(source.path))


class Fetcher:
    """Put files of several sources below one folder; each revision of the hub is resolved once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.described: dict[str, dict[str, Any]] = {}
        """The record of each file below `directory`, by its path."""
        self.brought: dict[Wanted, tuple[Path, dict[str, Any]]] = {}
        """The path and the record of each file without a target."""
        self.snapshot = cache(lambda source: open_snapshot(source.repository, source.revision))

    def fetch(self, wanted: list[Wanted]) -> None:
        """Fetch all files, four at once; no file is downloaded if one is missing."""
        self.map(self._place, [(item, self._find(item)) for item in wanted])

    def names(self, source: HubSource | FolderSource) -> set[str]:
        """Return the names of a source's files; without the hub, of the files in the cache."""
        return files_below(_folder(source)) if isinstance(source, FolderSource) else {*self.snapshot(source).sizes}

    def check(self, item: Wanted) -> None:
        """Raise UserError for a folder's file that is missing or empty."""
        if not self._find(item).stat().st_size:
            raise UserError(f"{item.source.path}/{item.file}: the file is empty; a blend is made of rows")

    def bring(self, wanted: list[Wanted]) -> list[PublishedFile]:
        """Fetch files that are read where they lie."""
        self.fetch([item for item in wanted if item not in self.brought])
        return [PublishedFile(self.brought[item][0], str(Path(name_of(item.source), item.file))) for item in wanted]

    def origin(self, source: HubSource | FolderSource) -> dict[str, str]:
        """Return the record of a fetched source: its name and revision."""
        revision = "folder" if isinstance(source, FolderSource) else self.snapshot(source).commit
        return {"source": name_of(source), "revision": revision}

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return the results of the work on each item, in order, from a few threads; nothing begins after a failure."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(work, items))

    def _find(self, item: Wanted) -> Path | None:
        """Return the path of a folder's file, None for the hub's; UserError for a missing file."""
        if isinstance(item.source, HubSource):
            snapshot = self.snapshot(item.source)
            if item.file in snapshot.sizes:
                return None
            why = f"the repository has no such file; {near(item.file, snapshot.sizes)}"
            if not snapshot.is_whole:
                why = (
                    "the hub cannot be asked (HF_HUB_OFFLINE, or no connection), and the cache "
                    f"{constants.HF_HUB_CACHE} does not have it; fetch on a machine that has the network"
                )
            raise UserError(f"{item.file} of {snapshot}: {why}")
        folder = _folder(item.source)
        path = file_inside(folder, item.file)
        if not path.is_file():
            hint = near(item.file, sorted(files_below(folder)))
            raise UserError(f"{path}: not there, but the recipe's source should have the file; {hint}")
        with path.open("rb"):
            return path

    def _place(self, found: tuple[Wanted, Path | None]) -> None:
        (item, path), described = found, None
        if path is None:
            path, described = download(self.snapshot(item.source), item.file)
        if item.target is None:
            self.brought[item] = path, described or describe_file(path)
            return
        placed = self.directory / item.target
        placed.parent.mkdir(parents=True, exist_ok=True)
        with explain_write_errors(placed):
            if described is not None:
                link_or_copy(path, placed)
            elif path.suffix == ".zip":  # of pictures, too large for a second one
                placed.symlink_to(path.absolute())
            else:  # Snakemake dates its outputs, and a link would date the user's own file
                copy_file(path, placed)
        self.described[item.target] = described or describe_file(placed)


def _folder(source: FolderSource) -> Path:
    folder = Path(source.path)
    if not folder.is_dir():
        is_file = "a file; name its folder as path, and the file as file of the blend"
        says = is_file if folder.is_file() else "no such folder, but named as the recipe's source; correct the path"
        raise UserError(f"{folder}: {says}")
    return folder
