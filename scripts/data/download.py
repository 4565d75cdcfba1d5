"""Fetch a recipe's blends and the external tables named by placeholders; compose blends of columns."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import constants

from scripts.data.clean import Cleaner
from scripts.data.compose import write_blend
from scripts.data.data_files import FileSet, Listing, files_named, files_of_split
from scripts.data.hub import download, near, open_snapshot
from scripts.data.placeholders import TABLES, ExternalTable
from scripts.data.published import PublishedFile, Reading
from scripts.data.readiness import unread_if_ready
from scripts.data.source_record import describe_file, files_below
from scripts.errors import UserError, warn
from scripts.files import (
    copy_file,
    explain_write_errors,
    file_inside,
    link_or_copy,
    refuse_pointer,
    replace_directory,
    write_json,
)
from scripts.program import run_command_line
from scripts.recipe.blend import Benchmark, Blend
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.source import Files, FolderSource, HubSource
from scripts.recipe.strict import nearest
from scripts.rows.jsonl import RowError, blocks_of, row_or_error
from scripts.rows.keys import Unread, told_of
from scripts.rows.parallel import default_workers

PLACEHOLDER = "_hf_placeholder"
THREADS = 4


@dataclass(frozen=True)
class Wanted:
    """A file of a source, and its path below the output folder; None leaves it in the cache or the source's folder."""

    source: HubSource | FolderSource
    file: str
    target: str | None = None
    reading: Reading = field(default_factory=Reading)


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
        self.map(self._place, [(item, self.find(item)) for item in wanted])

    def names(self, source: HubSource | FolderSource) -> set[str]:
        """Return the names of a source's files; without the hub, of the files in the cache."""
        return files_below(_folder(source)) if isinstance(source, FolderSource) else {*self.snapshot(source).sizes}

    def bring(self, wanted: list[Wanted]) -> list[PublishedFile]:
        """Fetch files that are read where they lie."""
        self.fetch([item for item in wanted if item not in self.brought])
        return [
            PublishedFile(self.brought[item][0], str(Path(name_of(item.source), item.file)), item.reading)
            for item in wanted
        ]

    def origin(self, source: HubSource | FolderSource) -> dict[str, str]:
        """Return the record of a fetched source: its name and revision."""
        revision = "folder" if isinstance(source, FolderSource) else self.snapshot(source).commit
        return {"source": name_of(source), "revision": revision}

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return the results of the work on each item, in order, from a few threads; nothing begins after a failure."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(work, items))

    def find(self, item: Wanted) -> Path | None:
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
        refuse_pointer(path)
        return path

    def _place(self, found: tuple[Wanted, Path | None]) -> None:
        (item, path), described = found, None
        if path is None:
            path, described = download(self.snapshot(item.source), item.file)
            refuse_pointer(path)
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


