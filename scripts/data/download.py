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
from scripts.recipe.blend import Benchmark, ImagesBlend, PublishedBlend
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


class FolderFiles:
    """The files of a folder of this machine."""

    revision = "folder"

    def __init__(self, source: FolderSource) -> None:
        self.path = Path(source.path)

    @property
    def folder(self) -> Path:
        """The folder; UserError where there is none."""
        if not self.path.is_dir():
            is_file = "a file; name its folder as path, and the file as file of the blend"
            missing = "no such folder, but named as the recipe's source; correct the path"
            raise UserError(f"{self.path}: {is_file if self.path.is_file() else missing}")
        return self.path

    @property
    def names(self) -> set[str]:
        """The names of the files."""
        return files_below(self.folder)

    def find(self, file: str) -> Path:
        """Return the path of a file; UserError for a missing one."""
        folder = self.folder
        path = file_inside(folder, file)
        if not path.is_file():
            hint = near(file, sorted(files_below(folder)))
            raise UserError(f"{path}: not there, but the recipe's source should have the file; {hint}")
        refuse_pointer(path)
        return path

    def bring(self, file: str, found: Path) -> tuple[Path, None]:
        """Return the path of a file that was found; its content is not known yet."""
        return found, None


class HubFiles:
    """The files of a repository of the hub; without the hub, those in the cache."""

    def __init__(self, source: HubSource) -> None:
        self.snapshot = open_snapshot(source.repository, source.revision)
        self.revision = self.snapshot.commit

    @property
    def names(self) -> set[str]:
        """The names of the files."""
        return {*self.snapshot.sizes}

    def find(self, file: str) -> None:
        """UserError for a file that the repository has not, before any is downloaded."""
        if file in self.snapshot.sizes:
            return
        why = f"the repository has no such file; {near(file, self.snapshot.sizes)}"
        if not self.snapshot.is_whole:
            why = (
                "the hub cannot be asked (HF_HUB_OFFLINE, or no connection), and the cache "
                f"{constants.HF_HUB_CACHE} does not have it; fetch on a machine that has the network"
            )
        raise UserError(f"{file} of {self.snapshot}: {why}")

    def bring(self, file: str, found: None) -> tuple[Path, dict[str, Any]]:
        """Download a file, and return its path and its record."""
        path, described = download(self.snapshot, file)
        refuse_pointer(path)
        return path, described


FILES_OF = {"folder": FolderFiles, "hub": HubFiles}
"""What reads the files of a source, by the source's kind."""


class Fetcher:
    """Put files of several sources below one folder; each revision of the hub is resolved once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.described: dict[str, dict[str, Any]] = {}
        """The record of each file below `directory`, by its path."""
        self.brought: dict[Wanted, tuple[Path, dict[str, Any]]] = {}
        """The path and the record of each file without a target."""
        self.files_of = cache(lambda source: FILES_OF[source.kind](source))

    def fetch(self, wanted: list[Wanted]) -> None:
        """Fetch all files, four at once; no file is downloaded if one is missing."""
        self.map(self._place, [(item, self.find(item)) for item in wanted])

    def names(self, source: HubSource | FolderSource) -> set[str]:
        """Return the names of a source's files; without the hub, of the files in the cache."""
        return self.files_of(source).names

    def bring(self, wanted: list[Wanted]) -> list[PublishedFile]:
        """Fetch files that are read where they lie."""
        self.fetch([item for item in wanted if item not in self.brought])
        return [
            PublishedFile(self.brought[item][0], str(Path(item.source.shown, item.file)), item.reading)
            for item in wanted
        ]

    def origin(self, source: HubSource | FolderSource) -> dict[str, str]:
        """Return the record of a fetched source: its name and revision."""
        return {"source": source.shown, "revision": self.files_of(source).revision}

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return the results of the work on each item, in order, from a few threads; nothing begins after a failure."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(work, items))

    def find(self, item: Wanted) -> Path | None:
        """Return the path of a folder's file, None for the hub's; UserError for a missing file."""
        return self.files_of(item.source).find(item.file)

    def _place(self, found: tuple[Wanted, Path | None]) -> None:
        item, there = found
        path, described = self.files_of(item.source).bring(item.file, there)
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
    synthetic, own = recipe.synthesized, recipe.published
    record: dict[str, Any] = {"blends": {}, "tables": {}, "files": {}}
    with replace_directory(directory) as fresh:
        if synthetic:
            if synthesize is None:
                raise UserError(f"blends.{next(iter(synthetic))}: synthetic; python -m demo.synthesize writes it")
            record = synthesize(recipe.model_copy(update={"blends": synthetic}), fresh)
        (fresh / "tables").mkdir(exist_ok=True)
        fetcher = Fetcher(fresh)
        linked = {name for name, blend in own.items() if _is_linked(name, blend, recipe, fetcher)}
        fetcher.fetch([item for name in linked for item in _wanted_as_published(name, own[name], recipe)])
        for name, blend in own.items():
            record["blends"][name] = MADE_BY[type(blend)](name, blend, recipe, fetcher, workers, name in linked)
        rows = [path for name in own if (path := fresh / f"{name}.jsonl").is_file()]
        named: set[ExternalTable] = set().union(*fetcher.map(tables_named, rows))
        if named and synthetic:
            raise UserError(
                "published and synthetic blends both have placeholder rows, with different tables; remove either"
            )
        folders = [folder for blend in own.values() for folder in blend.own_folders(recipe.source)]
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


