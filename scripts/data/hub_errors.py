"""What the hub's failures mean, which of them are transient, and what a person can do about the others."""

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from scripts.errors import UserError

TOKEN = "your token (HF_TOKEN, or the one of `hf auth login`)"  # noqa: S105


class EndedEarly(Exception):
    """A file's body ended before the size that the hub gave."""


class UnexpectedAnswer(Exception):
    """The answer is not a hub's."""


UNREACHABLE = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)
FAILURES = (
    httpx2.HTTPError,
    httpx2.InvalidURL,
    HFValidationError,
    OfflineModeIsEnabled,
    EndedEarly,
    UnexpectedAnswer,
)


def status_of(error: Exception) -> int | None:
    """The status of the hub's answer; None when there was none."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def is_transient(error: Exception) -> bool:
    """Whether the same request may go well later."""
    status = status_of(error)
    if status is not None:
        return status in {408, 429} or status >= 500
    broken = httpx2.TimeoutException | httpx2.NetworkError | httpx2.RemoteProtocolError | httpx2.ProxyError | EndedEarly
    return isinstance(error, broken)


def retry_after(error: Exception) -> int | None:
    """For how many seconds the hub asks to be left alone."""
    if not isinstance(error, HfHubHTTPError):
        return None
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    asked = headers.get("Retry-After", "")
    return int(asked) if asked.isdecimal() else None


def is_unknown_repository(error: Exception) -> bool:
    """Whether the hub knows no such repository, or says so to those who may not see it."""
    if isinstance(error, RepositoryNotFoundError):
        return not isinstance(error, GatedRepoError)
    if isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
        return False
    return status_of(error) == 404 or (status_of(error) == 401 and get_token() is None)


def brief(error: Exception) -> str:
    """A failure in one line, without the token."""
    status = status_of(error)
    if status is not None:
        reason = {429: "the hub throttles", 408: "the hub waited too long"}.get(status, "the hub fails")
        return f"{reason} ({status})"
    if isinstance(error, httpx2.TimeoutException):
        return f"{constants.ENDPOINT} does not answer in time"
    text = str(error).partition("\n")[0] or type(error).__name__
    return text.replace(token, "***") if (token := get_token()) else text


def explain(error: Exception, what: str, repository: str, kind: str = "dataset") -> UserError:
    """The failure as a message to a person: what was asked of which host, why it is not given, what to do."""
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
    if is_transient(error):
        return f"given up after several attempts: {brief(error)}; what came is kept: run again to go on from there"
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
    elif isinstance(error, RemoteEntryNotFoundError):
        advice = f"it has no such file: correct the recipe by {page}/tree/main"
    elif status == 429:
        wait = retry_after(error)
        when = f"in {wait} s" if wait else "later"
        advice = f"the hub throttles (429): run again {when}; a token (HF_TOKEN) has a higher limit"
    elif is_transient(error):
        advice = f"the hub fails ({status}), for longer than we waited: run again later; what came is kept"
    else:
        token = f"; may {TOKEN} read it?" if has_token else ", and no token is set (HF_TOKEN)"
        advice = f"the hub refuses it ({status}: {error.server_message or 'without a reason'}){token}"
    return advice
