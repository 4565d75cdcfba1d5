"""A remote store of trainings, on any file system that fsspec reaches: files by hash, and a manifest for each training.

::

    <remote>/objects/<ab>/<sha256>              the bytes of a file, once for all trainings that share it
    <remote>/trainings/<identity>.<step>.json   the manifest of a training at a step, written last

An object is only believed by its hash, a manifest by its form and, where the project has a key, by its signature.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, NotRequired, TypedDict

import msgspec

from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file
from scripts.recipe.config import Store
from scripts.records import Files

KEY = "STAGECOACH_STORE_KEY"
"""The environment variable with the project's key, by which manifests are signed and held against their signature."""
MANIFEST = re.compile(r"([0-9a-f]{16})\.(\d{1,9})\.json")
SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK = 64 << 20
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
}
OPTIONS = {"s3": {"max_concurrency": PARTS, "default_block_size": PART, "config_kwargs": _S3}}
"""Options of a protocol: a store out of reach is given up in seconds. Every file is held against its hash, so neither a
signature of its bytes nor the checksum of an answer is needed; some S3 servers answer with a wrong one for a part."""


class Manifest(TypedDict):
    """The files of a training's folder at a step; `weights` says whether the checkpoint's own are among them.

    With `is_passing` the step is kept until a later one is there.
    """

    identity: str
    step: int
    stage: str
    files: Files
    weights: bool
    is_passing: NotRequired[bool]
    signature: NotRequired[str]


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
    def _place(self) -> tuple[Any, str]:
        """The file system and the root on it."""
        with self._reached():
            import fsspec  # noqa: PLC0415 - a tenth of what plan takes where no store is named

            options = OPTIONS.get(self.url.partition(":")[0], {})
            return fsspec.core.url_to_fs(self.url, **options)

    def steps(self) -> dict[str, list[int]]:
        """Return the steps of every training in the store, by identity, from one listing."""
        if time.monotonic() - self._since > SECONDS:
            found: dict[str, list[int]] = {}
            for name in self._names("trainings"):
                if match := MANIFEST.fullmatch(name):
                    found.setdefault(match[1], []).append(int(match[2]))
            self._listed, self._since = {identity: sorted(steps) for identity, steps in found.items()}, time.monotonic()
        return self._listed

    def manifest(self, identity: str, step: int) -> Manifest:
        """Return the manifest of a training; UserError for one that is damaged, of another training, or not signed."""
        fs, root = self._place
        path = f"{root}/trainings/{identity}.{step}.json"
        with self._reached():
            text = fs.cat_file(path)
        try:
            manifest = msgspec.json.decode(text, type=Manifest)
        except (msgspec.MsgspecError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it: stagecoach store prune {identity}") from None
        if (manifest["identity"], manifest["step"]) != (identity, step):
            raise UserError(f"{path}: is the manifest of training {manifest['identity']}; remove it")
        for name, file in manifest["files"].items():
            if not _is_ours(name, file["sha256"]):
                raise UserError(f"{path}: {name} lies outside of the training, or has no hash; remove the manifest")
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

        with ThreadPoolExecutor(self._at_once()) as pool:
            yield from pool.map(read, [(identity, step) for identity, steps in self.steps().items() for step in steps])

    def objects(self) -> dict[str, int]:
        """Return the bytes of every object, by hash."""
        fs, root = self._place
        with self._reached():
            found = fs.find(f"{root}/objects", detail=True)
        return {PurePosixPath(path).name: each["size"] for path, each in found.items()}

    def hashed(self, digest: str) -> str:
        """Return the hash of an object's bytes, read from the store."""
        fs, root = self._place
        with self._reached(), fs.open(_object(root, digest), "rb", block_size=BLOCK) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def remove(self, trainings: Iterable[tuple[str, int]], objects: Iterable[str]) -> None:
        """Remove manifests, and then objects."""
        fs, root = self._place
        paths = [f"{root}/trainings/{identity}.{step}.json" for identity, step in trainings]
        with self._reached():
            for path in (*paths, *(_object(root, digest) for digest in objects)):
                fs.rm_file(path)

    def push(self, manifest: Manifest, run: Path) -> int:
        """Put the files of a training's folder that the store lacks, then the manifest; return the bytes sent."""
        fs, root = self._place
        wanted = {file["sha256"]: (file["bytes"], run / name) for name, file in manifest["files"].items()}
        with self._reached():
            sizes = self._sizes(wanted)
            lacking = {digest: each for digest, each in wanted.items() if sizes.get(digest) != each[0]}
            self._put({_object(root, digest): path for digest, (_, path) in lacking.items()})
            if key := os.environ.get(KEY):
                manifest = {**manifest, "signature": _sign(manifest, key)}
            fs.makedirs(f"{root}/trainings", exist_ok=True)
            name = f"{root}/trainings/{manifest['identity']}.{manifest['step']}.json"
            if fs.async_impl:
                fs.pipe_file(name, msgspec.json.encode(manifest))
            else:
                fs.pipe_file(hidden := f"{name}.{secrets.token_hex(8)}", msgspec.json.encode(manifest))
                fs.mv(hidden, name)
        return sum(size for size, _ in lacking.values())

    def fetch(self, files: Files, folder: Path) -> dict[str, Path]:
        """Return the bytes of files, in a folder, by hash; each is fetched unless there, and held against its hash.

        What a killed call has fetched is there for the next.
        """
        (fs, root), sizes = self._place, {file["sha256"]: file["bytes"] for file in files.values()}
        folder.mkdir(parents=True, exist_ok=True)

        def whole(digest: str) -> Path:
            path, size = folder / digest, sizes[digest]
            if not _is_whole(path, digest, size):
                fs.get_file(_object(root, digest), str(path))
                if not _is_whole(path, digest, size):
                    path.unlink(missing_ok=True)
                    raise UserError(f"{self.url}: object {digest} has other content than its name says; push it again")
            return path

        with self._reached(), ThreadPoolExecutor(min(FETCHED_AT_ONCE, self._at_once())) as pool:
            return dict(zip(sizes, pool.map(whole, sizes), strict=True))

    def _at_once(self) -> int:
        """Return how many requests the file system takes at once: a connection such as SFTP's takes one."""
        fs, _ = self._place
        return 32 if fs.async_impl or "file" in fs.protocol else 1

    def _names(self, folder: str) -> list[str]:
        fs, root = self._place
        with self._reached():
            fs.invalidate_cache()
            try:
                return [PurePosixPath(path).name for path in fs.ls(f"{root}/{folder}", detail=False)]
            except FileNotFoundError:
                return []

    def _sizes(self, digests: Mapping[str, Any]) -> dict[str, int]:
        """Return the bytes of the objects that are there."""
        fs, root = self._place

        def size(digest: str) -> int:
            try:
                return fs.info(_object(root, digest))["size"]
            except FileNotFoundError:
                return -1

        with ThreadPoolExecutor(self._at_once()) as pool:
            return dict(zip(digests, pool.map(size, digests), strict=True))

    def _put(self, paths: Mapping[str, Path]) -> None:
        """Put files under their names, whole or not at all."""
        from scripts.remote.pace import Pace  # noqa: PLC0415

        (fs, _), pace = self._place, Pace(self.pace)
        if fs.async_impl:
            largest = max((path.stat().st_size for path in paths.values()), default=0)
            parts = {"chunksize": PART} if "s3" in fs.protocol and largest <= MAX_PARTS * PART else {}
            sources = [str(path) for path in paths.values()]
            fs.put(sources, [*paths], callback=pace, batch_size=2 if parts else 8, **parts)
            return
        for target, path in paths.items():
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), hidden := f"{target}.{secrets.token_hex(8)}")
            fs.mv(hidden, target)
            pace.relative_update(path.stat().st_size)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn what a file system or its client raises into a UserError."""
        try:
            yield
        except (UserError, KeyboardInterrupt):
            raise
        except ImportError as error:
            raise UserError(f"{self.url}: {error}; install envs/remote.txt, or the package for other systems") from None
        except Exception as error:
            says = f"cannot be reached ({type(error).__name__}: {error})"
            raise UserError(f"{self.url}: {says}; check address, network and rights") from error


def _is_ours(name: str, digest: str | None) -> bool:
    """Whether a manifest's file lies in a training's folder, and has a hash."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(SHA256.fullmatch(digest or ""))


def _is_whole(path: Path, digest: str, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256_file(path) == digest


def _object(root: str, digest: str) -> str:
    return f"{root}/objects/{digest[:2]}/{digest}"


def _sign(manifest: Manifest, key: str) -> str:
    """Return the HMAC-SHA256 (RFC 2104) of a manifest without its signature."""
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    return hmac.new(key.encode(), canonical_json(signed).encode(), hashlib.sha256).hexdigest()
