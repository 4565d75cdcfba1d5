"""Answers that calls keep in ``results/samples``: what a killed call made, and what other runs need again."""

import json
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from scripts.errors import UserError, explain_refusal, user_name, warn
from scripts.files import append_json, duration, hidden_name
from scripts.records import parse_lines
from scripts.stage.store import is_trusted

EVERY = 20.0
"""Seconds between two lines of progress."""
Key = TypeVar("Key", int, str)
Answer = list[Any]


def folder_of_answers(store: Path, name: str, trusted: int | None = None) -> Path:
    """Return the folder of this name in the store, or one of this user's where that one is a stranger's.

    `trusted` is the number of the group whose files count as one's own. UserError where both are strangers'.
    """
    _make_store(store)
    shared, own = store / name, store / f"{name}.{os.geteuid()}"
    if not _is_strangers(shared, trusted):
        return shared
    owner = user_name(shared.lstat().st_uid)
    if _is_strangers(own, trusted):
        raise UserError(
            f"{own}: is {user_name(own.lstat().st_uid)}'s, and answers are taken only from oneself, or from the "
            "members of the site's group (group: NAME); move it away"
        )
    warn(
        f"{shared}: is {owner}'s, whose answers are not taken, so all is asked again in {own}; where the members of a "
        "group trust each other, name it in the site (group: NAME)"
    )
    return own


def _make_store(store: Path) -> None:
    """Make the store with the mode of the results' folder: who may add a run there may add answers."""
    if store.is_dir():
        return
    store.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.mkdir()
    except FileExistsError:
        return
    store.chmod(stat.S_IMODE(store.parent.stat().st_mode))


def _is_strangers(folder: Path, trusted: int | None) -> bool:
    """Whether a path is there and neither this user's nor the group's."""
    try:
        return not is_trusted(folder.lstat(), trusted)
    except FileNotFoundError:
        return False


def read_trusted(path: Path, trusted: int | None = None) -> bytes | None:
    """Return the content of a file of this user or the group; None for a stranger's, a link or no regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        is_file = stat.S_ISREG(state.st_mode)
        return file.read() if is_file and is_trusted(state, trusted) else None


def is_finite(value: Any) -> bool:
    """Whether a value is a number other than NaN and the infinities."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Kept(Generic[Key]):
    """Answers by key in a folder, from which a killed call goes on.

    Only answers that `is_answer` accepts count, from files of this user or of the group `trusted`; `kind` reads a key.
    A process appends to a file of its own, so calls at the same time, or one that outlives its own restart, do no harm:
    equal questions have equal answers, and the first counts.
    """

    def __init__(
        self,
        folder: Path,
        is_answer: Callable[[Answer], bool],
        kind: Callable[[str], Key] = int,
        trusted: int | None = None,
    ) -> None:
        self.folder = folder
        self.answers: dict[Key, Answer] = {}
        for name, answer in self._lines(trusted):
            with suppress(ValueError):  # of a name that is no key
                key = kind(name)
                if is_answer(answer):
                    self.answers.setdefault(key, answer)
        self.path = folder / f"{hidden_name(Path('answers')).name.lstrip('.')}.{time.time_ns()}.jsonl"
        self.about, self.wanted = "answers", set[Key]()
        self.done = self.earlier = 0
        self.began, self.told = time.monotonic(), 0.0

    def begin(self, about: str, wanted: Collection[Key]) -> None:
        """Tell how many answers this call wants and how many are there; `about` says in a word what they are."""
        self.about, self.wanted = about, set(wanted)
        self.done = self.earlier = len(self.answers.keys() & self.wanted)
        self.began = time.monotonic()
        print(f"{about}: {len(self.wanted)} in all, {self.earlier} of them from earlier calls", flush=True)

    def _lines(self, trusted: int | None) -> Iterator[tuple[str, Answer]]:
        """Yield the answers in the files that are trusted; the others are named once."""
        strange = []
        for path in sorted(self.folder.glob("*.jsonl")):
            content = read_trusted(path, trusted)
            if content is None:
                strange.append(path.name)
                continue
            for line in parse_lines(content.decode(errors="replace").splitlines(), dict[str, list[Any]]):
                yield from line.items()
        if strange:
            warn(
                f"{self.folder}: {len(strange)} files of others, or that are no files, are not read (the first is "
                f"{strange[0]})"
            )

    def add(self, answers: Mapping[Key, Answer]) -> None:
        """Keep answers, and tell the pace and the time left."""
        if not answers:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_json(self.path, answers)
        except PermissionError as error:
            raise UserError(explain_refusal(error)) from error
        self.done += len((answers.keys() - self.answers.keys()) & self.wanted)
        self.answers |= answers
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        is_last = self.done >= len(self.wanted)
        if now - self.told < EVERY and not is_last:
            return
        pace = (self.done - self.earlier) / max(now - self.began, 1e-9)
        left = duration((len(self.wanted) - self.done) / pace) if pace else "unknown time"
        print(f"{self.about}: {self.done} of {len(self.wanted)}, {pace:.3g} a second, {left} left", flush=True)
        self.told = now


def parsed(content: bytes | None) -> Any:
    """Return the value of a file of JSON; None without one, or where it is damaged."""
    try:
        return None if content is None else json.loads(content)
    except ValueError:
        return None
