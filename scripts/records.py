"""Types and readers of records; damage is one message and never a traceback.

Records with one reader stand beside the reader. A type names the keys in use and keeps unknown keys, so records of
earlier and later commits are read alike. Names that become paths are checked here, once (scripts.names).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict, TypeVar

import msgspec

from scripts.errors import UserError
from scripts.files import AGAIN, read_bytes
from scripts.names import CHECKPOINT, EXPORT, SOURCE, Folder, PartName, check_listed

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Record = TypeVar("Record")


class File(TypedDict):
    """Size and hash of a file; a large file of a checkpoint may lack the hash."""

    bytes: Count
    sha256: str | None


Files = dict[str, File]


class SourceFile(File):
    """A file of a downloaded source."""

    xxh3: str


class Origin(TypedDict):
    """The source and revision of a blend, with counts of composed rows."""

    source: str
    revision: str
    composed: NotRequired[dict[str, Any]]
    generated: NotRequired[dict[str, Any]]
    file: NotRequired[str]
    unread: NotRequired[dict[str, dict[str, list[str]]]]


class SourceRecord(TypedDict):
    """data/source/record.json."""

    blends: dict[PartName, Origin]
    tables: NotRequired[dict[str, str]]
    files: dict[str, SourceFile]


class Dataset(TypedDict):
    """A dataset with its revision and a hash of the files used."""

    name: str
    revision: str
    content: NotRequired[str]


class Split(TypedDict, total=False):
    """One split of a blend."""

    sha256: Required[str]
    rows: Count
    bytes: Count
    environments: dict[str, Count]
    duplicates: Count
    prompts_trained_on: Count


class Manifest(TypedDict):
    """manifest.json of a blend."""

    train: Split
    validation: Split
    test: NotRequired[Split]
    source: NotRequired[Dataset | None]
    placeholders: NotRequired[dict[str, Count]]
    composed: NotRequired[dict[str, Any]]
    generated: NotRequired[dict[str, Any]]
    unread: NotRequired[dict[str, dict[str, list[str]]]]


# The training that an amended one goes on from, and the step.
AmendedFrom = TypedDict("AmendedFrom", {"from": PartName, "step": Count})


class Facts(TypedDict):
    """The hashes of everything that may change a stage's weights.

    `sampled` is there where earlier commits sampled rollouts by the start's generation_config.json too, `amended` where
    the training goes on from another's checkpoint.
    """

    config: str
    train_split: str | None
    validation_split: str | None
    parent_export: str | None
    roles: NotRequired[dict[str, str]]
    continues: NotRequired[str]
    sampled: NotRequired[str]
    amended: NotRequired[AmendedFrom]
    parent_adapter: NotRequired[str | None]


class RunIdentity(Facts):
    """run/identity.json."""

    identity: PartName


# The identity that a stage of the same facts has without the amendment.
_AmendedFor = TypedDict("_AmendedFor", {"for": PartName})


class Amendment(AmendedFrom, _AmendedFor):
    """An entry of amended.json.

    `for` is the identity of the stage without the amendment, `identity` the one with it; `changed` are keys of the
    config. The training it goes on from had reached `step` of `planned`.
    """

    identity: PartName
    planned: Count
    because: str
    changed: list[str]
    time: str


class Amendments(TypedDict):
    """amended.json of a stage."""

    amendments: list[Amendment]


class Again(TypedDict):
    """An entry of again.json: the store's folder for a further training of an identity, and the folder before."""

    identity: PartName
    folder: PartName
    before: PartName
    is_open: bool


class Agains(TypedDict):
    """again.json of a stage."""

    trainings: list[Again]


class TrainedAgain(TypedDict):
    """The comparison of a further training with the training before at a step."""

    folder: PartName
    before: PartName
    step: Count
    weights: Literal["equal", "other", "unknown"]


ComparedSteps = dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], TrainedAgain]


class Data(TypedDict):
    """The training data of a stage."""

    blend: PartName
    source: Dataset | None
    tables: dict[str, str | None]
    manifest: str


class Code(TypedDict):
    """A revision of Stagecoach."""

    commit: str | None
    version: NotRequired[str]
    dirty: bool | None
    scripts: str


class Image(TypedDict):
    """A container image."""

    name: str
    digest: str | None
    sha256: str | None


class Span(TypedDict):
    """The first and last step trained by a code and an image."""

    steps: tuple[int, int]
    code: Code | None
    image: Image | None


class DataEnded(TypedDict):
    """An end of the data before the planned step."""

    planned: Count
    rows_skipped: Count
    resumes: Count


