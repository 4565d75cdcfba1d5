"""Fetch a recipe's blends, and the external tables that their placeholders name, from the hub or from folders."""

import argparse
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, TypeVar

import msgspec
from huggingface_hub import constants

from scripts.data.blocks import blocks_of
from scripts.data.columns import write_rows
from scripts.data.hub import HubClient, near
from scripts.data.hub_cache import HubFile, Kind, Snapshot
from scripts.data.placeholders import TABLES, ExternalTable
from scripts.data.source_record import describe_file
from scripts.errors import UserError, run_program
from scripts.files import amount, explain_write_errors, link_or_copy, replace_directory, write_json
from scripts.recipe.blend import IMAGE_FILES, Blend
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.source import FolderSource, HubSource, SyntheticSource
from scripts.recipe.strict import nearest

THREADS = 4
PLACEHOLDER = b"_hf_placeholder"
RAW = {"mmpr": "OMNI3_MMPR_PUBLIC_RAW", "mmpr_tiny": "OMNI3_MMPR_TINY_RAW"}  # Nemotron's, of images fetched before

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Wanted:
    """A file of a source, and the path below the output folder that it gets."""

    source: HubSource | FolderSource
    file: str
    target: str


class _PlaceholderRow(msgspec.Struct):
    """The fields of a row that name the table to fill it from."""

    dataset: Any = None
    placeholder: Any = msgspec.field(name=PLACEHOLDER.decode(), default=msgspec.UNSET)


class Fetcher:
    """Puts files of several sources below one folder, some at a time; each hub revision is looked up once."""

    def __init__(self, directory: Path, kind: Kind = "dataset") -> None:
        self.directory = directory
        self.described: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[HubSource, Snapshot] = {}
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
        _check_space(located, list(folders.values()), self.directory)
        self.map(lambda pair: self._place(*pair), [*zip(from_hub, located, strict=True), *folders.items()])

    def names(self, source: HubSource) -> tuple[str, ...]:
        """The files that a source has; those in the cache where the hub cannot be asked."""
        known = self._hub.find_snapshot(source.repository, source.revision, ["config.json"], are_all=False)
        self.snapshots[source] = known
        return known.names or tuple(path.name for path in known.pointer("config.json").parent.iterdir())

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
        placed = self.directory / item.target
        placed.parent.mkdir(parents=True, exist_ok=True)
        with explain_write_errors(placed):
            link_or_copy(file.pointer if isinstance(file, HubFile) else file, placed)
        self.described[item.target] = described or describe_file(placed)


def fetch_source(recipe: Recipe, directory: Path) -> None:
    """Make `directory` hold every blend, ``tables/`` and ``record.json`` (origin and content of all of it).

    Only the tables that placeholder rows of these blends name are fetched; ``tables/`` may be empty. A table comes from
    ``tables/`` in a blend's folder, or from the hub.
    """
    if isinstance(recipe.source, SyntheticSource):
        raise UserError(f"recipe {recipe.name}: its blends are synthetic; python -m scripts.data.synthesize makes them")
    repositories = {table.repository for table in TABLES.values()}
    for unknown in recipe.tables.keys() - repositories:
        raise UserError(f"tables.{unknown}: no placeholder refers to this repository{nearest(unknown, repositories)}")
    sources = {name: source_of(recipe, blend) for name, blend in recipe.blends.items()}
    published = {name: blend.published_files(name) for name, blend in recipe.blends.items()}
    rows = [f"{name}.jsonl" for name, blend in recipe.blends.items() if blend.format == "jsonl"]
    with replace_directory(directory) as fresh:
        (fresh / "tables").mkdir()
        fetcher = Fetcher(fresh)
        fetcher.fetch(
            [Wanted(sources[name], file, target) for name in published for target, file in published[name].items()]
        )
        for name, blend in recipe.blends.items():
            if blend.columns is not None:
                sets = [[fresh / name / file for file in files] for files in blend.sets_of_files()]
                write_rows(sets, fresh / f"{name}.jsonl", blend)
                fetcher.described[f"{name}.jsonl"] = describe_file(fresh / f"{name}.jsonl")
        named: set[ExternalTable] = set().union(*fetcher.map(lambda file: tables_named(fresh / file), rows))
        folders = [Path(source.path) for source in sources.values() if isinstance(source, FolderSource)]
        ordered = sorted(named, key=lambda table: table.repository)
        tables = {table.repository: _wanted_table(table, folders, recipe) for table in ordered}
        try:
            fetcher.fetch(list(tables.values()))
        except UserError as error:
            hint = f"; or put the table below {folders[0] / 'tables'}" if folders else ""
            raise UserError(f"a table that placeholder rows name: {error}{hint}") from None
        for snapshot in fetcher.snapshots.values():
            snapshot.remember()
        record = {
            "blends": {name: fetcher.origin(source) for name, source in sources.items()},
            "tables": {repository: fetcher.origin(item.source)["revision"] for repository, item in tables.items()},
            "files": dict(sorted(fetcher.described.items())),
        }
        write_json(fresh / "record.json", record)


