"""Claims in a remote store: who pushes or prunes there now.

::

    <remote>/trainings/<identity>.<step>.<token>.push    a push under way, with the hashes of all its objects
    <remote>/trainings/store.<token>.prune               a prune under way

No file system of fsspec has a lock, but all show a written file to later readers. So everybody first writes a claim,
and then looks for further claims: of two processes at once, at least one sees two claims.

- A push waits for prunes, and for pushes of the same training and step.
- A prune waits for nobody, and keeps the objects of every push under way.

A living process renews the claim. Without renewal a claim counts for `LEASE` seconds, by the server's clock. After half
as long without renewal (a process stopped, or cut off) the claim is broken: a prune ends, a push looks again.
"""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from scripts.errors import UserError
from scripts.processes import is_running, pid_namespace, process_start
from scripts.remote.bounded import Bounded

PUSH, PRUNE = "push", "prune"
CLAIM = re.compile(rf"(.+)\.([0-9a-f]{{16}})\.({PUSH}|{PRUNE})")
LEASE = 120.0
"""Seconds after which a claim that nobody renews counts no longer."""
RENEWED = 15.0
PAUSE = 1.0
"""Seconds between two looks for others, while waiting."""
LONGEST = 16 << 20
"""Bytes of a claim that are read at most."""
TIMES = ("LastModified", "mtime", "updated", "last_modified", "modified")
"""Where a file system's description of a file has the time of its last change, by the server's clock."""


@dataclass(frozen=True)
class Claim:
    """A claim of another process, as found in a listing; `name` is the training and step, or the store."""

    name: str
    token: str
    kind: str
    path: str
    age: float


@dataclass
class Held:
    """A claim of this process."""

    name: str
    token: str
    kind: str
    path: str
    content: bytes
    renewed: float = 0.0
    was_away: bool = False
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def is_broken(self) -> bool:
        """Whether the claim went without renewal for so long as to be passed over."""
        return self.was_away or _now() - self.renewed > LEASE / 2

    def check(self) -> None:
        """UserError for a broken claim."""
        if self.is_broken:
            raise UserError(
                f"{self.path}: was not renewed for over {LEASE / 2:.0f} s (stopped, or the store out of reach), so "
                "further processes may be at work in the store; nothing more is changed: start again"
            )


