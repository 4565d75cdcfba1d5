"""Files of the Hugging Face hub by huggingface_hub and its cache: pinned to a commit, verified, refusals explained."""

import difflib
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
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

SAME_REPOSITORY = ("nvidia/Nemotron-3-Super-RL-Training-Blends", "nvidia/Nemotron-RL-Super-Training-Blends")
TOKEN = "your token (HF_TOKEN, or the one of `hf auth login`)"  # noqa: S105
WAITS = (2, 8, 30)
UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
NO_HUB = (KeyError, TypeError, AssertionError)
"""Raised by huggingface_hub at an answer without the fields of a hub's."""
FAILURES = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    EntryNotFoundError,
    RevisionResolutionError,
    OSError,
    ValueError,
    *NO_HUB,
)

Kind = Literal["dataset", "model"]
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, with the bytes of its files by name.

    `is_whole` is False where `sizes` lists only files of the cache.
    """

    repository: str
    revision: str
    commit: str
    kind: Kind
    sizes: dict[str, int] = field(hash=False)
    is_whole: bool

    def cached(self, name: str) -> Path | None:
        """Return the file's path in the cache, None if it was never downloaded."""
        return _cached(self.repository, self.commit, self.kind, name)

    def __str__(self) -> str:
        at = self.commit[:12] if self.revision == self.commit else f"{self.revision} ({self.commit[:12]})"
        return f"{self.repository} at {at}"


def open_snapshot(repository: str, revision: str, files: Collection[str] = (), kind: Kind = "dataset") -> Snapshot:
    """Resolve a revision to its commit, or to the last known commit where the hub cannot be reached.

    The hub is not asked for names if `files` are given and all cached. UserError explains a refusal.
    """
    if not (get_token() or "").isascii() or not (get_token() or "").isprintable():
        raise UserError(f"{TOKEN} has characters that no token has; set it again")
    names = SAME_REPOSITORY if repository in SAME_REPOSITORY else ()
    refusals = []
    for name in (repository, *(name for name in names if name != repository)):
        if refusals:
            say(f"{repository}: trying {name}, which is the same")
        try:
            return _open(name, revision, files, kind)
        except FAILURES as error:
            is_unknown = is_unknown_repository(_cause(error))
            refusals.append((not is_unknown, explain(error, f"{name} at {revision}", name, kind)))
    raise max(refusals, key=itemgetter(0))[1]


def _open(repository: str, revision: str, files: Collection[str], kind: Kind) -> Snapshot:
    api, whole = HfApi(), {"repo_id": repository, "repo_type": kind}
    commit = _patiently(lambda: api.resolve_revision(**whole, revision=revision)).resolved
    cached = {name: path for name in files if (path := _cached(repository, commit, kind, name))}
    if files and len(cached) == len({*files}):
        sizes = {name: path.stat().st_size for name, path in cached.items()}
        return Snapshot(repository, revision, commit, kind, sizes, is_whole=False)
    try:
        info = _patiently(lambda: api.repo_info(**whole, revision=commit, files_metadata=True))
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        return Snapshot(repository, revision, commit, kind, sizes, is_whole=True)
    except (OfflineModeIsEnabled, *UNREACHABLE) as error:
        try:
            folder = Path(snapshot_download(**whole, revision=commit, local_files_only=True, allow_patterns=[]))
        except FAILURES:
            raise error from None
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        return Snapshot(repository, revision, commit, kind, sizes, is_whole=False)


def _cached(repository: str, commit: str, kind: Kind, name: str) -> Path | None:
    path = try_to_load_from_cache(repository, name, repo_type=kind, revision=commit)
    return Path(path) if isinstance(path, str) else None