def fetch_source(
    recipe: Recipe, directory: Path, workers: int = 1, synthesize: Callable[[Recipe, Path], Any] | None = None
) -> None:
    """Make `directory` hold every blend, ``tables/`` and ``record.json``: origin and content of all files.

    Blends of columns are composed. `synthesize` writes the synthetic blends, and returns their record. Tables are
    fetched if placeholder rows name them, from ``tables/`` in a blend's folder or from the hub.
    """
    repositories = {table.repository for table in TABLES.values()}
    for unknown in recipe.tables.keys() - repositories:
        raise UserError(f"tables.{unknown}: no placeholder refers to this repository{nearest(unknown, repositories)}")
    synthetic = {name: blend for name, blend in recipe.fetched.items() if recipe.is_synthetic(blend)}
    own = {name: blend for name, blend in recipe.fetched.items() if name not in synthetic}
    record: dict[str, Any] = {"blends": {}, "tables": {}, "files": {}}
    with replace_directory(directory) as fresh:
        if synthetic:
            if synthesize is None:
                raise UserError(f"blends.{next(iter(synthetic))}: synthetic; python -m demo.synthesize writes it")
            record = synthesize(recipe.model_copy(update={"blends": synthetic}), fresh)
        (fresh / "tables").mkdir(exist_ok=True)
        fetcher = Fetcher(fresh)
        linked = {
            name: blend.source or recipe.source
            for name, blend in own.items()
            if _is_linked(name, blend, recipe, fetcher)
        }
        fetcher.fetch(
            [
                Wanted(source, file, target)
                for name, source in linked.items()
                for target, file in own[name].published_files(name).items()
            ]
        )
        for name, blend in own.items():
            is_linked = name in linked
            record["blends"][name] = _made(name, blend, recipe, fetcher, workers, is_linked)
        rows = [fresh / f"{name}.jsonl" for name, blend in own.items() if blend.format == "jsonl"]
        named: set[ExternalTable] = set().union(*fetcher.map(tables_named, rows))
        if named and synthetic:
            raise UserError(
                "published and synthetic blends both have placeholder rows, with different tables; remove either"
            )
        parts = [part.source or recipe.source for blend in own.values() for part in blend.parts()]
        folders = [Path(source.path) for source in parts if isinstance(source, FolderSource)]
        ordered = sorted(named, key=attrgetter("repository"))
        tables = {table.repository: _wanted_table(table, folders, recipe) for table in ordered}
        try:
            fetcher.fetch(list(tables.values()))
        except UserError as error:
            hint = f"; or put the table below {folders[0] / 'tables'}" if folders else ""
            raise UserError(f"a table of placeholder rows: {error}{hint}") from None
        record["tables"] |= {name: fetcher.origin(item.source)["revision"] for name, item in tables.items()}
        record["files"] = dict(sorted({**record["files"], **fetcher.described}.items()))
        write_json(fresh / "record.json", record)


def _is_linked(name: str, blend: Blend, recipe: Recipe, fetcher: Fetcher) -> bool:
    """Whether a blend is a file of its source as it is; without that file, a source that is its own is a data set."""
    if blend.is_composed:
        return False
    source = blend.source or recipe.source
    sharing = [each for each in recipe.fetched.values() if (each.source or recipe.source) == source]
    if blend.file or blend.format != "jsonl" or len(sharing) > 1:
        return True
    return f"{name}.jsonl" in fetcher.names(source)


def _made(name: str, blend: Blend, recipe: Recipe, fetcher: Fetcher, workers: int, is_linked: bool) -> dict[str, Any]:
    """Compose a blend, or leave its linked file of ready rows; return the record, with the keys that nothing reads."""
    linked = fetcher.directory / f"{name}.jsonl"
    unread: dict[str, Unread] = {}
    if is_linked and blend.format == "jsonl":
        shown = str(Path(name_of(blend.source or recipe.source), blend.published_files(name)[linked.name]))
        found = unread_if_ready(linked, blend, workers)
        is_linked = found is not None
        unread = {shown: found} if found else {}
    if is_linked:
        made = fetcher.origin(blend.source or recipe.source)
        made |= {"file": shown} if blend.format == "jsonl" else {}
    else:
        made, unread = compose(name, blend, recipe, fetcher, workers)
    for line in told_of(unread):
        warn(line)
    recorded = {shown: keys.record() for shown, keys in unread.items()}
    return made | ({"unread": recorded} if recorded else {})


def compose(
    name: str, blend: Blend, recipe: Recipe, fetcher: Fetcher, workers: int
) -> tuple[dict[str, Any], dict[str, Unread]]:
    """Compose a blend of columns; return its record, and the keys that nothing reads by file."""
    wanted = [wanted_files(name, part, recipe, fetcher) for part in blend.parts()]
    files = [[fetcher.bring(files) for files in sets] for sets in wanted]
    path = fetcher.directory / f"{name}.jsonl"
    benchmarks = [(given, wanted_files(given.name, given, recipe, fetcher)) for given in blend.decontaminate]
    instances = {
        given.name: (_instances(given, sets, fetcher), given.ngram, given.overlap) for given, sets in benchmarks
    }
    cleaner = Cleaner(blend.deduplicate, instances) if blend.deduplicate or benchmarks else None
    counted, unread = write_blend(blend, files, path, cleaner, workers)
    fetcher.described[path.name] = describe_file(path)
    for given, sets in benchmarks:
        counted["decontaminated"][given.name] |= _origin(sets, fetcher)
    origins = [_origin(sets, fetcher) for sets in wanted]
    counted["sources"] = [origin | count for origin, count in zip(origins, counted["sources"], strict=True)]
    names, commits = zip(*dict.fromkeys((origin["source"], origin["revision"]) for origin in origins), strict=True)
    return {"source": ", ".join(names), "revision": ", ".join(commits), "composed": counted}, unread


