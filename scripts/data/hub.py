"""Files of the Hugging Face hub by huggingface_hub and its cache: pinned to a commit, verified, refusals explained."""

import difflib
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import REGEX_COMMIT_HASH, REGEX_SHA256
from huggingface_hub.utils.sha import git_hash

from scripts.credentials import without_credentials
from scripts.data.source_record import describe_file
from scripts.errors import UserError
from scripts.files import amount, explain_write_errors

TOKEN = "your token (HF_TOKEN, or the one of `hf auth login`)"  # noqa: S105
WAITS = (2, 8, 30)
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
NO_HUB = (KeyError, TypeError, AssertionError, ValueError)
"""Raised by huggingface_hub at an answer without the fields of a hub's."""
FAILURES = (httpx2.HTTPError, httpx2.InvalidURL, EntryNotFoundError, RevisionResolutionError, OSError, *NO_HUB)
ADVICE: tuple[tuple[Any, str], ...] = (
    (GatedRepoError, "it is gated: accept its terms on its page, and export HF_TOKEN with a token of that account"),
    (RepositoryNotFoundError, "no such repository, or a private one: check its id in the recipe, or export HF_TOKEN"),
    (RevisionNotFoundError, "it has no such revision: take a branch, tag or commit of its page"),
    (HfHubHTTPError, f"set {TOKEN} to a valid one that may read it"),
    (OfflineModeIsEnabled, "HF_HUB_OFFLINE is set, and the cache does not have it; unset HF_HUB_OFFLINE"),
    (
        UNREACHABLE,
        "no connection: check the network, the proxy and HF_ENDPOINT, or fetch on a machine that has the network, with "
        "HF_HOME on a shared disk",
    ),
    (HFValidationError, "check the repository's id in the recipe"),
    (NO_HUB, "what answers is not a hub; check HF_ENDPOINT"),
    (Exception, "check the repository's id in the recipe, and HF_ENDPOINT where it is set"),
)
"""What to do about a failure, by the first fitting class."""

Kind = Literal["dataset", "model"]
T = TypeVar("T")


@dataclass
class Snapshot:
    """A repository at one commit, with the bytes of its files by name.

    `is_whole` is False where `sizes` lists only files of the cache.
    """

    repository: str
    revision: str
    commit: str
    kind: Kind
    sizes: dict[str, int]
    is_whole: bool

    def __str__(self) -> str:
        at = self.commit[:12] if self.revision == self.commit else f"{self.revision} ({self.commit[:12]})"
        return f"{self.repository} at {at}"


def open_snapshot(repository: str, revision: str, kind: Kind = "dataset") -> Snapshot:
    """Resolve a revision to its commit, or to the last known commit where the hub cannot be reached."""
    api, whole = HfApi(), {"repo_id": repository, "repo_type": kind}
    try:
        commit = _patiently(lambda: api.resolve_revision(**whole, revision=revision)).resolved
        try:
            info = _patiently(lambda: api.repo_info(**whole, revision=commit, files_metadata=True))
        except (OfflineModeIsEnabled, *UNREACHABLE):
            folder = Path(snapshot_download(**whole, revision=commit, local_files_only=True, allow_patterns=[]))
            sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            return Snapshot(repository, revision, commit, kind, sizes, is_whole=False)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        return Snapshot(repository, revision, commit, kind, sizes, is_whole=True)
    except FAILURES as error:
        raise explain(error, f"{repository} at {revision}") from None


def download(snapshot: Snapshot, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a file's path in the cache and its `describe_file`, downloading it if needed.

    A file that differs from the hash or size that the hub gave is downloaded again, once.
    """
    what, size = f"{name} of {snapshot}", snapshot.sizes[name]
    say(f"{snapshot.repository}/{name}: {amount(size)}")
    for is_forced in (False, True):
        options = {"repo_type": snapshot.kind, "revision": snapshot.commit, "force_download": is_forced}
        try:
            path = Path(_patiently(lambda given=options: hf_hub_download(snapshot.repository, name, **given)))
        except FAILURES as error:
            raise explain(error, what) from None
        described = describe_file(path)
        if _is_intact(path, described, size):
            return path, described
        say(f"{path.resolve()}: damaged, not the content of {what}")
    raise UserError(f"{what}: came damaged twice; check the disk of {path.parent}")


def _is_intact(path: Path, described: dict[str, Any], size: int) -> bool:
    """Whether a file of the cache is the hub's, by the ETag its link names: a SHA-256, or git's SHA-1 if small."""
    etag = path.readlink().name if path.is_symlink() else ""
    if REGEX_SHA256.fullmatch(etag):
        return described["sha256"] == etag
    if REGEX_COMMIT_HASH.fullmatch(etag):
        return git_hash(path.read_bytes()) == etag
    return described["bytes"] == size


def _patiently(ask: Callable[[], T]) -> T:
    for wait in WAITS:
        try:
            return ask()
        except FAILURES as error:
            if not is_transient(cause := _cause(error)):
                raise
            say(f"{constants.ENDPOINT}: {brief(cause)}; asked again in {wait} s")
            time.sleep(wait)
    return ask()


def say(line: str) -> None:
    """Print a line of progress on stderr, whole even when several threads print."""
    sys.stderr.write(f"{without_credentials(line)}\n")


def near(name: str, names: Collection[str]) -> str:
    """Name the files most like a missing one, or else the first files."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or sorted(names)[:10]
    return f"near it: {', '.join(close) or 'no file at all'}"


def _cause(error: Exception) -> Exception:
    """Return the failure behind huggingface_hub's message that neither hub nor cache has a file."""
    is_wrapper = isinstance(error, RevisionResolutionError | EntryNotFoundError | ValueError)
    return error.__cause__ if is_wrapper and isinstance(error.__cause__, FAILURES) else error


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of the hub's answer, None where there was no answer."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if (status := status_of(error)) is not None:
        return status in {408, 429} or status >= 500
    broken = httpx2.TimeoutException | httpx2.NetworkError | httpx2.RemoteProtocolError
    return isinstance(error, broken) and not isinstance(error, UNREACHABLE)


def brief(error: Exception) -> str:
    """Return a failure in one line, without the token."""
    if (status := status_of(error)) is not None:
        return f"the hub answers {status} ({error.server_message or 'without a reason'})"
    text = f"{type(error).__name__} {error}".partition("\n")[0]
    return text.replace(token, "***") if (token := get_token()) else text


def explain(error: Exception, what: str) -> UserError:
    """Return a failure as a message: what was asked of which host, why it was refused, what to do."""
    error = _cause(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, HfHubHTTPError):
        try:
            with explain_write_errors(Path(constants.HF_HUB_CACHE)):
                raise error
        except UserError as refusal:
            return refusal
    is_cut = isinstance(error, OSError) and "Consistency check" in str(error)
    advice = next(advice for classes, advice in ADVICE if isinstance(error, classes))
    if is_transient(error) or is_cut:
        advice = "run again later; a throttled hub has higher limits for a token (HF_TOKEN)"
    return UserError(f"{what}, from {constants.ENDPOINT}: {brief(error)}; {advice}")
