"""Choose files of a data set as `datasets.load_dataset` chooses them: by glob, by the card, or by the names of files.

`datasets` itself reads the card's ``configs`` and finds the files, among empty ones with the names of the source's. So
no network is asked, and a folder and a repository are one case. A folder that ``save_to_disk`` wrote lists its files.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from fsspec.utils import glob_translate
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from scripts.data.hub import near
from scripts.data.published import FORMATS, Reading, format_of
from scripts.errors import UserError
from scripts.files import scratch_folder
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import FAST_LOADER, LARGEST, limited
from scripts.rows.bounds import bounded

CARD = "README.md"
SAVED_SPLITS, SAVED_FILES = "dataset_dict.json", "state.json"
"""The files of ``save_to_disk`` that name the splits, and the Arrow files of one."""
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
KEYWORDS = {word: split for split, words in WORDS.items() for word in words}
READ_FROM_THE_CARD = {"sep", "delimiter", "names", "column_names", "header", "field", "columns"}
"""The parameters of a card's config that change how files are read, and that are followed."""
OF_NO_EFFECT = {"data_files", "data_dir", "default", "name", "version", "description", "features"}
ALL = "**"
SECONDS_OF_A_FILE = 0.005
_SHARD = re.compile(r"(?P<split>[\w.-]+?)-(?P<part>\d{5})-of-(?P<parts>\d{5})(-\w+)?\.")


@dataclass(frozen=True)
class Listing:
    """The names of a source's files; `where` names the source in messages, and `read` returns a small file's text."""

    where: str
    names: Collection[str]
    read: Callable[[str], str]


@dataclass(frozen=True)
class FileSet:
    """Files whose rows follow each other, and how the card says that they are written."""

    files: list[str]
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True)
class _Config:
    """The patterns of files by split, relative to a folder of the source, and the card's parameters."""

    folder: str
    patterns: dict[str, list[str]]
    parameters: dict[str, Any] = field(default_factory=dict)
    is_stated: bool = False
    """Whether the card names the files, rather than their names the splits."""


def files_named(file: str, names: Collection[str], where: str) -> list[str]:
    """Return the files of `names` that a file name or glob means."""
    if "*" not in file:
        return [file]
    try:
        with bounded(f"{where}: {file}"):
            pattern = re.compile(glob_translate(file))
            found = sorted(name for name in names if pattern.fullmatch(name))
    except (re.error, ValueError) as error:
        raise UserError(f"{where}: {file}: no pattern of files ({error})") from None
    if not found:
        raise UserError(f"{where}: no file is like {file}; {near(file, sorted(names))}")
    return _whole(found, where)


def files_of_split(listing: Listing, subset: str | None, split: str | None) -> list[FileSet]:
    """Return the files of a split, or of several joined by a plus sign; UserError names the valid ones."""
    if subset is not None:
        _refuse_outside(subset, listing.where)
    saved = _saved_splits(listing, subset)
    if saved is not None:
        asked = _asked(saved, split, listing.where)
        return [FileSet(_whole(saved[name], listing.where)) for name in asked]
    configs = _configs(listing)
    names = _names_of_subset(listing, subset) if subset is not None and not configs else [*listing.names]
    allowed = 10 + int(len(names) * SECONDS_OF_A_FILE)
    try:
        with _empty_files(names) as root, bounded(f"{listing.where}: its data files", allowed):
            config = _chosen_config(listing, configs, subset, root)
            return [_files(listing, config, name, root) for name in _splits(listing, config, split, root)]
    except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
        raise UserError(
            f"{listing.where}: its data files cannot be found ({_brief(error)}); name them as file"
        ) from None


# --- the card ---


def _configs(listing: Listing) -> dict[str, dict[str, Any]]:
    """Return the parameters of the card's configs by name; none without a card, or of a card without them."""
    from datasets.utils.metadata import MetadataConfigs  # noqa: PLC0415 - takes a second, and few recipes need it

    if CARD not in listing.names:
        return {}
    try:
        head = REGEX_YAML_BLOCK.search(listing.read(CARD)[:LARGEST])
        text = head[2] if head else ""
        node = limited(text, loader := FAST_LOADER(text))
        stated = loader.construct_document(node) if node else None
        configs = MetadataConfigs.from_dataset_card_data(stated or {})
        return {str(name): parameters for name, parameters in configs.items()}
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"{listing.where}: the head of its {CARD} is no YAML, or names no files ({_brief(error)}); "
            "name the files as file"
        ) from None


