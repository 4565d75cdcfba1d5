"""The hub's cache on this machine, laid out as huggingface_hub lays it out.

``blobs/<etag>`` are the contents, ``snapshots/<commit>/<file>`` links to them, ``refs/<branch>`` the commit that a
branch last meant. An ETag is the SHA-256 of the content, or git's SHA-1 of a small file, so what lies there can be
verified without the hub.

huggingface_hub's locks are left alone: on Lustre, GPFS and some NFS every caller gets them (its PR 4228), and where the
disk has no flock a killed download holds them for ever. What came of a content so far lies under a name that says which
process brings it, so two processes never write to one file, and a dead one's is taken over by a rename.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants
from huggingface_hub.file_download import REGEX_COMMIT_HASH, REGEX_SHA256
from huggingface_hub.utils.sha import git_hash

from scripts.errors import UserError
from scripts.files import filled_by_program, link_or_copy, write_text
from scripts.processes import is_marked_running, process_mark

Kind = Literal["dataset", "model"]
SILENCE_SECONDS = 1800.0  # after which another host's download is dead; it never waits as long between two bytes


@dataclass(frozen=True)
class Snapshot:
    """A repository of data sets or of a model at one commit.

    `asked` is the id it was asked for by, `repository` the one that the hub gives it. `names` are its files; None where
    the cache alone was asked.
    """

    asked: str
    repository: str
    revision: str
    commit: str
    names: tuple[str, ...] | None
    kind: Kind = "dataset"

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return _folder(self.repository, self.kind)

    def pointer(self, file: str) -> Path:
        """Where the cache has a file of this commit."""
        return self.folder / "snapshots" / self.commit / file

    def remember(self) -> None:
        """Note for offline use which commit the revision is, and which id the asked one now goes by.

        Left out where it fails: the cache may be read-only, without links, or have an older folder of the asked id.
        """
        if self.names is None:
            return
        reference = self.folder / "refs" / self.revision
        with suppress(UserError, OSError):
            if self.revision != self.commit:
                write_text(reference, self.commit)
        with suppress(OSError):
            if self.asked != self.repository:
                _folder(self.asked, self.kind).symlink_to(self.folder.name)

    def __str__(self) -> str:
        at = self.commit[:12] if self.revision == self.commit else f"{self.revision} ({self.commit[:12]})"
        return f"{self.repository} at {at}"


@dataclass(frozen=True)
class HubFile:
    """A file of a snapshot: its ETag, which is a hash of its content, and its size."""

    snapshot: Snapshot
    name: str
    etag: str
    size: int

    @property
    def pointer(self) -> Path:
        """Where the cache has the file."""
        return self.snapshot.pointer(self.name)

    @property
    def blob(self) -> Path:
        """Where the cache has the content."""
        return self.snapshot.folder / "blobs" / self.etag

    @property
    def part(self) -> Path:
        """What this process has brought of the content so far."""
        return self.blob.with_name(f"{self.etag}.{process_mark()}.incomplete")

    @property
    def came(self) -> int:
        """How much of it this process has brought."""
        return self.part.stat().st_size if self.part.exists() else 0

    @property
    def parts(self) -> dict[Path, int]:
        """What any process has brought of it, with its bytes, the most first."""
        sizes = {}
        for path in self.blob.parent.glob(f"{escape(self.etag)}.*.*.*.*.incomplete"):
            with suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
        return dict(sorted(sizes.items(), key=lambda part: (-part[1], part[0])))

    @property
    def bytes_here(self) -> int:
        """How much of the content has come, whoever brought it."""
        if self.pointer.exists() or self.blob.exists():
            return self.size
        return max(self.parts.values(), default=0)

    def claim(self) -> Path | None:
        """Become the process that brings the content; the part of a living one that is further, where there is one.

        What a dead process brought becomes this one's, to go on from.
        """
        while True:
            self.part.touch()
            try:
                for path in self.parts:
                    if path == self.part:
                        return None
                    if _is_alive(path):
                        return path
                    if os.access(path, os.W_OK):
                        path.replace(self.part)
                        return None
            except FileNotFoundError:  # another process took it
                continue

    def forget_parts(self) -> None:
        """Remove what this process and dead ones brought of a content that is there."""
        for path in self.parts:
            with suppress(FileNotFoundError, PermissionError):
                if path == self.part or not _is_alive(path):
                    path.unlink()

    def publish(self) -> None:
        """Let the snapshot have its file, whose content is there."""
        with filled_by_program(self.pointer) as fresh:
            try:
                fresh.symlink_to(os.path.relpath(self.blob, self.pointer.parent))
            except OSError:
                link_or_copy(self.blob, fresh)

    def is_intact(self, described: dict[str, Any]) -> bool:
        """Whether the file in the cache, as scripts.data.source_record.describe_file sees it, is the hub's."""
        if REGEX_SHA256.fullmatch(self.etag):
            return described["sha256"] == self.etag
        if REGEX_COMMIT_HASH.fullmatch(self.etag):
            return git_hash(self.pointer.read_bytes()) == self.etag
        return described["bytes"] == self.size

    def remove(self) -> Path:
        """Take the file and its content out of the cache; the path that the content had."""
        path = self.pointer.resolve()
        self.pointer.unlink()
        path.unlink(missing_ok=True)
        return path

    def __str__(self) -> str:
        return f"{self.snapshot.repository}/{self.name}"


def _is_alive(part: Path) -> bool:
    """Whether the process that a part names still brings it: known on its host, elsewhere told by its last write."""
    running = is_marked_running(part.name.partition(".")[2].removesuffix(".incomplete"))
    return time.time() - part.stat().st_mtime < SILENCE_SECONDS if running is None else running


def cached_snapshot(repository: str, revision: str, files: list[str], kind: Kind = "dataset") -> Snapshot | None:
    """The commit that a revision last meant, when the cache has these files of it."""
    folder = _folder(repository, kind)
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if not is_commit(revision) and reference.is_file() else revision
    if not is_commit(commit):
        return None
    served = folder.resolve().name.removeprefix(f"{kind}s--").replace(constants.REPO_ID_SEPARATOR, "/")
    snapshot = Snapshot(repository, served, revision, commit, names=None, kind=kind)
    return snapshot if all(snapshot.pointer(file).exists() for file in files) else None


def is_commit(revision: str) -> bool:
    """Whether a revision is a whole commit hash, which never means another commit."""
    return REGEX_COMMIT_HASH.fullmatch(revision) is not None


def _folder(repository: str, kind: Kind) -> Path:
    return Path(constants.HF_HUB_CACHE, constants.REPO_ID_SEPARATOR.join([f"{kind}s", *repository.split("/")]))