class Selected(TypedDict):
    """The end of a stage with `stop_when`: the best step with its value, the last trained, the planned."""

    metric: str
    publish: str
    best: Count
    value: float
    last: Count
    planned: Count


class ModelSource(TypedDict):
    """The origin of a pretrained model; `content` is the export's."""

    name: str
    revision: str | None
    content: NotRequired[PartName]


class NamedTemplate(TypedDict):
    """A chat template named in a recipe."""

    name: str
    sha256: str


class Origins(TypedDict, total=False):
    """The origins of a checkpoint; `roles` and `models` are the starts besides the parent, trained and pretrained."""

    facts: Facts
    seed: int | None
    release: dict[str, str] | None
    data: Data
    data_ended: DataEnded
    selected: Selected
    amended: list[Amendment]
    again: TrainedAgain
    trained_by: list[Span]
    parents: list["Parent"]
    roles: dict[str, "Parent"]
    model: ModelSource
    models: dict[str, ModelSource]
    chat_template: NamedTemplate


class Parent(Origins):
    """A checkpoint's note of a parent."""

    stage: PartName
    step: Count
    identity: PartName
    content: PartName


class CheckpointRecord(Origins):
    """ckpt/record.json."""

    stage: PartName
    step: Count
    identity: PartName
    facts: Facts
    parents: list[Parent]
    files: Files


class ExportRecord(TypedDict):
    """hf/record.json; `source` for a pretrained model, `merged` for merged adapters, `code` for a model's own code."""

    source: NotRequired[ModelSource]
    merged: NotRequired[dict[str, Any]]
    quantized: NotRequired[dict[str, Any]]
    code: NotRequired[list[str]]

    stage: PartName
    step: Count
    identity: PartName
    content: PartName
    files: Files


@dataclass(frozen=True)
class Reach:
    """The step that an attempt trains to; with `is_end` the data end there, before the planned step."""

    step: Count
    is_end: bool = False


Reaches = dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], Reach]


class Change(TypedDict):
    """A difference of held-out scores with its intervals."""

    value: float
    low: float
    high: float
    joint_low: NotRequired[float]
    joint_high: NotRequired[float]


class Scores(TypedDict):
    """Held-out scores before and after a stage."""

    before: float | None
    after: float
    change: Change | None
    rows: NotRequired[Count]
    change_from_first: NotRequired[Change | None]
    tags: NotRequired[dict[str, "Scores"]]
    metrics: NotRequired[dict[str, "Scores"]]


class Figures(TypedDict):
    """A figure of held-out rows before and after a stage; null: not measured."""

    before: float | None
    after: float | None
    change: float | None


class HeldOutLoss(TypedDict, total=False):
    """What held-out rows of written answers gave; `step` was measured last."""

    rows: Required[int | None]
    step: Required[int | None]
    loss: Figures
    accuracy: Figures
    margin: Figures


class UnfinishedThoughts(TypedDict):
    """The responses of an export whose thoughts do not end: how many, their share, and the place of the first."""

    responses: Count
    share: float
    first: str


class Evaluation(TypedDict):
    """eval.json: scores of held-out prompts where a stage answers some, and of written answers the validation.

    `not_used` are settings of the model's generation_config.json that do not count, `settings` are those
    of the evaluation by which the scores were taken, `start` is the file that stood for the start.
    """

    stage: str
    environments: NotRequired[dict[str, Scores]]
    mean: NotRequired[Scores]
    validation: NotRequired[HeldOutLoss]
    content: NotRequired[str]
    decoding: NotRequired[dict[str, Any]]
    settings: NotRequired[dict[str, Any]]
    start: NotRequired[str]
    not_used: NotRequired[dict[str, Any]]
    unjudged: NotRequired[dict[str, Any]]
    gym_verdicts: NotRequired[Count]
    unfinished_thoughts: NotRequired[UnfinishedThoughts]


class Benchmark(TypedDict, total=False):
    """A benchmark's score, with the change from a parent on the same questions."""

    score: Required[float]
    samples: Required[Count]
    cut: float | None
    stderr: float | None
    metric: str
    before: float | None
    change: Change | None
    change_from_first: Change | None
    generation: dict[str, Any]
    key: PartName
    first: PartName | None


class Benchmarks(TypedDict):
    """benchmarks.json; `content` is the export's."""

    stage: PartName
    content: PartName
    benchmarks: dict[str, Benchmark]
    by: NotRequired[str]
    not_used: NotRequired[dict[str, Any]]


