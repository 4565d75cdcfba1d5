"""Rows in folders of the user's own, by content: what a blend would be made of now, and what it was made of.

Both are told in one form, the hashes of files by name for each part of a blend, so that they can be compared. Parts of
the hub are left out: their revision speaks for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.contents import Contents
from scripts.data.source_record import files_below
from scripts.errors import UserError
from scripts.files import canonical_json, sha256_text
from scripts.recipe.blend import Benchmark, ImagesBlend, PublishedBlend
from scripts.recipe.recipe import Recipe
from scripts.recipe.source import Files
from scripts.records import SourceRecord

NAMING = ("README.md", "dataset_dict.json", "dataset_info.json", "state.json")
"""Files that say which files of a folder are a data set's."""
TABLES = "tables"
DIGITS = 16
Hashes = dict[str, str]


@dataclass
class OwnRows:
    """Hashes of what blends are made of: by blend with rows in folders, and of the tables of placeholder rows.

    `unknown` says by blend why its files cannot be read; such blends have no hash.
    """

    blends: Hashes = field(default_factory=dict)
    tables: str | None = None
    unknown: Hashes = field(default_factory=dict)


def own_rows(recipe: Recipe, contents: Contents, record: SourceRecord | None) -> OwnRows:
    """Return what the blends would be made of if they were fetched now.

    Tables count that the `record` of the source names, since only rows tell which are needed.
    """
    found = OwnRows()
    for name, blend in _own_blends(recipe):
        try:
            found.blends[name] = _digest(_parts_now(recipe, name, blend, contents))
        except UserError as error:
            found.unknown[name] = str(error)
    places = _tables_of(recipe, record)
    if places:
        try:
            hashes = contents.of_all(map(str, places.values()))
        except UserError:  # what was made of a table stays; the fetch says what it lacks
            return found
        found.tables = _digest({target: hashes[str(path)] for target, path in places.items()})
    return found


def fetched_rows(recipe: Recipe, record: SourceRecord | None) -> OwnRows:
    """Return what the blends were made of when they were fetched, as far as the source's record says."""
    found = OwnRows()
    if record is None:
        return found
    for name, blend in _own_blends(recipe):
        parts = _parts_then(recipe, name, blend, record)
        if parts is not None:
            found.blends[name] = _digest(parts)
    targets = _tables_of(recipe, record)
    if targets:
        found.tables = _digest({target: record["files"][target]["sha256"] for target in targets})
    return found


def gone_rows(recipe: Recipe, contents: Contents) -> list[str]:
    """Return a line for each file or folder of rows that is not there, with the blends that were made of it."""
    blends: dict[str, list[str]] = {}
    for name, why in own_rows(recipe, contents, None).unknown.items():
        blends.setdefault(why, []).append(name)
    return [
        f"{why}. What was made of it stays until then ({'blend' if len(names) == 1 else 'blends'} {', '.join(names)})"
        for why, names in blends.items()
    ]


def has_own_rows(recipe: Recipe) -> bool:
    """Whether any blend has rows in a folder of the user's own."""
    return any(True for _ in _own_blends(recipe))


def _own_blends(recipe: Recipe) -> Iterator[tuple[str, PublishedBlend | ImagesBlend]]:
    """Yield the published blends with a part or a benchmark in a folder of the user's own."""
    for name, blend in recipe.published.items():
        if any(_folder_of(part, recipe) is not None for part in blend.inputs()):
            yield name, blend


def _folder_of(part: Files, recipe: Recipe) -> Path | None:
    """Return the folder that a part's rows are in; None for those of the hub."""
    folders = (part.source or recipe.source).own_folders
    return folders[0] if folders else None


def _parts_now(
    recipe: Recipe, name: str, blend: PublishedBlend | ImagesBlend, contents: Contents
) -> list[Hashes | None]:
    """Return the hashes of the files of each part and benchmark of a blend, by the file's name in its folder."""
    found: list[Hashes | None] = []
    for part in blend.inputs():
        folder = _folder_of(part, recipe)
        if folder is None:
            found.append(None)
            continue
        files = _files_of(recipe, getattr(part, "name", name), folder, part, contents)
        found.append(_hashes(folder, files, contents))
    return found


def _hashes(folder: Path, files: list[str], contents: Contents) -> Hashes:
    """Return the hashes of files of a folder, by their names there."""
    places = {file: f"{folder}/{file}" for file in files}
    hashes = contents.of_all(places.values())
    return {file: hashes[place] for file, place in places.items()}


def _files_of(recipe: Recipe, name: str, folder: Path, part: Files, contents: Contents) -> list[str]:
    """Return the files of a part, as the fetch would choose them."""
    named = [part.file] if isinstance(part.file, str) else part.file or []
    if named and not any("*" in file for file in named):
        return named
    source = part.source or recipe.source
    if not folder.is_dir():
        raise UserError(f"{folder}: not there; put the folder back, or name another in the recipe")
    names = files_below(folder)
    if not named and f"{name}.jsonl" in names and not (source.subset or source.split):
        return [f"{name}.jsonl"]
    saying = [] if named else [file for file in sorted(names) if file.rpartition("/")[2] in NAMING]
    by = [sorted(names), _hashes(folder, saying, contents)]
    asked = [name, source.model_dump(mode="json"), part.file]
    return contents.choose(canonical_json(asked), _digest(by), lambda: _files_wanted(name, part, recipe))


def _files_wanted(name: str, part: Files, recipe: Recipe) -> list[str]:
    """Return the files of a part by the code that fetches them, which takes a second to import."""
    from scripts.data.download import Fetcher, wanted_files  # noqa: PLC0415 - the hub's client, and `datasets`

    sets = wanted_files(name, part, recipe, Fetcher(Path()))
    return [wanted.file for files in sets for wanted in files]


def _parts_then(
    recipe: Recipe, name: str, blend: PublishedBlend | ImagesBlend, record: SourceRecord
) -> list[Hashes | None] | None:
    """Return what the record says of a blend in the form of `_parts_now`; None where it says nothing."""
    origin = record["blends"].get(name)
    if origin is None:
        return None
    composed = origin.get("composed")
    if composed is None:
        published, described = blend.published_files(name), record["files"]
        if not published or not published.keys() <= described.keys():
            return None
        return [{file: described[target]["sha256"] for target, file in published.items()}]
    parts, benchmarks = blend.inputs(), composed.get("decontaminated", {})
    names = [part.name for part in parts if isinstance(part, Benchmark)]
    described = [*composed.get("sources", []), *(benchmarks.get(each, {}) for each in names)]
    if len(described) != len(parts) or not all("files" in each for each in described):
        return None
    return [each["files"] if _folder_of(part, recipe) else None for part, each in zip(parts, described, strict=True)]


def _tables_of(recipe: Recipe, record: SourceRecord | None) -> dict[str, Path]:
    """Return the user's own tables that the source's record names, by their path below the source."""
    targets = [path for path in (record or {}).get("files", {}) if path.startswith(f"{TABLES}/")]
    if not targets:
        return {}
    folders = [folder for blend in recipe.published.values() for folder in blend.own_folders(recipe.source)]
    found = {}
    for target in targets:
        place = next((folder / target for folder in folders if (folder / target).exists()), None)
        if place is not None:
            found[target] = place
    return found


def _digest(value: Any) -> str:
    return sha256_text(canonical_json(value))[:DIGITS]