def download(snapshot: Snapshot, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a file's path in the cache and its `describe_file`, downloading it if needed.

    A file that differs from the hash or size that the hub gave is downloaded again, once.
    """
    what, size = f"{name} of {snapshot}", snapshot.sizes[name]
    say(f"{snapshot.repository}/{name}: {amount(size)}" + ", already in the cache" * bool(snapshot.cached(name)))
    for is_forced in (False, True):
        options = {"repo_type": snapshot.kind, "revision": snapshot.commit, "force_download": is_forced}
        try:
            path = Path(_patiently(lambda given=options: hf_hub_download(snapshot.repository, name, **given)))
        except FAILURES as error:
            raise explain(error, what, snapshot.repository, snapshot.kind) from None
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
    """Return an answer of the hub, asked again after transient failures."""
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
    """Name the files most like a missing one, files of the same name in another folder first."""
    same = [candidate for candidate in names if PurePosixPath(candidate).name == PurePosixPath(name).name]
    near = list(dict.fromkeys([*same, *difflib.get_close_matches(name, names, n=3, cutoff=0.4)]))
    return f"near it: {', '.join(near[:3])}" if near else f"it has {', '.join([*names][:10]) or 'none at all'}"


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


def is_unknown_repository(error: Exception) -> bool:
    """Whether the hub knows no such repository, or hides it from this token."""
    if isinstance(error, RepositoryNotFoundError):
        return not isinstance(error, GatedRepoError)
    if isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
        return False
    return status_of(error) == 404 or (status_of(error) == 401 and get_token() is None)


def brief(error: Exception) -> str:
    """Return a failure in one line, without the token."""
    if (status := status_of(error)) is not None:
        return f"the hub {'throttles' if status == 429 else 'fails'} ({status})"
    if isinstance(error, httpx2.TimeoutException):
        return f"{constants.ENDPOINT} does not answer in time"
    text = str(error).partition("\n")[0] or type(error).__name__
    return text.replace(token, "***") if (token := get_token()) else text


def explain(error: Exception, what: str, repository: str, kind: str = "dataset") -> UserError:
    """Return a failure as a message: what was asked of which host, why it was refused, what to do."""
    error = _cause(error)
    if isinstance(error, OSError) and error.errno and not isinstance(error, HfHubHTTPError):
        try:
            with explain_write_errors(Path(constants.HF_HUB_CACHE)):
                raise error
        except UserError as refusal:
            return refusal
    return UserError(f"{what}, from {constants.ENDPOINT}: {_explain(error, repository, kind)}")


def _explain(error: Exception, repository: str, kind: str) -> str:
    if isinstance(error, HfHubHTTPError):
        return _explain_answer(error, repository, kind)
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not have it; unset HF_HUB_OFFLINE"
    if isinstance(error, UNREACHABLE):
        return (
            f"no connection ({brief(error)}); check the network, the proxy and HF_ENDPOINT, or fetch on a machine that "
            "has the network, with HF_HOME on a shared disk"
        )
    if is_transient(error) or (isinstance(error, OSError) and "Consistency check" in str(error)):
        return f"given up after several attempts: {brief(error)}; run again later"
    if isinstance(error, NO_HUB) or (isinstance(error, ValueError) and not isinstance(error, HFValidationError)):
        return f"what answers is not a hub ({type(error).__name__}); check HF_ENDPOINT"
    return f"{brief(error)}; check the repository's id in the recipe, and HF_ENDPOINT where it is set"


def _explain_answer(error: HfHubHTTPError, repository: str, kind: str) -> str:
    status, has_token = status_of(error), get_token() is not None
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    if isinstance(error, GatedRepoError):
        who = "the account of your token has not been let in" if has_token else "no token is set"
        advice = f"it is gated, and {who}: accept its terms at {page}, export HF_TOKEN with a token of that account"
    elif is_unknown_repository(error):
        hidden = "or your token may not read it" if has_token else "or it is private and no token is set"
        advice = f"there is no such repository, {hidden}: check its id in the recipe, or export HF_TOKEN"
    elif status == 401:
        advice = f"the hub refuses {TOKEN}, which is wrong or expired: make one at {constants.ENDPOINT}/settings/tokens"
    elif isinstance(error, RevisionNotFoundError):
        advice = f"it has no such revision: take a branch, tag or commit that {page}/commits/main shows"
    elif status == 429:
        advice = "the hub throttles (429): run again later; a token (HF_TOKEN) has a higher limit"
    elif is_transient(error):
        advice = f"the hub fails ({status}), for longer than we waited: run again later"
    else:
        token = f"; may {TOKEN} read it?" if has_token else ", and no token is set (HF_TOKEN)"
        advice = f"the hub refuses it ({status}: {error.server_message or 'without a reason'}){token}"
    return advice