def source_of(recipe: Recipe, blend: Blend) -> HubSource | FolderSource:
    """Where a blend comes from: its own source or the recipe's; images of the hub from the folder that RAW names."""
    source, variable = blend.source or recipe.source, RAW.get(blend.format)
    folder = os.environ.get(variable) if variable and isinstance(source, HubSource) else None
    if not folder:
        return source
    if lacking := [file for file in IMAGE_FILES[blend.format] if not Path(folder, file).is_file()]:
        raise UserError(f"{variable}: {folder} has no {lacking[0]}; put it there, or unset {variable} to fetch it")
    return FolderSource(kind="folder", path=folder)


def tables_named(path: Path) -> set[ExternalTable]:
    """The external tables that a blend's placeholder rows name; an unknown name is reported by the fill."""
    found: set[ExternalTable] = set()
    decoder = msgspec.json.Decoder(_PlaceholderRow)
    for block in blocks_of(path):
        for line in block.read().split(b"\n"):
            if PLACEHOLDER not in line:
                continue
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                row = decoder.decode(line)
                if row.placeholder is not msgspec.UNSET and isinstance(row.dataset, str) and row.dataset in TABLES:
                    found.add(TABLES[row.dataset])
        if found == set(TABLES.values()):
            break
    return found


def _wanted_table(table: ExternalTable, folders: list[Path], recipe: Recipe) -> Wanted:
    target = str(Path("tables", table.local_path))
    for folder in folders:
        if (folder / target).exists():
            return Wanted(FolderSource(kind="folder", path=str(folder)), target, target)
    revision = recipe.tables.get(table.repository, "main")
    return Wanted(HubSource(kind="hub", repository=table.repository, revision=revision), table.file, target)


def _find(item: Wanted) -> Path:
    """The path of a folder's file, which can be read."""
    folder = Path(item.source.path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, but the recipe's source is there; correct the path")
    path = folder / item.file
    if not path.is_file():
        names = tuple(sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()))
        raise UserError(f"{path}: no such file, but the recipe's source should have it; {near(item.file, names)}")
    with path.open("rb"):
        return path


def _check_space(from_hub: list[HubFile], from_folders: list[Path], directory: Path) -> None:
    """UserError when the disk of the hub's cache or, where it is another one, of the output has too little room."""
    cache = next(path for path in Path(constants.HF_HUB_CACHE, "x").absolute().parents if path.exists())
    here = directory.stat().st_dev
    to_copy = sum(path.stat().st_size for path in from_folders if path.stat().st_dev != here)
    to_copy += sum(file.size for file in from_hub) if cache.stat().st_dev != here else 0
    to_load = sum(max(0, file.size - file.bytes_here) for file in from_hub)
    for path, needed, where in (
        (cache, to_load, f"the hub's cache {constants.HF_HUB_CACHE} (HF_HOME says where it is)"),
        (directory, to_copy, str(directory.parent)),
    ):
        free = disk_usage(path).free
        if needed > free:
            raise UserError(f"{where}: {amount(needed)} are to come and {amount(free)} are free; make room, or move it")


def main() -> None:
    """Command line of the download."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.download", description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="recipe YAML whose blends to fetch")
    parser.add_argument("--output", type=Path, required=True, help="directory for the blends, tables/ and record.json")
    arguments = parser.parse_args()
    fetch_source(load_recipe(arguments.recipe), arguments.output)


if __name__ == "__main__":
    run_program(main)
