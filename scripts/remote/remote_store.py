"""A remote store of trainings, on any file system that fsspec reaches: files by hash, and a manifest for each training.

::

    <remote>/stagecoach-store.json              the marker, by which an empty store differs from an unmounted share
    <remote>/objects/<ab>/<sha256>              the bytes of a file, once for all trainings that share it
    <remote>/trainings/<identity>.<step>.json   the manifest of a training at a step, written last

An object is only believed by its hash, a manifest by its form and, where the project has a key, by its signature.
"""

import hashlib
import hmac
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

import msgspec

from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file
from scripts.names import PartName, check_listed, of_training
from scripts.recipe.config import Store
from scripts.records import DAMAGE, Count, Files
from scripts.remote import limits

if TYPE_CHECKING:
    from scripts.remote.bounded import Bounded

KEY = "STAGECOACH_STORE_KEY"
"""The environment variable with the project's key, by which manifests are signed and held against their signature."""
MANIFEST = re.compile(r"([0-9a-f]{16})\.(\d{1,9})\.json")
PREFIX = re.compile(r"[0-9a-f]{2}")
MARKER = "stagecoach-store.json"
LONGEST_MARKER = 4096
BLOCK = 32 << 20
SECONDS = 20.0
"""A listing is asked for again after so long."""
PARTS, PART = 5, 16 << 20
"""Parts of a file under way at once on S3, and their size; all lie in memory."""
FETCHED_AT_ONCE = 4
MAX_PARTS = 10_000
"""Of an upload to S3: docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
_S3 = {
    "connect_timeout": 5,
    "retries": {"max_attempts": 3},
    "response_checksum_validation": "when_required",
    "s3": {"payload_signing_enabled": False},
    "connector_args": {"socket_factory": limits.counted_socket},
}
OPTIONS = {"s3": {"max_concurrency": PARTS, "default_block_size": PART, "config_kwargs": _S3}}
"""Options of a protocol: a store out of reach is given up in seconds. Every file is held against its hash, so neither a
signature of its bytes nor the checksum of an answer is needed; some S3 servers answer with a wrong one for a part."""


class Marker(TypedDict):
    """Marks the root of a store; `layout` is the version of the folders."""

    stagecoach_store: str
    layout: int


MARKED = Marker(stagecoach_store="trainings of Stagecoach: objects/ and trainings/", layout=1)
Signature = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Manifest(TypedDict):
    """The files of a training's folder at a step; `weights` says whether the checkpoint's own are among them.

    With `is_passing` the step is kept until a later one is there.
    """

    identity: PartName
    step: Count
    stage: PartName
    files: Files
    weights: bool
    is_passing: NotRequired[bool]
    signature: NotRequired[Signature]


@dataclass
class RemoteStore:
    """A remote store by its URL; a listing is kept for moments. `pace` limits a push, in bytes a second."""

    url: str
    pace: float | None = None
    _listed: dict[str, list[int]] = field(default_factory=dict)
    _since: float = -SECONDS

    @classmethod
    def of(cls, store: Store | None) -> "RemoteStore | None":
        """Return the store that a config names, if any."""
        return cls(store.remote, store.mb_per_second and 1e6 * store.mb_per_second) if store else None

    @classmethod
    def to_pull_from(cls, store: Store | None) -> "RemoteStore | None":
        """Return the store that trainings may be taken from, if any."""
        return cls.of(store) if store and store.pull else None

    @cached_property
    def _files(self) -> "Bounded":
        """The file system, with limits."""
        # fsspec is a tenth of what plan takes where no store is named.
        from scripts.remote.bounded import Bounded  # noqa: PLC0415

        options = OPTIONS.get(self.url.partition(":")[0], {})
        return Bounded(self.url, options, self.pace)

    def _path(self, name: str) -> str:
        return f"{self._files.root}/{name}"

    def steps(self) -> dict[str, list[int]]:
        """Return the steps of every training in the store, by identity, from one listing.

        UserError where the place cannot be asked, or holds neither a training nor the marker of a store: an unmounted
        share or a misspelt bucket is not an empty store.
        """
        if time.monotonic() - self._since <= SECONDS:
            return self._listed
        found: dict[str, list[int]] = {}
        for name in self._files.names(self._path("trainings")):
            if match := MANIFEST.fullmatch(name):
                found.setdefault(match[1], []).append(int(match[2]))
        if not found and not self._is_store():
            raise self._no_store()
        self._listed = {identity: sorted(steps) for identity, steps in found.items()}
        self._since = time.monotonic()
        return self._listed

    def _is_store(self) -> bool:
        """Whether the place has the marker of a store, or objects, as a store of an earlier release."""
        if self._has_marker():
            return True
        names = self._files.names(self._path("objects"))
        return any(PREFIX.fullmatch(name) for name in names)

    def _has_marker(self) -> bool:
        """Whether the marker is there; UserError for anything else under its name."""
        try:
            content = self._files.read(self._path(MARKER), LONGEST_MARKER)
        except FileNotFoundError:
            return False
        try:
            marker = msgspec.json.decode(content, type=Marker)
        except msgspec.MsgspecError:
            begin = content[:40].decode(errors="replace")
            raise UserError(
                f"{self._files.where}: the marker of the store, {MARKER}, reads {begin!r}; another service answers "
                "there, or the file is damaged: check the address"
            ) from None
        if marker["layout"] > MARKED["layout"]:
            raise UserError(f"{self._files.where}: is a store of a later release of Stagecoach, which reads it")
        return True

    def _no_store(self) -> UserError:
        return UserError(
            f"{self._files.where}: no store is there, neither its marker ({MARKER}) nor a training; check the address, "
            "and whether the share is mounted. Only for a new store: stagecoach store init"
        )

    def begin(self) -> bool:
        """Make the store unless the marker is there; return whether the store is new.

        UserError unless the marker reads as written.
        """
        if self._has_marker():
            return False
        self._files.make_folder(self._files.root)
        try:
            self._files.write(self._path(MARKER), msgspec.json.encode(MARKED))
            is_there = self._has_marker()
        except FileNotFoundError as error:
            raise UserError(f"{self._files.where}: cannot be written to ({error}); is the bucket right?") from None
        if not is_there:
            raise UserError(f"{self._files.where}: the marker was written and is not there; check the address")
        return True

    def _begin_to_push(self) -> None:
        """Check the place of a push, and write the marker into a bucket or a store of an earlier release.

        UserError for an empty folder, perhaps the mount point of a share that is away.
        """
        if self._has_marker():
            return
        if not self._files.is_object_store and not self._listed_or_objects():
            raise self._no_store()
        self.begin()

    def _listed_or_objects(self) -> bool:
        """Whether a place without a marker has trainings or objects."""
        names = self._files.names(self._path("trainings"))
        return any(MANIFEST.fullmatch(name) for name in names) or self._is_store()

    def manifest(self, identity: str, step: int) -> Manifest:
        """Return the manifest of a training; UserError for one that is damaged, of another training, or not signed."""
        path = self._path(f"trainings/{identity}.{step}.json")
        try:
            text = self._files.read(path, limits.LIMITS.manifest)
        except FileNotFoundError:
            if not self._is_store():
                raise self._no_store() from None
            raise UserError(f"{self._files.where}: has no step {step} of training {identity}") from None
        try:
            manifest = msgspec.json.decode(text, type=Manifest)
            check_listed(manifest["files"], of_training(step))
        except DAMAGE as error:
            # Another service answers every question with the same page.
            self._has_marker()
            remedy = f"remove the manifest: stagecoach store prune {identity}"
            raise UserError(f"{path}: damaged ({error}); {remedy}") from None
        if (manifest["identity"], manifest["step"]) != (identity, step):
            raise UserError(f"{path}: is the manifest of training {manifest['identity']}; remove the manifest")
        key = os.environ.get(KEY)
        if key and not hmac.compare_digest(manifest.get("signature", ""), _sign(manifest, key)):
            raise UserError(f"{path}: not signed with the key in {KEY}, so nothing is taken from it")
        return manifest

    def manifests(self) -> Iterator[Manifest | UserError]:
        """Yield every manifest, by identity and step, or what is wrong with one."""

        def read(name: tuple[str, int]) -> Manifest | UserError:
            try:
                return self.manifest(*name)
            except UserError as error:
                return error

        names = [(identity, step) for identity, steps in self.steps().items() for step in steps]
        with ThreadPoolExecutor(self._files.at_once) as pool:
            yield from pool.map(read, names)

    def objects(self) -> dict[str, int]:
        """Return the bytes of every object, by hash, from a listing for each prefix."""
        folder = self._path("objects")
        prefixes = [name for name in self._files.names(folder) if PREFIX.fullmatch(name)]
        found: dict[str, int] = {}
        with ThreadPoolExecutor(self._files.at_once) as pool:
            for entries in pool.map(self._files.entries, [f"{folder}/{prefix}" for prefix in prefixes]):
                found |= {PurePosixPath(each["name"]).name: each["size"] for each in entries}
        return found

    def hashed(self, digest: str) -> str:
        """Return the hash of an object's bytes, read from the store."""
        path = _object(self._files.root, digest)
        size = self._files.size(path)
        content = hashlib.sha256()
        for start in range(0, size, BLOCK):
            content.update(self._files.read_block(path, start, min(size, start + BLOCK)))
        return content.hexdigest()

    def remove(self, trainings: Iterable[tuple[str, int]], objects: Iterable[str]) -> None:
        """Remove manifests, and then objects."""
        for identity, step in trainings:
            self._files.remove(self._path(f"trainings/{identity}.{step}.json"))
        for digest in objects:
            self._files.remove(_object(self._files.root, digest))

    def push(self, manifest: Manifest, run: Path) -> int:
        """Put the files of a training's folder that the store lacks, then the manifest; return the bytes sent.

        UserError for a place without a store, as the mount point of a share that is away.
        """
        self._begin_to_push()
        wanted = {file["sha256"]: (file["bytes"], run / name) for name, file in manifest["files"].items()}
        sizes = self._sizes(wanted)
        lacking = {digest: each for digest, each in wanted.items() if sizes.get(digest) != each[0]}
        self._put({_object(self._files.root, digest): path for digest, (_, path) in lacking.items()})
        if key := os.environ.get(KEY):
            manifest = {**manifest, "signature": _sign(manifest, key)}
        self._files.make_folder(self._path("trainings"))
        name = f"trainings/{manifest['identity']}.{manifest['step']}.json"
        self._files.write(self._path(name), msgspec.json.encode(manifest))
        return sum(size for size, _ in lacking.values())

    def fetch(self, files: Files, folder: Path) -> dict[str, Path]:
        """Return the bytes of files, in a folder, by hash; each is fetched unless there, and held against its hash.

        What a killed call has fetched is there for the next.
        """
        sizes = {file["sha256"]: file["bytes"] for file in files.values()}
        folder.mkdir(parents=True, exist_ok=True)

        def whole(digest: str) -> Path:
            path, size = folder / digest, sizes[digest]
            if _is_whole(path, digest, size):
                return path
            try:
                self._files.fetch_file(_object(self._files.root, digest), path, size)
            except FileNotFoundError:
                raise UserError(f"{self._files.where}: object {digest} is missing; push it again") from None
            if not _is_whole(path, digest, size):
                path.unlink(missing_ok=True)
                raise UserError(f"{self.url}: object {digest} has other content than its name says; push it again")
            return path

        with ThreadPoolExecutor(min(FETCHED_AT_ONCE, self._files.at_once)) as pool:
            return dict(zip(sizes, pool.map(whole, sizes), strict=True))

    def _sizes(self, digests: Mapping[str, object]) -> dict[str, int]:
        """Return the bytes of the objects that are there; -1 for another."""

        def size(digest: str) -> int:
            try:
                return self._files.size(_object(self._files.root, digest))
            except FileNotFoundError:
                return -1

        with ThreadPoolExecutor(self._files.at_once) as pool:
            return dict(zip(digests, pool.map(size, digests), strict=True))

    def _put(self, paths: Mapping[str, Path]) -> None:
        """Put files under their names, whole or not at all."""
        from scripts.remote.pace import Pace  # noqa: PLC0415

        pace = Pace(self.pace)
        if self._files.fs.async_impl:
            largest = max((path.stat().st_size for path in paths.values()), default=0)
            is_in_parts = "s3" in self._files.protocols and largest <= MAX_PARTS * PART
            parts = {"chunksize": PART} if is_in_parts else {}
            sources = [str(path) for path in paths.values()]
            self._files.put_files(sources, [*paths], callback=pace, batch_size=2 if parts else 8, **parts)
            return
        for target, path in paths.items():
            self._files.make_folder(target.rpartition("/")[0])
            self._files.put_file(path, target)
            pace.relative_update(path.stat().st_size)


def _is_whole(path: Path, digest: str, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256_file(path) == digest


def _object(root: str, digest: str) -> str:
    return f"{root}/objects/{digest[:2]}/{digest}"


def _sign(manifest: Manifest, key: str) -> str:
    """Return the HMAC-SHA256 (RFC 2104) of a manifest without its signature."""
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    return hmac.new(key.encode(), canonical_json(signed).encode(), hashlib.sha256).hexdigest()
