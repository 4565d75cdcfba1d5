"""Names of files and folders in records.

A record may come from another user, another machine or a bucket, and names become paths. So names are checked where the
record is read, and readers may join a name to a folder. `fault_of_file` then holds the file there against the folder.
"""

import fnmatch
import json
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

LONGEST_PART = 255
"""Bytes of a file's or folder's own name, on ext4, XFS, Lustre and most others."""
LONGEST_NAME = 1024
"""Bytes of a path below its folder."""
SHOWN = 80
"""Characters of a name that a message shows."""

SHA256 = re.compile(r"[0-9a-f]{64}")
XXH3 = re.compile(r"[0-9a-f]{32}")

PartName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.+=@,~-]*\Z",
        max_length=LONGEST_PART,
        description="One part of a path: the name of a stage, a blend, a training or an export.",
    ),
]

_UNPRINTED = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode's categories of control characters, lone surrogates, and separators of lines and paragraphs."""

_OF_A_MODEL = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*.md",
    "tokenizer*",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
)
"""What a model in Hugging Face's format consists of."""

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.npy", "*.npz")
"""What may run code as it is loaded."""

_OF_THE_STORE = (
    "owner.json",
    "identity.json",
    "record.json",
    "files.json",
    "remote.json",
    "source.json",
    "seen.json",
    "reach.json",
)
"""Files that Stagecoach writes next to others, and reads."""

_LOGS = ("identity.json", "config.yaml", "metrics.jsonl", "attempts.jsonl", "reach.json")
"""Files of a training's folder that its copy in a remote store has, next to checkpoints, exports and scores."""

_SCORES = re.compile(r"scores/[^/.][^/]*\.parquet")
_NOTE = re.compile(r"exports/[0-9a-f]{16}\.json")
_EXPORTED = re.compile(r"exports/[0-9a-f]{16}/(.+)")
_CHECKPOINT = re.compile(r"checkpoints/step_(0|[1-9]\d{0,8})/(.+)")


class NameFault(ValueError):
    """A record lists a file of no sound name; the text has the name and the fault."""


@dataclass(frozen=True)
class Folder:
    """The names that the list of a folder's files may hold.

    `fault` says why a sound name has no place in the folder, or returns None. Files of more than
    `unhashed_above` bytes may lack a hash; None: every file needs one.
    """

    fault: Callable[[str], str | None]
    unhashed_above: int | None = None


# --- one name ---


def fault_of_name(name: str) -> str | None:
    """Say why a name does not lead to a file below the folder; None for a sound name."""
    return _fault_of_text(name) or _fault_of_parts(name)


def _fault_of_text(name: str) -> str | None:
    """Say why a name's characters are not those of a file's name."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is no text of Unicode"
    if size > LONGEST_NAME:
        return f"has {size} bytes, more than {LONGEST_NAME}"
    if any(unicodedata.category(character) in _UNPRINTED for character in name):
        return "has a control character"
    if "\\" in name:
        return "has a backslash"
    return None


def _fault_of_parts(name: str) -> str | None:
    """Say why the parts of a name lead elsewhere than below the folder, or are too long."""
    parts = name.split("/")
    if name.startswith("/"):
        return "is an absolute path"
    if ".." in parts:
        return "leads out of its folder"
    if any(_folded(part) == "" for part in parts):
        return "has a part that is empty or of dots"
    longest = max(len(part.encode()) for part in parts)
    if longest > LONGEST_PART:
        return f"has a part of {longest} bytes, more than {LONGEST_PART}"
    return None


def _folded(name: str) -> str:
    """Return a name as file systems may compare names: without case, accents composed.

    Some also leave out the dots and spaces at an end, or characters that are not shown.
    """
    shown = "".join(character for character in name if unicodedata.category(character) != "Cf")
    composed = unicodedata.normalize("NFC", shown)
    without_case = unicodedata.normalize("NFC", composed.casefold())
    return "/".join(part.rstrip(" .") for part in without_case.split("/"))


# --- the names of a folder ---


def fault_in_export(name: str) -> str | None:
    """Say why a name is no name of a model's file."""
    folded = _folded(name)
    if folded in _OF_THE_STORE:
        return "is a file that Stagecoach writes, not a model's"
    if any(fnmatch.fnmatchcase(folded, pattern) for pattern in _PICKLED):
        return "is a pickle, where weights are safetensors"
    if name.startswith("."):
        return "is a hidden file"
    is_inner = "/" in name
    patterns = [pattern for pattern in _OF_A_MODEL if ("/" in pattern) == is_inner]
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return "is no file of a model: weights, config, tokenizer, template, code or text"
    return None