def _instances(benchmark: Benchmark, sets: list[list[Wanted]], fetcher: Fetcher) -> Iterator[list[str]]:
    for file in fetcher.bring([item for files in sets for item in files]):
        for batch in file.batches(benchmark.columns):
            batch.require(benchmark.columns)
            for index, row in enumerate(batch.rows):
                if isinstance(row, RowError):
                    raise UserError(f"{batch.place(index)}: {row}")
                yield [str(row.get(column) or "") for column in benchmark.columns]


def lacking_files(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each mistake in the folders of this machine that blends are to come from."""
    fetcher, said = Fetcher(Path()), dict[str, list[str]]()
    for name, blend in recipe.fetched.items():
        if recipe.is_synthetic(blend):
            continue
        parts = blend.parts() if blend.is_composed else [blend]
        for part in [*parts, *blend.decontaminate]:
            source = part.source or recipe.source
            if not isinstance(source, FolderSource):
                continue
            try:
                if part is blend and _is_linked(name, blend, recipe, fetcher):
                    sets = [[Wanted(source, file) for file in blend.published_files(name).values()]]
                else:
                    sets = wanted_files(getattr(part, "name", name), part, recipe, fetcher)
                for item in [item for files in sets for item in files]:
                    if not fetcher.find(item).stat().st_size:
                        raise UserError(f"{source.path}/{item.file}: the file is empty; a blend is made of rows")
            except UserError as error:
                said.setdefault(str(error), []).append(name)
    yield from (f"{problem} (blends {', '.join(dict.fromkeys(names))})" for problem, names in said.items())


def _origin(sets: list[list[Wanted]], fetcher: Fetcher) -> dict[str, Any]:
    """Return the record of files without a target."""
    files = [item for files in sets for item in files]
    hashes = {item.file: fetcher.brought[item][1]["sha256"] for item in files}
    return fetcher.origin(files[0].source) | {"files": hashes}


def wanted_files(name: str, part: Files, recipe: Recipe, fetcher: Fetcher) -> list[list[Wanted]]:
    """Return the sets of files of a part of a blend: a set for each name or split."""
    source = part.source or recipe.source
    whole, where = source.whole(), name_of(source)
    names = fetcher.names(whole)
    patterns = part.file
    if patterns is None and not (source.subset or source.split) and f"{name}.jsonl" in names:
        patterns = f"{name}.jsonl"
    if patterns:
        listed = [patterns] if isinstance(patterns, str) else patterns
        sets = [FileSet(files_named(each, names, where)) for each in listed]
    else:
        listing = Listing(where, names, lambda file: _text_of(Wanted(whole, file), fetcher))
        sets = files_of_split(listing, source.subset, source.split)
    return [[Wanted(whole, file, reading=found.reading) for file in found.files] for found in sets]


def _text_of(item: Wanted, fetcher: Fetcher) -> str:
    """Return the text of a small file of a source."""
    return fetcher.bring([item])[0].path.read_text("utf-8", "replace")


def tables_named(path: Path) -> set[ExternalTable]:
    """Return the external tables named by a blend's placeholder rows; the fill reports unknown names."""
    found: set[ExternalTable] = set()
    for block in blocks_of(path):
        for line in block.read().split(b"\n"):
            row = row_or_error(line.rstrip(b"\r")) if PLACEHOLDER.encode() in line else None
            if isinstance(row, dict) and PLACEHOLDER in row and (table := TABLES.get(str(row.get("dataset")))):
                found.add(table)
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


def main(
    recipe: Annotated[Path, "recipe YAML with the blends to fetch"],
    output: Annotated[Path, "directory for the blends, tables/ and record.json"],
    workers: Annotated[int, "processes"] = default_workers(),
) -> None:
    """Fetch the source of a recipe."""
    fetch_source(load_recipe(recipe), output, max(1, workers))


if __name__ == "__main__":
    run_command_line(main)