def _is_linked(name: str, blend: PublishedBlend | ImagesBlend, recipe: Recipe, fetcher: Fetcher) -> bool:
    """Whether a blend is a file of its source as it is."""
    source = blend.source or recipe.source
    sharing = [each for each in recipe.published.values() if (each.source or recipe.source) == source]
    return blend.is_linked(name, len(sharing) > 1, lambda: fetcher.names(source))


def _wanted_as_published(name: str, blend: PublishedBlend | ImagesBlend, recipe: Recipe) -> list[Wanted]:
    """Return the files that a blend takes from its source as they are."""
    source = blend.source or recipe.source
    return [Wanted(source, file, target) for target, file in blend.published_files(name).items()]


def _rows_made(
    name: str, blend: PublishedBlend, recipe: Recipe, fetcher: Fetcher, workers: int, is_linked: bool
) -> dict[str, Any]:
    """Compose a blend, or leave its linked file of ready rows; return the record, with the keys that nothing reads."""
    linked = fetcher.directory / f"{name}.jsonl"
    source = blend.source or recipe.source
    found = unread_if_ready(linked, blend, workers) if is_linked else None
    if found is None:
        made, unread = compose(name, blend, recipe, fetcher, workers)
    else:
        shown = str(Path(source.shown, blend.published_files(name)[linked.name]))
        made = fetcher.origin(source) | {"file": shown}
        unread = {shown: found} if found else {}
    for line in told_of(unread):
        warn(line)
    recorded = {shown: keys.record() for shown, keys in unread.items()}
    return made | ({"unread": recorded} if recorded else {})


def _images_made(
    name: str, blend: ImagesBlend, recipe: Recipe, fetcher: Fetcher, workers: int, is_linked: bool
) -> dict[str, Any]:
    """Return the record of a blend of images, which stays as it was fetched."""
    return fetcher.origin(blend.source or recipe.source)


MADE_BY: dict[type, Callable[..., dict[str, Any]]] = {PublishedBlend: _rows_made, ImagesBlend: _images_made}
"""What makes the rows of a fetched blend, or leaves them as they are, and returns their record."""


def compose(
    name: str, blend: PublishedBlend, recipe: Recipe, fetcher: Fetcher, workers: int
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
    for name, blend in recipe.published.items():
        for part in blend.inputs():
            if not (part.source or recipe.source).own_folders:
                continue
            try:
                if _is_linked(name, blend, recipe, fetcher):
                    wanted = _wanted_as_published(name, blend, recipe)
                else:
                    sets = wanted_files(getattr(part, "name", name), part, recipe, fetcher)
                    wanted = [item for files in sets for item in files]
                for item in wanted:
                    if not fetcher.find(item).stat().st_size:
                        raise UserError(f"{item.source.path}/{item.file}: the file is empty; a blend is made of rows")
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
    whole, where = source.whole(), source.shown
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