def _chosen_config(listing: Listing, configs: dict[str, dict[str, Any]], subset: str | None, root: str) -> _Config:
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns  # noqa: PLC0415
    from datasets.utils.metadata import MetadataConfigs  # noqa: PLC0415

    folder, parameters = "", {}
    if configs:
        name = subset or MetadataConfigs(configs).get_default_config_name() or "default"
        if name not in configs:
            hint = nearest(name, configs)
            raise UserError(f"{listing.where}: has no subset {name}{hint}; set source.subset")
        parameters = configs[name]
        folder = parameters.get("data_dir") or ""
        _refuse_outside(folder, listing.where)
        if parameters.get("data_files") is not None:
            patterns = sanitize_patterns(parameters["data_files"])
            for pattern in [each for listed in patterns.values() for each in listed]:
                _refuse_outside(pattern, listing.where)
            return _Config(folder, patterns, parameters, is_stated=True)
    elif subset is not None and Path(root, subset).is_dir():
        folder = subset
    try:
        patterns = get_data_patterns(str(Path(root, folder)))
        return _Config(folder, {str(split): [*listed] for split, listed in patterns.items()}, parameters)
    except EmptyDatasetError:
        raise UserError(f"{listing.where}: has no file that ends in {', '.join(FORMATS)}") from None


def _refuse_outside(pattern: str, where: str) -> None:
    """Refuse a path or pattern of a card or recipe that names a file elsewhere, even before files are looked for."""
    path = PurePosixPath(pattern)
    is_address = "://" in pattern or "::" in pattern
    if is_address or path.is_absolute() or ".." in path.parts:
        raise UserError(f"{where}: {pattern[:100]} leads out of the folder, so nothing is read; name files in it")


def _reading(parameters: dict[str, Any], module: str, where: str) -> Reading:
    """Return how the card's parameters say that files are written; UserError for one that is not followed."""
    from datasets.load import _PACKAGED_DATASETS_MODULES, import_main_class  # noqa: PLC0415

    known = import_main_class(_PACKAGED_DATASETS_MODULES[module][0]).BUILDER_CONFIG_CLASS
    for name, value in parameters.items():
        changes_rows = name not in OF_NO_EFFECT and hasattr(known, name) and getattr(known, name) != value
        if changes_rows and name not in READ_FROM_THE_CARD:
            raise UserError(
                f"{where}: its {CARD} sets {name}: {value!r}, which is not followed here; name the files as file, or "
                "convert them"
            )
    if module != "csv":
        return Reading(columns=tuple(parameters.get("columns") or ()), field=parameters.get("field"))
    separator = parameters.get("sep") or parameters.get("delimiter")
    names = tuple(map(str, parameters.get("names") or parameters.get("column_names") or ()))
    header = parameters.get("header", "infer")
    if header not in (0, "infer") and not names:
        raise UserError(f"{where}: its {CARD} sets header: {header!r} without names of columns; add names")
    # as pandas infers it: without names the first line has them, and with names it is the first row
    has_header = header == 0 or not names
    return Reading(separator, names, has_header)


# --- the files ---


@contextmanager
def _empty_files(names: Collection[str]) -> Iterator[str]:
    """Make a folder of empty files with the names of those that hold rows; yield its path."""
    with scratch_folder() as folder:
        for name in names:
            is_inside = ".." not in PurePosixPath(name).parts and not name.startswith("/")
            if is_inside and format_of(name):
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        yield str(folder)


def _names_of_subset(listing: Listing, subset: str) -> list[str]:
    """Return the names of the files in a folder of a subset, at the top or, if there is none, anywhere."""
    at_the_top = [name for name in listing.names if name.startswith(f"{subset.strip('/')}/")]
    names = at_the_top or [name for name in listing.names if subset in PurePosixPath(name).parts[:-1]]
    if not names:
        folders = {part for name in listing.names for part in PurePosixPath(name).parts[:-1]}
        raise UserError(f"{listing.where}: has no folder {subset} of a subset{nearest(subset, folders)}")
    return names


def _splits(listing: Listing, config: _Config, split: str | None, root: str) -> list[str]:
    """Return the splits that are asked for, by their names in the config, which gets those that other names tell."""
    if not config.is_stated:
        for name in (split or "").split("+"):
            patterns = [] if name in config.patterns else _patterns_of(KEYWORDS.get(name, name), name)
            if patterns and KEYWORDS.get(name) not in config.patterns and _found(patterns, root, config.folder):
                config.patterns[name] = patterns
    return _asked(config.patterns, split, listing.where)


