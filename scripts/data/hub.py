"""Bring files of a repository of the Hugging Face hub into the hub's cache: pinned, whole and verified.

huggingface_hub's own download starts anew when it was cut off; this one resumes, also in another process.
"""

import difflib
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from scripts.credentials import without_credentials
from scripts.data.hub_cache import SILENCE_SECONDS, HubFile, Kind, Snapshot, cached_snapshot, is_commit
from scripts.data.hub_errors import (
    FAILURES,
    TOKEN,
    UNREACHABLE,
    EndedEarly,
    UnexpectedAnswer,
    brief,
    explain,
    is_transient,
    is_unknown_repository,
    retry_after,
)
from scripts.data.source_record import describe_file
from scripts.errors import UserError
from scripts.files import amount, explain_write_errors

SAME_REPOSITORY = ("nvidia/Nemotron-3-Super-RL-Training-Blends", "nvidia/Nemotron-RL-Super-Training-Blends")
WAITS = (2, 4, 8, 16, 32, 60, 60)
LONGEST_WAIT = 600
REPORT_SECONDS = 30
WAIT_SECONDS = 1

T = TypeVar("T")


class Stopped(Exception):
    """The download was ended by `HubClient.stop`; what came of it stays in the cache."""


class HubClient:
    """Downloads with retries; several threads may use one client, and `stop` ends what they do.

    Transient failures (no answer, a cut body, a throttled or failing hub) are retried until eight attempts in a row
    brought no byte: for about three minutes, or as long as the hub itself asks to wait, at most ten minutes a time.
    """

    def __init__(self, kind: Kind = "dataset") -> None:
        self._kind = kind
        self._stop = threading.Event()
        self._bringing: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)

    def stop(self) -> None:
        """End what the threads do, as soon as they look."""
        self._stop.set()

    def find_snapshot(self, repository: str, revision: str, files: list[str], are_all: bool = True) -> Snapshot:
        """The repository at the commit that `revision` means now, or in the cache where the hub cannot be asked.

        A whole commit hash needs no hub where the cache has its `files`, and these `are_all` that are wanted.
        """
        if not re.fullmatch(r"[!-~]*", get_token() or ""):
            raise UserError(f"{TOKEN} has characters that no token has; set it again")
        names = SAME_REPOSITORY if repository in SAME_REPOSITORY else ()
        ids = [repository, *(name for name in names if name != repository)]
        cached = next(filter(None, (cached_snapshot(name, revision, files, self._kind) for name in ids)), None)
        if cached and cached.commit == revision and are_all:
            return cached
        unknown = []
        for name in ids:
            try:
                return self._ask(name, revision, 0 if cached else 2)
            except FAILURES as error:
                if cached and isinstance(error, httpx2.TransportError | OfflineModeIsEnabled):
                    say(f"{cached}: the hub cannot be asked; taken from the cache, which may be older than the hub's")
                    return cached
                refusal = explain(error, f"{name} at {revision}", name, self._kind)
                if not is_unknown_repository(error):
                    raise refusal from None
                unknown.append(refusal)
                if name != ids[-1]:
                    say(f"{name}: the hub knows no such repository; trying {ids[-1]}, which is the same")
        raise unknown[0]

    def _ask(self, repository: str, revision: str, retries: int) -> Snapshot:
        patience = constants.HF_HUB_ETAG_TIMEOUT

        def ask() -> Any:
            try:
                return HfApi().repo_info(repository, repo_type=self._kind, revision=revision, timeout=patience)
            except HFValidationError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                raise UnexpectedAnswer(f"what answers is not a hub ({type(error).__name__})") from None

        info = self._retry(f"{repository} at {revision}", ask, retries_unreachable=retries)
        if not is_commit(info.sha or ""):
            raise UnexpectedAnswer("the answer names no commit")
        names = tuple(file.rfilename for file in info.siblings or ())
        return Snapshot(repository, info.id, revision, info.sha, names, self._kind)

    def locate(self, snapshot: Snapshot, name: str) -> HubFile:
        """The hash and size of a file, from the cache or the hub; UserError when the commit has no such file."""
        pointer, what = snapshot.pointer(name), f"{name} of {snapshot}"
        if pointer.exists():
            return HubFile(snapshot, name, pointer.resolve().name, pointer.stat().st_size)
        if snapshot.names is not None and name not in snapshot.names:
            raise UserError(f"{what}: the repository has no such file; {near(name, snapshot.names)}")
        try:
            found = self._retry(
                what, lambda: get_hf_file_metadata(_url(snapshot, name), timeout=constants.HF_HUB_ETAG_TIMEOUT)
            )
            if not found.etag or found.size is None:
                raise UnexpectedAnswer("the answer tells neither a file's hash nor its size")
        except FAILURES as error:
            raise explain(error, what, snapshot.repository, self._kind) from None
        return HubFile(snapshot, name, found.etag, found.size)

    def fetch(self, file: HubFile) -> dict[str, Any]:
        """Bring a file into the cache, verified; what scripts.data.source_record.describe_file says of it.

        A file that is not what the hub's hash says is removed from the cache and fetched again, once.
        """
        for is_last in (False, True):
            self._download(file)
            described = describe_file(file.pointer)
            if file.is_intact(described):
                return described
            path = file.remove()
            say(f"{path}: damaged, not the content of {file}; removed")
            if not is_last:
                file = self.locate(file.snapshot, file.name)
        raise UserError(f"{file.name} of {file.snapshot}: came damaged twice; check the disk of {path.parent}")

    def _download(self, file: HubFile) -> None:
        if file.pointer.exists():
            say(f"{file}: {amount(file.size)}, already in the cache")
            return
        what = f"{file.name} of {file.snapshot}"
        with explain_write_errors(file.blob), self._bringing[file.blob]:
            file.blob.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._retry(what, lambda: self._bring(file), lambda: file.came)
            except FAILURES as error:
                raise explain(error, what, file.snapshot.repository, self._kind) from None
            file.forget_parts()
            file.publish()

    def _bring(self, file: HubFile) -> None:
        """Let the cache have the content: from the hub, or from another process that brings it already."""
        told = None
        while not file.blob.exists():
            other = file.claim()
            if other is None:
                self._stream(file)
                file.part.replace(file.blob)
                return
            if other != told:
                say(f"{file}: another process brings it; waiting for {other}")
                told = other
            if self._stop.wait(WAIT_SECONDS):
                raise Stopped
        say(f"{file}: {amount(file.size)}, already in the cache under another name")

    def _stream(self, file: HubFile) -> None:
        """Append to what came so far until the file has its size."""
        have = file.came if file.came <= file.size else 0
        if have == file.size > 0:
            return
        headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        url, timeout = _url(file.snapshot, file.name), constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code == httpx2.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                file.part.unlink()
                raise EndedEarly("the hub does not know the place to go on from; from the start")
            hf_raise_for_status(response)
            if response.status_code != httpx2.codes.PARTIAL_CONTENT:
                have = 0
            say(f"{file}: {amount(file.size)}" + (f", going on after {amount(have)}" if have else ""))
            self._write(file, response, have)
        if file.came < file.size:
            raise EndedEarly(f"ended after {file.came} of {file.size} bytes")

    def _write(self, file: HubFile, response: httpx2.Response, have: int) -> None:
        started = reported = time.monotonic()
        first, last = have, time.time()
        with explain_write_errors(file.part):
            target = file.part.open("ab" if have else "wb", buffering=0)
        with target:
            for chunk in response.iter_bytes():
                if self._stop.is_set():
                    raise Stopped
                if time.time() - last > SILENCE_SECONDS / 2:
                    raise EndedEarly("this process stood still, and another may have taken over what it wrote")
                last = time.time()
                view = memoryview(chunk)
                while view:
                    with explain_write_errors(file.part):
                        view = view[target.write(view) :]
                have += len(chunk)
                now = time.monotonic()
                if now - reported >= REPORT_SECONDS:
                    reported, rate = now, (have - first) / (now - started)
                    left = (file.size - have) / rate / 60
                    say(f"{file}: {amount(have)} of {amount(file.size)}, {amount(rate)}/s, {left:.0f} min left")
        say(f"{file}: {amount(have - first)} came in {time.monotonic() - started:.0f} s")

    def _retry(
        self,
        what: str,
        attempt: Callable[[], T],
        progress: Callable[[], int] = lambda: 0,
        retries_unreachable: int = len(WAITS),
    ) -> T:
        """What `attempt` gives, retried after transient failures, which are counted anew when bytes came."""
        failures, before = 0, progress()
        while True:
            if self._stop.is_set():
                raise Stopped
            try:
                return attempt()
            except FAILURES as error:
                now = progress()
                failures, before = 1 if now > before else failures + 1, now
                retries = retries_unreachable if isinstance(error, UNREACHABLE) else len(WAITS)
                wait = retry_after(error) or WAITS[min(failures, len(WAITS)) - 1]
                if not is_transient(error) or failures > retries or wait > LONGEST_WAIT:
                    raise
                say(f"{what}: {brief(error)}; attempt {failures + 1} of {retries + 1} in {wait} s")
                if self._stop.wait(wait):
                    raise Stopped from None


def say(line: str) -> None:
    """One line of progress on stderr, whole even when several threads speak."""
    sys.stderr.write(f"{without_credentials(line)}\n")
    sys.stderr.flush()


def _url(snapshot: Snapshot, name: str) -> str:
    return hf_hub_url(snapshot.repository, name, repo_type=snapshot.kind, revision=snapshot.commit)


def near(name: str, names: tuple[str, ...]) -> str:
    """The names most like a file's, those of the same name in another folder first."""
    same = [candidate for candidate in names if PurePosixPath(candidate).name == PurePosixPath(name).name]
    near = list(dict.fromkeys([*same, *difflib.get_close_matches(name, names, n=3, cutoff=0.4)]))
    return f"near it: {', '.join(near[:3])}" if near else f"it has {', '.join(names[:10]) or 'none at all'}"
