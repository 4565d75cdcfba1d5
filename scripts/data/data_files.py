"""Choose files of a data set: by glob, or by subset and split of the data set's card or of file names.

The rules are the hub's: ``configs`` and ``data_files`` of the card, or else names such as
``data/train-00000-of-00002.parquet``, ``test.csv`` or ``validation/0.jsonl``.
"""

import re
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

import yaml
from fsspec.utils import glob_translate
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from scripts.data.hub import near
from scripts.data.published import FORMATS, format_of
from scripts.errors import UserError
from scripts.recipe.strict import nearest
from scripts.recipe.yaml_file import FAST_LOADER, LARGEST, limited
from scripts.rows.bounds import bounded

CARD = "README.md"
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
KEYWORDS = {word: split for split, words in WORDS.items() for word in words}
_SHARD = re.compile(r"(?P<split>[\w.-]+?)-(?P<part>\d{5})-of-(?P<parts>\d{5})(-\w+)?\.")
_SEPARATORS = re.compile(r"[-._ 0-9]+")


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


def files_of_split(
    names: Collection[str], card: str, subset: str | None, split: str | None, where: str
) -> list[list[str]]:
    """Return the files of a split, or of several joined by a plus sign; UserError names the valid ones."""
    try:
        splits = _splits_of(names, card, subset, where)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: the head of its {CARD} is no YAML, or names no files ({error}); say file") from None
    if split is None:
        split = "train" if "train" in splits else next(iter(splits)) if len(splits) == 1 else ""
    found = []
    for name in split.split("+"):
        if not (files := splits.get(name) or splits.get(KEYWORDS.get(name, ""))):
            raise UserError(f"{where}: has no split {name or 'train'}{nearest(name, splits)}; set source.split")
        found.append(_whole(files, where))
    return found


def _splits_of(names: Collection[str], card: str, subset: str | None, where: str) -> dict[str, list[str]]:
    head = head[2] if (head := REGEX_YAML_BLOCK.search(card[:LARGEST])) else ""
    node = limited(head, loader := FAST_LOADER(head))
    stated = (node and loader.construct_document(node).get("configs")) or []
    configs = {str(config.get("config_name", "default")): config for config in stated if isinstance(config, dict)}
    if configs:
        default = [name for name, config in configs.items() if config.get("default") or name == "default"]
        chosen = subset or next(iter(default or (configs if len(configs) == 1 else ())), "")
        if chosen not in configs:
            hint = nearest(chosen, configs)
            raise UserError(f"{where}: has no subset {chosen or 'default'}{hint}; set source.subset")
        config = configs[chosen]
        folder = config.get("data_dir")
        if (patterns := config.get("data_files")) is not None:
            return _by_patterns(patterns, folder, names, where)
        names = [name for name in names if not folder or name.startswith(f"{folder.strip('/')}/")]
    elif subset is not None:
        folders = {str(part) for name in names for part in PurePosixPath(name).parts[:-1]}
        names = [name for name in names if subset in PurePosixPath(name).parts[:-1]]
        if not names:
            raise UserError(f"{where}: has no folder {subset} of a subset{nearest(subset, folders)}")
    formats = {format_of(name) for name in names}
    chosen_format = next((suffix for suffix in FORMATS if suffix in formats), None)
    splits: dict[str, list[str]] = {}
    for name in sorted(names):
        if format_of(name) == chosen_format and name != "dataset_infos.json":
            splits.setdefault(_split_of(name), []).append(name)
    if chosen_format is None or not splits:
        raise UserError(f"{where}: has no file that ends in {', '.join(FORMATS)}")
    return splits


def _by_patterns(patterns: Any, folder: str | None, names: Collection[str], where: str) -> dict[str, list[str]]:
    """Resolve a card's ``data_files``: one or several patterns, by split or for train."""
    entries = patterns if isinstance(patterns, list) else [patterns]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        named = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        path = named.get("path", [])
        for pattern in [path] if isinstance(path, str) else path:
            wanted = str(PurePosixPath(folder or ".", pattern))
            if any(name.startswith(f"{wanted}/") for name in names):
                wanted += "/**"
            splits.setdefault(str(named.get("split", "train")), []).extend(files_named(wanted, names, where))
    return splits


def _split_of(name: str) -> str:
    path = PurePosixPath(name)
    if shard := _SHARD.match(path.name):
        return shard["split"]
    for part in reversed(path.parts):
        if split := next((KEYWORDS[word] for word in _SEPARATORS.split(part.lower()) if word in KEYWORDS), None):
            return split
    return "train"


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
