"""A remote store of trainings, on any file system that fsspec reaches: files by hash, and a manifest for each training.

::

    <remote>/stagecoach-store.json              the marker, by which an empty store differs from an unmounted share
    <remote>/objects/<ab>/<sha256>              the bytes of a file, once for all trainings that share it
    <remote>/trainings/<identity>.<step>.json   the manifest of a training at a step, written last
    <remote>/damaged/<sha256>                   the mark of an object with a wrong hash, to be sent again

An object is only believed by the hash, a manifest by form and writer (scripts.remote.trust). Pushes and prunes are in
scripts.remote.sending and scripts.remote.pruning.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import msgspec

from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.names import PartName, check_listed, of_training
from scripts.recipe.config import Store
from scripts.records import DAMAGE, Count, Files
from scripts.remote import limits
from scripts.remote.trust import Policy, doubt_of

if TYPE_CHECKING:
    from scripts.remote.bounded import Bounded

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


class GoneError(UserError):
    """A missing or removed manifest or object."""


@dataclass(frozen=True)
class Entry:
    """A manifest as found in the store.

    `manifest` is None for a damaged text; `problem` says why nothing is taken. `objects` are all hashes in the text;
    without `is_read` the file could not be read.
    """

    identity: str
    step: int
    manifest: Manifest | None
    problem: UserError | None
    objects: frozenset[str]
    is_read: bool = True


@dataclass
class RemoteStore:
    """A remote store by its URL; a listing is kept for moments.

    `pace` limits a push, in bytes a second. `key` says whether a key is needed (scripts.remote.trust).
    """

    url: str
    pace: float | None = None
    key: Policy = None
    _listed: dict[str, list[int]] = field(default_factory=dict)
    _since: float = -SECONDS

    @classmethod
    def of(cls, store: Store | None) -> "RemoteStore | None":
        """Return the store that a config names, if any."""
        return cls(store.remote, store.mb_per_second and 1e6 * store.mb_per_second, store.key) if store else None

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

    @property
    def place(self) -> "Bounded":
        """The file system, with limits, for pushes and prunes."""
        return self._files

    def path_of(self, name: str) -> str:
        """Return the path of a file in the store, for the file system."""
        return self._path(name)

    def _path(self, name: str) -> str:
        return f"{self._files.root}/{name}"

    def look_again(self) -> None:
        """Forget the listing."""
        self._since = -SECONDS

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

    def begin_to_push(self) -> None:
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
        """Return the manifest of a training.

        UserError for a manifest damaged, of another training, or not trusted; GoneError for a missing manifest.
        """
        entry = self.entry(identity, step)
        if entry.problem:
            raise entry.problem
        return entry.manifest

    def entry(self, identity: str, step: int) -> Entry:
        """Return the manifest of a training at a step, with any problem; GoneError for a missing manifest."""
        path = self._path(f"trainings/{identity}.{step}.json")
        try:
            text = self._files.read(path, limits.LIMITS.manifest)
            owner = self._files.owner(path)
        except FileNotFoundError:
            if not self._is_store():
                raise self._no_store() from None
            raise GoneError(f"{self._files.where}: has no step {step} of training {identity}") from None
        objects = frozenset(found.decode() for found in re.findall(rb"[0-9a-f]{64}", text))
        try:
            manifest = _manifest_in(path, text, identity, step)
        except UserError as error:
            # Another service answers every question with the same page.
            self._has_marker()
            return Entry(identity, step, None, error, objects)
        doubt = doubt_of(manifest, self.url, self.key, owner)
        return Entry(identity, step, manifest, UserError(f"{path}: {doubt}") if doubt else None, objects)

    def entries(self) -> Iterator[Entry]:
        """Yield all manifests with any problems, by identity and step; a manifest removed meanwhile is passed over."""

        def read(name: tuple[str, int]) -> Entry | None:
            try:
                return self.entry(*name)
            except GoneError:
                return None
            except UserError as error:
                return Entry(*name, None, error, frozenset(), is_read=False)

        names = [(identity, step) for identity, steps in sorted(self.steps().items()) for step in steps]
        with ThreadPoolExecutor(self._files.at_once) as pool:
            yield from filter(None, pool.map(read, names))

    def manifests(self) -> Iterator[Manifest | UserError]:
        """Yield every manifest, or the problem with the manifest, by identity and step."""
        yield from (entry.problem or entry.manifest for entry in self.entries())

    def objects(self) -> dict[str, int]:
        """Return the bytes of every object, by hash; of a half-written file by name."""
        return {PurePosixPath(each["name"]).name: each["size"] for each in self.object_files()}

    def object_files(self) -> Iterator[dict[str, Any]]:
        """Yield fsspec's descriptions of all objects, by a listing for every prefix."""
        folder = self._path("objects")
        prefixes = [name for name in self._files.names(folder) if PREFIX.fullmatch(name)]
        with ThreadPoolExecutor(self._files.at_once) as pool:
            for found in pool.map(self._files.entries, [f"{folder}/{prefix}" for prefix in prefixes]):
                yield from found

    def hashed(self, digest: str) -> str:
        """Return the hash of an object's bytes, read from the store."""
        path = _object(self._files.root, digest)
        size = self._files.size(path)
        content = hashlib.sha256()
        for start in range(0, size, BLOCK):
            content.update(self._files.read_block(path, start, min(size, start + BLOCK)))
        return content.hexdigest()

    def mark_damaged(self, digest: str) -> bool:
        """Mark an object, to be sent again by the next push; False without the right to write."""
        try:
            self._files.make_folder(self._path("damaged"))
            self._files.write(self._path(f"damaged/{digest}"), b"damaged\n")
        except (UserError, OSError):
            return False
        return True

    def lacking(self, files: Files) -> dict[str, int]:
        """Return hash and size of objects missing, of another size, or marked as damaged."""
        wanted = {file["sha256"]: file["bytes"] for file in files.values()}
        sizes = self._sizes(wanted)
        marked = {*self._files.names(self._path("damaged"))}
        return {digest: size for digest, size in wanted.items() if sizes[digest] != size or digest in marked}

    def fetch(self, files: Files, folder: Path) -> dict[str, Path]:
        """Return the bytes of files, in a folder, by hash; a file is fetched unless there, and always hashed.

        One process at a time fetches into a folder. Files of a killed call are there for the next call. UserError
        for damaged objects, once all have been tried; GoneError for objects only missing.
        """
        from scripts.remote.bounded import AwayError  # noqa: PLC0415

        sizes = {file["sha256"]: file["bytes"] for file in files.values()}
        folder.mkdir(parents=True, exist_ok=True)
        missing: list[str] = []
        damaged: list[str] = []

        def whole(digest: str) -> Path:
            path, part = folder / digest, folder / f"{digest}.part"
            if _is_whole(path, digest, sizes[digest]):
                return path
            try:
                self._files.fetch_file(_object(self._files.root, digest), part, sizes[digest])
            except FileNotFoundError:
                missing.append(digest)
                return path
            except AwayError:
                raise
            except UserError:  # of another size
                damaged.append(digest)
                return path
            if _is_whole(part, digest, sizes[digest]):
                part.replace(path)
            else:
                damaged.append(digest)
            return path

        with ThreadPoolExecutor(min(FETCHED_AT_ONCE, self._files.at_once)) as pool:
            paths = dict(zip(sizes, pool.map(whole, sizes), strict=True))
        if damaged:
            for part in folder.glob("*.part"):
                part.unlink()
            marked = [digest for digest in damaged if self.mark_damaged(digest)]
            again = "stagecoach store push" if marked == damaged else "stagecoach store push --content"
            raise UserError(
                f"{self.url}: object {damaged[0]} has a wrong hash (damaged: {len(damaged)}, "
                f"missing: {len(missing)} of {len(sizes)}); push the training again, from a copy: {again}"
            )
        if missing:
            raise GoneError(
                f"{self._files.where}: object {missing[0]} is missing (in all {len(missing)} of {len(sizes)}); push "
                "the training again, from a copy: stagecoach store push"
            )
        return paths

    def put(self, paths: Mapping[str, Path]) -> None:
        """Put objects, by their hashes, whole or not at all."""
        self._put({_object(self._files.root, digest): path for digest, path in paths.items()})

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


def _manifest_in(path: str, text: bytes, identity: str, step: int) -> Manifest:
    """Return the manifest in a file's text; UserError for damage, or for another training or step."""
    remedy = f"push it again, or remove the manifest: stagecoach store prune {identity}"
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        check_listed(manifest["files"], of_training(step))
    except DAMAGE as error:
        raise UserError(f"{path}: damaged ({error}); {remedy}") from None
    if (manifest["identity"], manifest["step"]) != (identity, step):
        raise UserError(f"{path}: is the manifest of training {manifest['identity']}; {remedy}")
    return manifest


def _is_whole(path: Path, digest: str, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256_file(path) == digest


def _object(root: str, digest: str) -> str:
    return f"{root}/objects/{digest[:2]}/{digest}"
