"""Trust in the manifests of a remote store: signed with a key, or unsigned in the user's own folder.

Whoever may write to a store gives pickles and files to a project's trainings. The hashes in a manifest hold
the files together; only a signature says who wrote the manifest.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from scripts.files import canonical_json

KEY = "STAGECOACH_STORE_KEY"
"""The environment variable with the project's key, by which manifests are signed and held against their signature."""
SIGNATURE = "signature"
Policy = Literal["required", "none"] | None
"""A config's `store.key`: a key is required, or none is; None: required but in a folder of one's own."""


def local_folder(url: str) -> Path | None:
    """Return the folder of a store on a mounted file system; None for another store."""
    protocol, separator, path = url.partition("://")
    if not separator:
        return Path(url)
    return Path(path) if protocol in ("file", "local") else None


def lack_of_key(url: str, policy: Policy) -> str | None:
    """Say that a needed key is missing, and how to set the key; None where nothing is missing. Asks no network."""
    if os.environ.get(KEY) or policy == "none":
        return None
    folder = local_folder(url)
    who = "whoever may write there gives this project's trainings files and pickles to read"
    if policy is None and folder is not None:
        if not folder.exists() or folder.stat().st_uid == os.geteuid():
            return None
        who = f"the folder is another user's, and {who}"
    return (
        f"{url}: {who}, so nothing is taken from there or pushed without a key. Set {KEY} to a secret of the project "
        "in the environment of every command and job. Where all who may write are trusted, add `key: none` below "
        "`store:` in config/config.yaml instead"
    )


def doubt_of(manifest: Mapping[str, Any], url: str, policy: Policy, owner: int | None) -> str | None:
    """Say why a manifest is not taken; None for a trusted writer.

    `owner`: the user id of the manifest's file on a mounted file system.
    """
    if policy == "none":
        return None
    key = os.environ.get(KEY)
    if key:
        is_signed = hmac.compare_digest(str(manifest.get(SIGNATURE, "")).encode(), signature_of(manifest, key).encode())
        return None if is_signed else f"not signed with the key in {KEY}, so nothing is taken from it"
    if lack := lack_of_key(url, policy):
        return f"not taken without a key: {lack}"
    if owner is not None and owner != os.geteuid():
        advice = f"set {KEY} for every push and pull, or add `key: none` below `store:` in config/config.yaml"
        return f"written by another user (id {owner}) and not signed, so nothing is taken from it; {advice}"
    return None


def signed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest, signed where there is a key."""
    bare = {name: value for name, value in manifest.items() if name != SIGNATURE}
    key = os.environ.get(KEY)
    return {**bare, SIGNATURE: signature_of(bare, key)} if key else bare


def signature_of(manifest: Mapping[str, Any], key: str) -> str:
    """Return the HMAC-SHA256 (RFC 2104) of a manifest without the signature."""
    bare = {name: value for name, value in manifest.items() if name != SIGNATURE}
    return hmac.new(key.encode(), canonical_json(bare).encode(), hashlib.sha256).hexdigest()