class Gate(TypedDict):
    """gate.json."""

    verdict: Literal["pass", "warn", "stop"]


class JudgedCriterion(TypedDict):
    """A criterion of a gate with the outcome."""

    metric: str
    environment: str | None
    value: float | None
    low: float | None
    high: float | None
    min: float | None
    max: float | None
    action: str
    outcome: str
    step: int | None
    says: str
    figure: str | None
    against: NotRequired[str | None]
    default: NotRequired[bool]


class Criteria(TypedDict):
    """criteria.json."""

    criteria: list[JudgedCriterion]
    verdict: NotRequired[str]


class Candidate(TypedDict):
    """A candidate of a choice; the score is null without scores, the interval with too few rows.

    `difference` is the score less the first candidate's, null for the first and for the `left_out` (with the reason).
    `tied`: chance explains the difference.
    """

    name: PartName
    identity: PartName
    step: Count
    content: PartName
    score: float | None
    low: float | None
    high: float | None
    difference: Change | None
    tied: bool
    left_out: str | None


class Choice(TypedDict):
    """choice.json: the chosen, best first, and the candidates by score, the left out last."""

    stage: PartName
    by: str
    chosen: Annotated[list[PartName], msgspec.Meta(min_length=1)]
    candidates: list[Candidate]


class SelectionFacts(TypedDict):
    """selection.json, as far as plans read it; `prompts_sha256` is of the split whose rows were judged."""

    prompts_sha256: NotRequired[str]


class SelectionShown(SelectionFacts):
    """selection.json, as the page of a generated blend shows it."""

    rows: Count
    environments: dict[str, Count]
    left_out: dict[str, Count]
    pass_rates: dict[str, list[Count]]
    lengths: list[tuple[Count, Count]]
    longer_chosen: float | None
    warnings: list[str]
    shown: list[dict[str, Any]]
    sampling: NotRequired[dict[str, Any]]


class SampledPace(TypedDict, total=False):
    """The pace of a shard's sampling, in the JSON file beside the responses; absent where nothing was sampled anew."""

    responses: Count
    seconds: float


class SampledShard(SampledPace):
    """The JSON file beside a shard's responses."""

    prompts: Count
    left_out: dict[str, Count]
    decoding: NotRequired[dict[str, Any]]
    not_used: NotRequired[dict[str, Any]]


class Pace(TypedDict):
    """logs/scoring.json: the responses of a stage's scoring, and the seconds they took."""

    responses: Count
    seconds: float


class MadeFrom(TypedDict):
    """made_from.json of the source: the settings by which the blends were fetched."""

    blends: dict[str, Any]


class LeftUnjudged(TypedDict):
    """unjudged.json: how many responses (hash: `of`) have no verdict, and the calls that ask again because of that."""

    of: str
    responses: Count
    calls: Count


class ShownTokens(TypedDict):
    """Consecutive tokens of a row: texts, and ids where complete."""

    name: str
    is_learnt: bool
    texts: list[str]
    ids: NotRequired[list[int]]


class ShownRow(TypedDict):
    """The tokens of a training row; a `remark` on all shown rows stands in the first."""

    line: Count
    tokens: Count
    learnt: Count
    parts: list[ShownTokens]
    remark: NotRequired[str]


class Tokens(TypedDict, total=False):
    """The preflight's counts of a split's tokens; older records have fewer."""

    longest: Count
    too_long: Count
    too_long_share: float
    answers_cut: Count
    with_special_tokens: Count


class TokensOfSplits(TypedDict):
    """The counts of the splits' tokens, and the length limit of a row."""

    limit: Count
    train: Tokens
    validation: Tokens


class TextsOfAKind(TypedDict):
    """What arrives of the texts of a kind: the shares that are rendered and learnt (None: none are to be learnt)."""

    texts: Count
    rendered: float
    learnt: float | None
    lost: Count
    lost_lines: list[Count]


class ArrivalRecord(TypedDict):
    """What arrives of the training rows that a stage reads, by kind of text.

    `rendered_rows` of them were rendered, as many as stand for all `forms` of rows; `unread` are unlike their kind, and
    the chat template refuses `refused`.
    """

    rows: Count
    rendered_rows: Count
    forms: Count
    unread: Count
    refused: Count
    texts: dict[str, TextsOfAKind]


class Preflight(TypedDict, total=False):
    """preflight.json; `rows_not_shown` is the reason for missing `rows`."""

    arrival: ArrivalRecord
    epochs: Count
    rows: list[ShownRow]
    rows_not_shown: str
    tokens: TokensOfSplits | None