class Claims:
    """The claims in the folder of a remote store's manifests."""

    def __init__(self, place: Bounded, folder: str) -> None:
        """`place`: the file system; `folder`: where the manifests are."""
        self.place, self.folder = place, folder

    @contextmanager
    def of_push(self, name: str, objects: Collection[str]) -> Iterator[Held]:
        """Claim a training and step for a push of objects, once no prune and no second push of the step is at work.

        Of two pushes at once, the greater token steps back (Lamport's one-bit algorithm).
        """
        is_told = False
        while True:
            with self._held(name, PUSH, objects) as held:
                before = [each for each in self._pushes_of(name, held) if each.token < held.token]
                if not before:
                    self._wait_for_others(name, held)
                    yield held
                    return
            if not is_told:
                print(f"{self.folder}/{name}: is being pushed by another process; waiting", flush=True)
                is_told = True
            time.sleep(2 * PAUSE)

    @contextmanager
    def of_prune(self) -> Iterator[Held]:
        """Claim the store for a prune; `pushed` then returns the objects to keep."""
        with self._held("store", PRUNE, ()) as held:
            yield held

    def pushed(self, held: Held) -> dict[str, set[str]]:
        """Return the objects of every push at work, by training and step."""
        found: dict[str, set[str]] = {}
        for claim in self._living(held):
            content = self._content(claim) if claim.kind == PUSH else None
            if content is not None:
                found.setdefault(claim.name, set()).update(content.get("objects", ()))
        return found

    def now(self, held: Held) -> float:
        """Return the time by the server's clock, in seconds since the epoch; UserError where the server has none."""
        time_there = changed_at(self._files().get(held.path.rpartition("/")[2], {}))
        if time_there is None:
            raise UserError(f"{self.place.where}: lists files without times, so no file counts as old; not pruned")
        return time_there

    def remove_dead(self, held: Held) -> None:
        """Remove the claims of killed processes."""
        for claim in self._all(held):
            if claim.age > LEASE or not self._may_live(claim):
                remove_if_there(self.place, claim.path)

    def _wait_for_others(self, name: str, held: Held) -> None:
        """Wait for prunes, and for pushes of the same training about to step back."""
        is_told = False
        while True:
            living = self._living(held)
            pruning = any(each.kind == PRUNE for each in living)
            # A push with a smaller token waits for this one, and must not be waited for.
            pushing = any(each.name == name and each.token > held.token for each in living)
            if not pruning and not pushing:
                return
            if pruning and not is_told:
                print(f"{self.folder}: the store is being pruned; waiting for the end", flush=True)
                is_told = True
            time.sleep(PAUSE)

    def _pushes_of(self, name: str, held: Held) -> list[Claim]:
        return [each for each in self._living(held) if each.kind == PUSH and each.name == name]

    def _living(self, held: Held) -> list[Claim]:
        """Return the claims of processes possibly at work."""
        return [each for each in self._all(held) if each.age <= LEASE and self._may_live(each)]

    def _all(self, held: Held) -> list[Claim]:
        """Return all claims of other processes with ages; the clock is the time of the held claim."""
        described = self._files()
        now = changed_at(described.get(held.path.rpartition("/")[2], {}))
        found = []
        for name, each in described.items():
            match = CLAIM.fullmatch(name)
            if match is None or match[2] == held.token:
                continue
            written = changed_at(each)
            # Without times every claim counts: rather wait than remove what another process needs.
            age = 0.0 if now is None or written is None else now - written
            found.append(Claim(match[1], match[2], match[3], f"{self.folder}/{name}", age))
        return found

    def _may_live(self, claim: Claim) -> bool:
        """Whether the process of a claim may be at work; the process table knows for processes of the same host."""
        content = self._content(claim)
        if content is None:
            return False
        if (content.get("host"), content.get("pid_namespace")) != (socket.gethostname(), pid_namespace()):
            return True
        pid, start = content.get("pid"), content.get("process_start")
        return not isinstance(pid, int) or is_running(pid, start)

    def _files(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the files beside the claims, by name."""
        return {each["name"].rpartition("/")[2]: each for each in self.place.entries(self.folder)}

    def _content(self, claim: Claim) -> dict[str, Any] | None:
        """Return a claim's content: None for a claim removed meanwhile, nothing for a damaged claim."""
        try:
            content = json.loads(self.place.read(claim.path, LONGEST))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    @contextmanager
    def _held(self, name: str, kind: str, objects: Collection[str]) -> Iterator[Held]:
        """Hold a claim, renewed by a thread, while the block runs; further claims do not matter."""
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "pid_namespace": pid_namespace(),
            "objects": sorted(objects),
        }
        token = secrets.token_hex(8)
        path = f"{self.folder}/{name}.{token}.{kind}"
        held = Held(name, token, kind, path, json.dumps(content).encode())
        self.place.make_folder(self.folder)
        self._renew(held)
        heart = threading.Thread(target=self._beat, args=(held,), daemon=True)
        heart.start()
        try:
            yield held
        finally:
            held.stop.set()
            heart.join()
            with suppress(Exception):  # a store out of reach: the claim ends by its age
                remove_if_there(self.place, path)

    def _renew(self, held: Held) -> None:
        """Write the claim again; counted from the begin of the request, never later than by the server."""
        began = _now()
        self.place.write(held.path, held.content)
        held.renewed = began

    def _beat(self, held: Held) -> None:
        while not held.stop.wait(RENEWED):
            held.was_away = held.is_broken
            with suppress(Exception):  # said by `check` once it has lasted
                self._renew(held)


def changed_at(described: Mapping[str, Any]) -> float | None:
    """Return when a file was last changed, in seconds since the epoch by the server's clock; None where not said."""
    for key in TIMES:
        written = described.get(key)
        if isinstance(written, str) and written:
            written = datetime.fromisoformat(written)
        if isinstance(written, datetime):
            # A file system that leaves the zone out means UTC.
            written = (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()
        if isinstance(written, int | float):
            return float(written)
    return None


def remove_if_there(place: Bounded, path: str) -> None:
    """Remove a file, unless a second process was faster."""
    with suppress(FileNotFoundError):
        place.remove(path)


def _now() -> float:
    """Return the seconds since the boot; the clock goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