def fault_in_checkpoint(name: str) -> str | None:
    """Say why a name is no name of a checkpoint's file; trainers choose the names."""
    if _folded(name) in ("files.json", "remote.json"):
        return "is a file that Stagecoach writes, not a trainer's"
    return None


def fault_in_source(name: str) -> str | None:
    """Say why a name is no name of a downloaded source's file."""
    if _folded(name) == "record.json":
        return "is the record itself"
    return None


def of_training(step: int) -> Folder:
    """Return the names of a training's files in a remote store, at a step."""

    def fault(name: str) -> str | None:
        if name in _LOGS or _SCORES.fullmatch(name) or _NOTE.fullmatch(name):
            return None
        if exported := _EXPORTED.fullmatch(name):
            return fault_in_export(exported[1])
        checkpoint = _CHECKPOINT.fullmatch(name)
        if checkpoint is None:
            return "is no file of a training that a store keeps"
        if int(checkpoint[1]) != step:
            return f"is of another step than {step}"
        if checkpoint[2] == "files.json":
            return None
        return fault_in_checkpoint(checkpoint[2])

    return Folder(fault)


EXPORT = Folder(fault_in_export)
CHECKPOINT = Folder(fault_in_checkpoint, unhashed_above=1 << 20)
"""Of NeMo-RL's checkpoints, large files are recorded by size only."""
SOURCE = Folder(fault_in_source)


def check_listed(files: Mapping[str, Mapping[str, Any]], folder: Folder) -> None:
    """Check a list of files by name: `bytes`, `sha256` and perhaps `xxh3`.

    NameFault for a name of no file of the folder, a missing or malformed hash, and two names of the same file: where
    case does not count, or where the shorter name is a folder in the longer.
    """
    known: dict[str, str] = {}
    for name, file in files.items():
        fault = fault_of_name(name) or folder.fault(name) or _fault_of_hashes(file, folder)
        if fault:
            raise NameFault(f"the file {shown_name(name)} {fault}")
        folded = _folded(name)
        if folded in known:
            raise NameFault(f"{shown_name(known[folded])} and {shown_name(name)} are one file on some file systems")
        known[folded] = name
    for folded, name in known.items():
        parts = folded.split("/")
        parents = ("/".join(parts[:count]) for count in range(1, len(parts)))
        above = next((parent for parent in parents if parent in known), None)
        if above is not None:
            raise NameFault(f"{shown_name(known[above])} is a file, and the folder of {shown_name(name)}")


def _fault_of_hashes(file: Mapping[str, Any], folder: Folder) -> str | None:
    """Say why the hashes of a listed file are missing or malformed."""
    sha256, xxh3 = file["sha256"], file.get("xxh3")
    if sha256 is None:
        may_lack = folder.unhashed_above is not None and file["bytes"] > folder.unhashed_above
        return None if may_lack else "has no hash"
    if not SHA256.fullmatch(sha256):
        return "has no SHA-256 of 64 hexadecimal digits"
    if xxh3 is not None and not XXH3.fullmatch(xxh3):
        return "has no XXH3 of 32 hexadecimal digits"
    return None


def shown_name(name: str) -> str:
    """Return a name for a message: in quotes, without control characters, shortened."""
    quoted = json.dumps(name, ensure_ascii=True)
    if len(quoted) <= SHOWN:
        return quoted
    return f'{quoted[: SHOWN - 4]}..."'


# --- the file that a name leads to ---


def fault_of_file(folder: Path, name: str) -> str | None:
    """Say why there is no file of the folder under a sound name; None for a regular file, links followed."""
    path = folder / name
    try:
        state = path.stat()
    except OSError:
        return "is missing"
    if not stat.S_ISREG(state.st_mode):
        return "is no regular file"
    found, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([found, root]) != root:
        return f"is a link that leads out of {folder}, to {found}"
    return None