def _patterns_of(split: str, name: str) -> list[str]:
    """Return the patterns of a split which the first look at the names did not show: shards, or a file or folder."""
    from datasets.data_files import (  # noqa: PLC0415
        DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME,
        DEFAULT_PATTERNS_SPLIT_IN_FILENAME,
    )

    digits = "[0-9]" * 5
    named = (DEFAULT_PATTERNS_SPLIT_IN_FILENAME, DEFAULT_PATTERNS_SPLIT_IN_DIR_NAME)
    usual = [pattern for patterns in named for pattern in patterns.get(split, [])]
    return usual if has_magic(name) else [f"**/{name}-{digits}-of-{digits}*.*", *usual]


def _asked(splits: Collection[str], split: str | None, where: str) -> list[str]:
    """Return the names of the splits that are asked for; UserError names the valid ones."""
    if split is None:
        only = next(iter(splits)) if len(splits) == 1 else ""
        split = "train" if "train" in splits else only
    asked = [name if name in splits else KEYWORDS.get(name, name) for name in split.split("+")]
    for given, name in zip(split.split("+"), asked, strict=True):
        if name not in splits:
            raise UserError(f"{where}: has no split {given or 'train'}{nearest(given, splits)}; set source.split")
    return asked


def _files(listing: Listing, config: _Config, split: str, root: str) -> FileSet:
    """Return the files of a split in the format that most of them have, as `datasets` does."""
    from datasets.load import infer_module_for_data_files_list  # noqa: PLC0415

    patterns = config.patterns[split]
    try:
        found = _found(patterns, root, config.folder)
    except FileNotFoundError:
        found = []
    module = infer_module_for_data_files_list(found)[0] if found else None
    files = [file for file in found if FORMATS.get(format_of(file)) == module]
    if module is None:
        shown = ", ".join(patterns)[:100]
        raise UserError(f"{listing.where}: no file is like {shown}; {near(shown, sorted(listing.names))}")
    return FileSet(_whole(files, listing.where), _reading(config.parameters, module, listing.where))


def _found(patterns: list[str], root: str, folder: str) -> list[str]:
    """Return the files of patterns below a folder, each once though several fit it (`datasets` reads it again)."""
    from datasets.data_files import resolve_pattern  # noqa: PLC0415

    base = Path(root, folder)
    found: dict[str, None] = {}
    for pattern in patterns:
        given = f"{pattern}/{ALL}" if (base / pattern).is_dir() else pattern
        try:
            resolved = resolve_pattern(given, str(base), allowed_extensions=[*FORMATS])
        except FileNotFoundError:
            if not has_magic(given):
                raise
            resolved = []
        found.update(dict.fromkeys(str(Path(path).relative_to(root)) for path in resolved))
    return [*found]


# --- save_to_disk ---


def _saved_splits(listing: Listing, subset: str | None) -> dict[str, list[str]] | None:
    """Return the Arrow files by split of a folder that ``save_to_disk`` wrote, None for another folder."""
    folder = PurePosixPath(subset or "")
    splits, files = str(folder / SAVED_SPLITS), str(folder / SAVED_FILES)
    if splits in listing.names:
        names = [str(name) for name in _listed(listing, splits, "splits")]
        return {name: _saved_files(listing, folder / name) for name in names}
    if files in listing.names and str(folder / "dataset_info.json") in listing.names:
        split = json.loads(listing.read(files)).get("_split")
        return {str(split or "train"): _saved_files(listing, folder)}
    return None


def _saved_files(listing: Listing, folder: PurePosixPath) -> list[str]:
    state = str(folder / SAVED_FILES)
    if state not in listing.names:
        raise UserError(f"{listing.where}: {SAVED_SPLITS} names {folder}, but {state} is not there; save it again")
    files = [str(file["filename"]) for file in _listed(listing, state, "_data_files")]
    for file in files:
        _refuse_outside(file, f"{listing.where}: {state}")
    return [str(folder / file) for file in files]


def _listed(listing: Listing, name: str, key: str) -> list[Any]:
    """Return the list under a key of a small JSON file; UserError for another file."""
    try:
        found = json.loads(listing.read(name))[key]
        if not isinstance(found, list):
            raise TypeError(f"{key} is no list")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{listing.where}: {name} is not what save_to_disk writes ({_brief(error)})") from None
    return found


# --- messages ---


def _brief(error: Exception) -> str:
    """Return the first line of an error, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


def _whole(files: list[str], where: str) -> list[str]:
    """Return the files; UserError if names count more shards than there are."""
    there: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if shard := _SHARD.match(PurePosixPath(file).name):
            stem = str(PurePosixPath(file).with_name(shard["split"]))
            there.setdefault((stem, int(shard["parts"])), set()).add(int(shard["part"]))
    for (stem, parts), numbers in there.items():
        if missing := sorted({*range(parts)} - numbers):
            raise UserError(
                f"{where}: {len(missing)} of the {parts} parts of {stem} are missing, the first {missing[0]:05}"
            )
    return files