DAMAGE = (msgspec.MsgspecError, ValueError, RecursionError)
ADVICE = {
    CheckpointRecord: "delete it, and Snakemake publishes the checkpoint again, without training",
    ExportRecord: "delete it, and Snakemake exports the checkpoint again",
    RunIdentity: (
        "the training of the directory is unknown: write the file again (the identity and facts of ckpt/record.json, "
        "where the stage is published from this directory), or move the directory away, and the stage trains anew"
    ),
    Reaches: "delete it; the next attempt works it out again",
    SourceRecord: "delete it, and Snakemake fetches the source again",
    Files: "delete the checkpoint's directory, and training resumes from the one before",
}


LISTS: dict[Any, Folder] = {
    CheckpointRecord: CHECKPOINT,
    ExportRecord: EXPORT,
    SourceRecord: SOURCE,
    Files: CHECKPOINT,
}
"""The records that list the files of a folder, with what the folder may hold."""


def read_record(path: Path, kind: type[Record]) -> Record:
    """Return a record with all keys; UserError with file, damage and remedy.

    Whatever it names is the name of a file or folder where the record says, so readers join names to folders.
    """
    return read_hashed(path, kind)[0]


def read_hashed(path: Path, kind: type[Record]) -> tuple[Record, str]:
    """Return a record as `read_record` does, with the SHA-256 of its file."""
    return _once(path, kind, partial(_read_now, path, kind))


def read_text(path: Path) -> str:
    """Return a file's text, with a mark in place of what is no UTF-8; UserError where it cannot be read."""
    return _once(path, str, lambda: read_bytes(path).decode(errors="replace"))


@dataclass(frozen=True)
class _Seen:
    """What was read of a file in a block of `each_read_once`, by the file's time, size and inode before that."""

    stamp: tuple[int, int, int]
    content: Any


_SEEN: ContextVar[dict[tuple[Path, Any], _Seen] | None] = ContextVar("files that were read", default=None)


def _once(path: Path, kind: Any, read: Callable[[], Any]) -> Any:
    """Return what `read` does of a file, or did before in this block where the file is as it was then."""
    seen = _SEEN.get()
    if seen is None:
        return read()
    stamp = _stamp_of(path)
    known = seen.get((path, kind))
    if known is not None and known.stamp == stamp:
        return known.content
    content = read()
    if stamp is not None:
        seen[path, kind] = _Seen(stamp, content)
    return content


@contextmanager
def each_read_once() -> Iterator[None]:
    """Let a block that only looks (plan, status) read each record once, and again where its file has changed.

    Readers share a record, so none may change it. A lock is read anew each time (`read_now`). Blocks within the block
    share what it has read; after it nothing is kept.
    """
    if _SEEN.get() is not None:
        yield
        return
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def read_now(path: Path, kind: type[Record]) -> Record | None:
    """Return a record as it is now, whatever a block has read before; None for a missing file."""
    return _read_now(path, kind)[0] if path.exists() or path.is_symlink() else None


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    """Return the time, size and inode of a file; None where it cannot be looked at."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


def _read_now(path: Path, kind: type[Record]) -> tuple[Record, str]:
    """Return a record and the hash of its file, read from the disk."""
    text = read_bytes(path)
    return _record_in(text, path, kind), hashlib.sha256(text).hexdigest()


def _record_in(text: bytes, path: Path, kind: type[Record]) -> Record:
    """Return the record in a file's content."""
    try:
        value = msgspec.json.decode(text)
        msgspec.convert(value, kind)
        if kind in LISTS:
            files = value if kind is Files else value["files"]
            check_listed(files, LISTS[kind])
    except DAMAGE as error:
        raise UserError(f"{path}: damaged ({error}); {ADVICE.get(kind, AGAIN)}") from None
    return value


def read_if_there(path: Path, kind: type[Record]) -> Record | None:
    """Return a record, or None for a missing file."""
    return read_record(path, kind) if path.exists() or path.is_symlink() else None


def read_lines(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Yield the records of a file of JSON lines; see `parse_lines`."""
    if path.exists():
        yield from parse_lines(read_bytes(path).decode(errors="replace").splitlines(), kind)


def parse_lines(lines: Iterable[str], kind: type[Record]) -> Iterator[Record]:
    """Yield the records in lines of JSON; cut or damaged lines are skipped."""
    for line in lines:
        try:
            value = json.loads(line)  # reads NaN, as logged by a diverging step
            msgspec.convert(value, kind)
        except DAMAGE:
            continue
        yield value
