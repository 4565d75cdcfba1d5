"""Remove trainings from a remote store, and objects without a training."""

import re
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from scripts.errors import UserError
from scripts.remote.claims import Claims, changed_at, remove_if_there
from scripts.remote.remote_store import RemoteStore

DAY = 86400.0
"""Files that no manifest names are removed once they are this old, in seconds: a push of an earlier version, which
claims nothing, may be at work on younger ones."""
HIDDEN = re.compile(r".+\.[0-9a-f]{16}")
"""The name of a file while it is written; a kill leaves it."""


@dataclass(frozen=True)
class Pruned:
    """The result of a prune, or of a dry run: manifests and bytes removed, and bytes too young to be removed."""

    trainings: int
    freed: int
    too_young: int


@dataclass(frozen=True)
class Choice:
    """The files for a prune to remove: paths of manifests, and of objects and leftovers with a sum of bytes."""

    manifests: tuple[str, ...]
    files: tuple[str, ...]
    freed: int
    too_young: int


def prune(
    store: RemoteStore, trainings: Collection[tuple[str, int]], is_all: bool = True, is_dry: bool = False
) -> Pruned:
    """Remove manifests, and the objects named there and in no remaining manifest.

    With `is_all` also leftovers of killed processes and objects without a manifest, a day old by the server's clock.
    Objects of a push under way stay; UserError for a push of the same trainings.
    """
    if is_dry:
        return _counted(_choice(store, trainings, is_all, set(), time.time()))
    claims = Claims(store.place, store.path_of("trainings"))
    with claims.of_prune() as held:
        # First the claims and then the manifests: a push has the one or the other.
        pushed = claims.pushed(held)
        busy = [f"{identity} step {step}" for identity, step in trainings if f"{identity}.{step}" in pushed]
        if busy:
            raise UserError(f"{store.url}: {', '.join(busy)}: is being pushed, so nothing is removed; wait for the end")
        claimed = set().union(*pushed.values())
        choice = _choice(store, trainings, is_all, claimed, claims.now(held))
        # Others go by a manifest, so it goes first.
        _remove(store, choice.manifests, held.check)
        _remove(store, choice.files, held.check)
        if is_all:
            claims.remove_dead(held)
    store.look_again()
    return _counted(choice)


def _counted(choice: Choice) -> Pruned:
    return Pruned(len(choice.manifests), choice.freed, choice.too_young)


def _choice(
    store: RemoteStore, trainings: Collection[tuple[str, int]], is_all: bool, claimed: Collection[str], now: float
) -> Choice:
    """Choose the files to remove. UserError for an unreadable manifest; a damaged manifest keeps all objects named."""
    doomed = {*trainings}
    kept = {*claimed}
    named: set[str] = set()
    store.look_again()
    for entry in store.entries():
        if (entry.identity, entry.step) in doomed:
            named |= entry.objects
        elif not entry.is_read:
            raise UserError(f"nothing is removed while a manifest cannot be read: {entry.problem}")
        else:
            kept |= entry.objects
    files: list[str] = []
    freed = too_young = 0
    marks = store.place.entries(store.path_of("damaged")) if is_all else []
    for described in (*store.object_files(), *marks):
        path = described["name"]
        digest = PurePosixPath(path).name
        if digest in kept:
            continue
        if digest in named or (is_all and _is_old(described, now)):
            files.append(path)
            freed += described["size"]
        elif is_all:
            too_young += described["size"]
    beside = store.place.entries(store.path_of("trainings")) if is_all else []
    for described in beside:
        if HIDDEN.fullmatch(PurePosixPath(described["name"]).name) and _is_old(described, now):
            files.append(described["name"])
    manifests = [store.path_of(f"trainings/{identity}.{step}.json") for identity, step in sorted(doomed)]
    return Choice(tuple(manifests), tuple(files), freed, too_young)


def _is_old(described: dict, now: float) -> bool:
    """Whether a file was last changed over a day ago; False without a time."""
    changed = changed_at(described)
    return changed is not None and now - changed > DAY


def _remove(store: RemoteStore, paths: Iterable[str], check: Callable[[], None]) -> None:
    """Remove files; a check before every file ends a prune with a broken claim."""

    def remove(path: str) -> None:
        check()
        remove_if_there(store.place, path)

    with ThreadPoolExecutor(store.place.at_once) as pool:
        for _ in pool.map(remove, paths):
            pass
