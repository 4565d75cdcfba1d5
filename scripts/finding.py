"""Findings before anything costs, and the checks behind them, each asked at its moment."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

from scripts.errors import UserError

Subject = TypeVar("Subject")
"""A stage with its site, or a project."""


class Moment(Enum):
    """When a check can be asked for the first time."""

    READ = "whenever Snakemake reads the workflow, so for a dry run too"
    PLAN = "where it is known which stages train: by plan and dry run, and again before the first job"
    START = "before the first job of a call"
    PREFLIGHT = "in a stage's own preflight, where its rows and its start are there"


class Effort(IntEnum):
    """The cost of a check; once a finding stops the subject, checks of more effort are left out."""

    RECORDS = 1  # settings and small records
    WEIGHTS = 2  # files of models
    ROWS = 3  # whole splits, and whatever may be told together with their rows
    SERVERS = 4  # servers are started
    ANSWERS = 5  # answers are rewarded, and rows shown
    BATCH = 6  # a batch is trained


@dataclass(frozen=True)
class Finding:
    """A fact against a stage or a project. The message says where and what was seen, and what to do."""

    message: str
    about: str = ""
    """The stages, or another subject; empty where the message names the subject."""
    stops: bool = True
    """Whether nothing is started; else a warning."""
    trap: int | None = None
    """The number in docs/traps.md."""

    def __str__(self) -> str:
        """Return a line for people."""
        return f"{'error' if self.stops else 'warning'}: {self.line}"

    @property
    def line(self) -> str:
        """The line without its severity."""
        about = f"{self.about}: " if self.about else ""
        more = f" (docs/traps.md, trap {self.trap})" if self.trap is not None else ""
        return f"{about}{self.message}{more}"


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A function from a subject to findings, with the first moment at which all its files can be there."""

    moment: Moment
    find: Callable[[Subject], Iterable[Finding]]
    effort: Effort = Effort.ROWS
    again: str = ""
    """Why a stage's preflight asks an earlier check again, as files may have changed. Empty: asked once."""

    def is_due(self, moments: Collection[Moment]) -> bool:
        """Whether the check is asked at one of these moments."""
        return self.moment in moments or (bool(self.again) and Moment.PREFLIGHT in moments)


def ask(
    checks: Iterable[Check[Subject]], subject: Subject, moments: Collection[Moment] = frozenset(Moment)
) -> Iterator[Finding]:
    """Yield the findings of the checks of some moments, in the order of effort, then of the list."""
    effort = attrgetter("effort")
    due = sorted((check for check in checks if check.is_due(moments)), key=effort)
    for _, alike in groupby(due, key=effort):
        is_stopped = False
        for check in alike:
            for finding in check.find(subject):
                is_stopped = is_stopped or finding.stops
                yield finding
        if is_stopped:
            return


def refusal_of(function: Callable[..., Any], *arguments: Any, about: str = "") -> Iterator[Finding]:
    """Yield the UserError of a call as a finding; nothing where the call returns."""
    try:
        function(*arguments)
    except UserError as error:
        yield Finding(str(error), about)


def together(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in order, with one finding where several stages share a message."""
    shared: dict[Finding, list[str]] = {}
    for finding in findings:
        alike = replace(finding, about="")
        about = shared.setdefault(alike, [])
        if finding.about and finding.about not in about:
            about.append(finding.about)
    return [replace(finding, about=", ".join(about)) for finding, about in shared.items()]
