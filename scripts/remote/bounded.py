"""A file system of fsspec with the limits of scripts/remote/limits.py for every call.

After a failure the server is not asked again for a while: calls fail at once.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
import fsspec.asyn

from scripts.errors import UserError
from scripts.remote import limits
from scripts.remote.limits import TRAFFIC, Watch, in_thread, on_loop

Result = TypeVar("Result")

ASKS_NOBODY_TO_OPEN = ("file", "local", "s3", "s3a")
"""In the caller's thread, fsspec finds the file system that it opened before."""
COARSE = 15
"""So many windows are looked at together where a client reports its progress only after parts of many MB."""
JOINING = 5
"""The same for a push to S3."""
IN_FLIGHT = 160 << 20
"""Bytes that a push holds at once, at most."""
COPIED = 4 << 20
OF_ONE_FILE = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that say nothing about other files of the same server."""
OF_ONE_BODY = {"ClientPayloadError", "IncompleteRead", "ResponseStreamingError", "ContentLengthError"}
"""The same, by the names of classes of clients, for a call that reads a file."""
READING = {"cat_file", "get_file"}

for _client in ("paramiko", "gcsfs"):
    # Clients print a traceback for every attempt that fails; the error of the last one is the message.
    logging.getLogger(_client).addHandler(logging.NullHandler())


class AwayError(UserError):
    """A store out of reach, with unknown content."""


class Bounded:
    """A file system of fsspec, opened by a URL; every call has limits. `pace` limits a push, in bytes a second.

    Errors: FileNotFoundError for a missing file, AwayError for a server without a proper answer.
    """

    def __init__(self, url: str, options: Mapping[str, Any], pace: float | None = None) -> None:
        self.url = url
        self.pace = pace
        self._failure: AwayError | None = None
        self._failed_until = 0.0
        self._opened: Any = None
        protocol = url.partition("://")[0] if "://" in url else "file"
        with self._noting("open"):
            if protocol in ASKS_NOBODY_TO_OPEN:
                self._opened, self.root = _opened(url, options)
            else:
                self._opened, self.root = in_thread(
                    Watch(limits.LIMITS.request), _opened, url, {**options, "skip_instance_cache": True}
                )

    @property
    def fs(self) -> Any:
        """The file system of fsspec, without limits."""
        return self._opened

    @property
    def protocols(self) -> tuple[str, ...]:
        """The names of the file system's protocol."""
        protocol = self.fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    @property
    def is_object_store(self) -> bool:
        """Whether names need no folders, and a file appears with all content or not at all."""
        return self.fs.async_impl or "hf" in self.protocols

    @property
    def at_once(self) -> int:
        """The number of requests at once: a connection of SFTP takes a single one."""
        return 32 if self.fs.async_impl or "file" in self.protocols else 1

    @property
    def where(self) -> str:
        """The store's URL, with the host's name where the URL has none."""
        client = getattr(self._opened, "_s3", None)
        if client is not None:
            return f"{self.url} (at {urlsplit(client.meta.endpoint_url).netloc})"
        if "://" not in self.url:
            return f"{self.url} (seen from {socket.gethostname()})"
        return self.url

    def entries(self, path: str) -> list[dict[str, Any]]:
        """Return fsspec's descriptions of a folder's files, from a fresh listing; none for a missing folder."""
        return self._list(path, detail=True)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, from a fresh listing; none for a missing folder."""
        return [PurePosixPath(each).name for each in self._list(path, detail=False)]

    def _list(self, path: str, detail: bool) -> list[Any]:
        self.fs.invalidate_cache()
        try:
            return self._call("ls", limits.LIMITS.listing, path, detail=detail)
        except FileNotFoundError:
            return []
        finally:
            self.fs.invalidate_cache()

    def size(self, path: str) -> int:
        """Return the size of a file, by the server's word; FileNotFoundError for a missing file."""
        found = self._call("info", limits.LIMITS.request, path)
        if found["type"] != "file":
            raise FileNotFoundError(path)
        return found["size"]

    def owner(self, path: str) -> int | None:
        """Return the user id of a file's owner on a file system of this machine; None for another store."""
        return self._call("info", limits.LIMITS.request, path)["uid"] if "file" in self.protocols else None

    def read(self, path: str, most: int) -> bytes:
        """Return the content of a small file; UserError, without reading, for more than `most` bytes."""
        size = self.size(path)
        if size > most:
            raise UserError(f"{self.where}: {path} has {size} bytes, and at most {most} are read of such a file")
        if size == 0:
            return b""
        return self._call("cat_file", limits.LIMITS.request, path, start=0, end=size)

    def read_block(self, path: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` to before `end`."""
        return self._call("cat_file", None, path, start=start, end=end)

    def write(self, path: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""
        if self.is_object_store:
            self._call("pipe_file", limits.LIMITS.request, path, content)
            return
        hidden = hidden_name(path)
        self._call("pipe_file", limits.LIMITS.request, hidden, content)
        self._call("mv", limits.LIMITS.request, hidden, path)

    def fetch_file(self, path: str, target: Path, size: int) -> None:
        """Fetch a file of `size` bytes; UserError as soon as there are more."""
        if self.fs.async_impl:
            self._call("get_file", None, path, str(target), callback=AtMost(size, is_counted="s3" in self.protocols))
            return
        there = self.size(path)
        if there != size:
            raise UserError(f"{self.where}: {path} has {there} bytes instead of {size}; push it again")
        if "file" in self.protocols:
            self._run("get_file", Watch(None), copy_counted, Path(path), target)
        elif "sftp" in self.protocols:
            self._run("get_file", Watch(None), self.fs.ftp.get, path, str(target), callback=Counted())
        else:
            self._call("get_file", None, path, str(target), callback=AtMost(size, is_counted="s3" in self.protocols))

    def put_files(self, sources: list[str], targets: list[str], **options: Any) -> None:
        """Send files to an object store, several at once."""
        self._call("put", None, sources, targets, **options)

    def put_file(self, source: Path, target: str) -> None:
        """Send a file, whole or not at all."""
        if self.is_object_store:
            self._call("put_file", None, str(source), target)
            return
        hidden = hidden_name(target)
        if "file" in self.protocols:
            self._run("put_file", Watch(None, JOINING), copy_counted, source, Path(hidden))
        elif "sftp" in self.protocols:
            self._run("put_file", Watch(None), self.fs.ftp.put, str(source), hidden, callback=Counted())
        else:
            self._call("put_file", None, str(source), hidden)
        self._call("mv", limits.LIMITS.request, hidden, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._call("rm_file", limits.LIMITS.request, path)

    def make_folder(self, path: str) -> None:
        """Make a folder, except in an object store, where clients would make the bucket."""
        if not self.is_object_store:
            self._call("makedirs", limits.LIMITS.request, path, exist_ok=True)

    def _call(self, name: str, seconds: float | None, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, as a transfer where `seconds` is None."""
        watch = self._watch_of_push() if name == "put" else Watch(seconds, self._windows(name))
        if not self.fs.async_impl:
            return self._run(name, watch, getattr(self.fs, name), *args, **kwargs)
        with self._noting(name):
            return fsspec.asyn.sync(self.fs.loop, on_loop, watch, getattr(self.fs, f"_{name}"), *args, **kwargs)

    def _run(self, name: str, watch: Watch, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call a blocking function."""
        with self._noting(name):
            try:
                return in_thread(watch, function, *args, **kwargs)
            except limits.LimitError:
                self._end_connections()
                raise

    def _end_connections(self) -> None:
        """End the connections of a call over its limit, which goes on in its thread."""
        if "sftp" in self.protocols:
            self.fs.client.close()
        elif "hf" in self.protocols:
            from huggingface_hub import close_session  # noqa: PLC0415 - only with a store on the hub

            close_session()

    def _windows(self, name: str) -> float:
        """Return how many windows are looked at together in a transfer."""
        is_counted = "s3" in self.protocols or (name == "get_file" and self.fs.async_impl)
        return 1 if is_counted else COARSE

    def _watch_of_push(self) -> Watch:
        """Watch a push. A server may take minutes to join the parts of a large file."""
        windows = JOINING if "s3" in self.protocols else COARSE
        if self.pace is None:
            return Watch(None, windows)
        # A push that is held to a low pace sleeps after each part.
        asleep = IN_FLIGHT / self.pace / limits.LIMITS.window
        return Watch(None, windows + asleep, min(limits.LIMITS.pace, self.pace / 2))

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Fail at once where the server failed a moment ago; else turn a failure into an AwayError, and note when."""
        if self._failure is not None and time.monotonic() < self._failed_until:
            raise self._failure
        began = time.monotonic()
        try:
            yield
        except (UserError, FileNotFoundError, KeyboardInterrupt):
            raise
        except ImportError as error:
            raise UserError(f"{self.url}: {error}; install envs/remote.txt, or the package for other systems") from None
        except Exception as error:
            away = AwayError(f"{self.where}: {in_words(error)}; check address, network and rights")
            if not _is_of_one_file(name, error):
                now = time.monotonic()
                self._failure = away
                self._failed_until = now + max(limits.LIMITS.remembered, 10 * (now - began))
            raise away from error


class AtMost(fsspec.Callback):
    """Count the bytes of a file; UserError as soon as there are more than the file has.

    `is_counted`: their sockets count for the traffic.
    """

    def __init__(self, most: int, is_counted: bool) -> None:
        super().__init__()
        self.most = most
        self.is_counted = is_counted

    def set_size(self, size: int | None) -> None:
        """Count from the start: at every attempt, a client sets the size first."""
        self.size = size
        self.value = 0

    def relative_update(self, inc: int = 1) -> None:
        """Count the bytes of a part."""
        self.value += inc
        if not self.is_counted:
            TRAFFIC.add(inc)
        if self.value > self.most:
            raise UserError(f"the server sends more than the {self.most} bytes of the file; push it again")


class Counted:
    """Count the bytes moved by paramiko, whose reports count from the file's start."""

    def __init__(self) -> None:
        self.before = 0

    def __call__(self, done: int, _: int) -> None:
        """Count the bytes since the last report."""
        TRAFFIC.add(done - self.before)
        self.before = done


def copy_counted(source: Path, target: Path) -> None:
    """Copy a file."""
    with source.open("rb") as read, target.open("wb") as written:
        while block := read.read(COPIED):
            written.write(block)
            TRAFFIC.add(len(block))


def hidden_name(path: str) -> str:
    """Return the name of a file until the file is complete."""
    return f"{path}.{secrets.token_hex(8)}"


def in_words(error: Exception) -> str:
    """Return a failure of a request in words, on one line."""
    if isinstance(error, limits.LimitError):
        return str(error)
    name = type(error).__name__
    # botocore wraps errors without words, as that of too many redirects.
    wrapped = getattr(error, "kwargs", {}).get("error")
    if isinstance(wrapped, Exception):
        name += f" of {type(wrapped).__name__}"
    text = " ".join(str(error).split())
    return f"cannot be reached ({name}: {text})"


def _opened(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    return fsspec.core.url_to_fs(url, **options)


def _is_of_one_file(name: str, error: Exception) -> bool:
    """Whether an error says nothing about other files of the server."""
    if isinstance(error, OF_ONE_FILE):
        return True
    return name in READING and type(error).__name__ in OF_ONE_BODY
