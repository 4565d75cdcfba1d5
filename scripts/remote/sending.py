"""Push a training to a remote store; at the end all files of the manifest are there."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from scripts.errors import UserError
from scripts.files import sha256_file
from scripts.remote.claims import Claims, remove_if_there
from scripts.remote.remote_store import GoneError, Manifest, RemoteStore
from scripts.remote.trust import lack_of_key, signed

ROUNDS = 5
"""So often a push looks whether all is there before it gives up."""


def send(store: RemoteStore, manifest: Manifest, paths: Mapping[str, Path], is_hashed: bool = False) -> int:
    """Put the missing files of a manifest, then the manifest; return the bytes sent.

    `paths`: the place of every file of the manifest. An object of another size, or marked as damaged, is sent again;
    with `is_hashed` every object there is read and hashed. The checkpoint of a published step stays in the store.
    UserError without a needed key, and without a store.
    """
    if lack := lack_of_key(store.url, store.key):
        raise UserError(lack)
    store.begin_to_push()
    name = f"{manifest['identity']}.{manifest['step']}"
    objects = {file["sha256"] for file in manifest["files"].values()}
    claims = Claims(store.place, store.path_of("trainings"))
    sent = 0
    for _ in range(ROUNDS):
        with claims.of_push(name, objects) as held:
            whole = _joined(store, manifest)
            if whole is None:
                return sent
            sent += _send_objects(store, manifest, paths, is_hashed)
            store.place.write(store.path_of(f"trainings/{name}.json"), msgspec.json.encode(signed(whole)))
            # Whoever passed over a claim that was not renewed in time may have removed what was there.
            is_done = _has(store, whole) and not held.is_broken
        if is_done:
            return sent
        is_hashed = False
    raise UserError(f"{store.url}: objects of {name} go away during the push; does an earlier version prune there?")


def _joined(store: RemoteStore, manifest: Manifest) -> Manifest | None:
    """Return the manifest to write, joined with the store's manifest of the step; None to leave the store's.

    A published step does not become passing, and keeps the checkpoint.
    """
    try:
        there = store.manifest(manifest["identity"], manifest["step"])
    except GoneError:
        return manifest
    except UserError as error:
        print(f"{error}; written again", flush=True)
        return manifest
    if there.get("is_passing"):
        return manifest
    listed = f"checkpoints/step_{manifest['step']}/files.json"
    is_same = there["files"].get(listed) == manifest["files"].get(listed)
    own = {file["sha256"] for file in manifest["files"].values()}
    lost = store.lacking(there["files"]).keys() - own
    if lost or (is_same and manifest["weights"]):
        return Manifest(**{**manifest, "is_passing": False})
    if not is_same:
        what = f"step {manifest['step']} of {manifest['identity']}"
        print(f"{store.url}: has {what} with different bits, and keeps them; nothing is pushed", flush=True)
        return None
    files = there["files"] | manifest["files"]
    return Manifest(**{**manifest, "files": files, "weights": there["weights"], "is_passing": False})


def _send_objects(store: RemoteStore, manifest: Manifest, paths: Mapping[str, Path], is_hashed: bool) -> int:
    """Put the missing, cut or damaged objects of a manifest; return the sum of bytes."""
    sizes = {file["sha256"]: file["bytes"] for file in manifest["files"].values()}
    lacking = store.lacking(manifest["files"])
    if is_hashed:
        there = [digest for digest in sizes if digest not in lacking]
        lacking |= {digest: sizes[digest] for digest in there if store.hashed(digest) != digest}
    sources: dict[str, Path] = {}
    for name, file in manifest["files"].items():
        digest = file["sha256"]
        if digest not in lacking:
            continue
        # A checkpoint's files were hashed a moment ago; those of an export may have changed since they were described.
        if not name.startswith("checkpoints/") and sha256_file(paths[name]) != digest:
            raise UserError(
                f"{paths[name]}: not the file in the export's record, so not pushed; export the stage again"
            )
        sources[digest] = paths[name]
    store.put(sources)
    for digest in lacking:
        remove_if_there(store.place, store.path_of(f"damaged/{digest}"))
    return sum(lacking.values())


def _has(store: RemoteStore, manifest: Manifest) -> bool:
    """Whether the store has a manifest, and every object named there."""
    try:
        store.entry(manifest["identity"], manifest["step"])
    except GoneError:
        return False
    return not store.lacking(manifest["files"])
