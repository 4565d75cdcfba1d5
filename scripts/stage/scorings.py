"""Tell which held-out scores are to be taken, why, and how long they take, from records alone.

Scores are due where they are missing, of another export, asked otherwise than the recipe asks today, of rows that are
made anew, or beside a start's scores that are due. ``eval.json`` notes the settings by which they were taken; scores of
earlier commits note how responses were decoded.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.errors import UserError
from scripts.recipe.graph import EXPORT
from scripts.recipe.recipe import Recipe
from scripts.records import Evaluation, ExportRecord, Manifest, Pace, read_if_there, read_lines
from scripts.stage.paths import StagePaths
from scripts.stage.rule_settings import scores_settings
from scripts.stage.settings_file import settings_written

Batch = dict[str, Any]
"""`answers` by the rows' places (reward, reason of no verdict, text, tokens, cut), the policy's key `of`, `seconds`."""
SAMPLED = ".sampled.jsonl"
ROLLOUTS = "rollouts.parquet"
"""The file that stands for a start with scores of its own."""
NEVER = "never taken"
COMES_FIRST = " is made first"
"""How the reason ends to score what is not there yet."""


@dataclass(frozen=True)
class Part:
    """A file of scores: the rows' blends and split, how many policies answer the rows, and a quantised export."""

    path: Path
    split: str
    blends: tuple[str, ...]
    policies: int
    quantized: Path | None = None


@dataclass(frozen=True)
class Scoring:
    """The scores of a stage to come: why, the responses still to be sampled, and the expected seconds.

    None: the number of rows, or the pace of any scoring, is unknown.
    """

    stage: str
    why: str
    responses: int | None
    seconds: float | None


def parts_of(recipe: Recipe, results: Path, name: str) -> list[Part]:
    """Return the files of held-out scores that a stage or checkpoint gets, and the test scores of a chain's end."""
    graph, paths = recipe.graph, StagePaths(results / name)
    start, found = graph[name], []
    if start.is_scored_itself:
        blends = tuple(rows.name for rows in graph.scored_rows)
        policies = 1 if start.scored_before else 2
        found.append(Part(paths.evaluation, "validation", blends, policies))
        if start.settings.quantize:
            folder = paths.directory / "quantized"
            found.append(Part(folder / "eval.json", "validation", blends, 1, folder / EXPORT))
    if start in graph.ends:
        found.append(Part(paths.test, "test", tuple(rows.name for rows in graph.tested_rows), 2))
    return found


@dataclass
class DueScores:
    """Why scores are due, asked once of each stage, checkpoint or choice.

    `remade` are the blends whose splits are made anew, `content_of` returns the content of an export, None for one that
    is to come.
    """

    recipe: Recipe
    results: Path
    remade: Collection[str]
    content_of: Callable[[str], str | None]

    def __post_init__(self) -> None:
        self._known: dict[Path, str] = {}
        self._asked = scores_settings(self.recipe, self.results) if self.recipe.evaluation else None

    def why(self, name: str) -> str:
        """Return why held-out scores of a stage, checkpoint or choice are to be taken; nothing where they stay."""
        with suppress(UserError):  # of a damaged record, of which the stages' states tell
            if self.recipe.graph[name].is_scored and self.content_of(name) is None:
                return f"{name}{COMES_FIRST}"
        reasons = (self.of_part(name, part) for part in parts_of(self.recipe, self.results, name))
        return next(filter(None, reasons), "")

    def of_part(self, name: str, part: Part) -> str:
        """Return why a file of scores is to be made; nothing where it stays."""
        if part.path not in self._known:
            self._known[part.path] = ""
            with suppress(UserError):  # of a damaged record, of which the stages' states tell
                self._known[part.path] = self._of_part(name, part)
        return self._known[part.path]

    def _of_part(self, name: str, part: Part) -> str:
        content = self._content_of(name, part)
        if content is None:
            return f"{name}{COMES_FIRST}"
        record = read_if_there(part.path, Evaluation)
        if record is None:
            return NEVER
        if record.get("content", content) != content:
            return "of another export"
        if self._is_asked_otherwise(record):
            return "evaluation changed"
        return self._of_rows(record, part) or self._of_start(name, record, part)

    def _content_of(self, name: str, part: Part) -> str | None:
        """Return the content of the export that a file of scores is of; None for one that is to come."""
        content = self.content_of(name)
        if content is None or part.quantized is None:
            return content
        exported = read_if_there(part.quantized, ExportRecord)
        return exported["content"] if exported else None

    def _of_rows(self, record: Evaluation, part: Part) -> str:
        """Return how the rows differ from those that were scored."""
        made = [blend for blend in part.blends if blend in self.remade]
        if made:
            return f"rows of {', '.join(made)} are made anew"
        return "other rows" if self._has_other_rows(record, part) else ""

    def _of_start(self, name: str, record: Evaluation, part: Part) -> str:
        """Return that the scores before the stage are to be taken, or are from elsewhere than they were."""
        if part.split != "validation" or part.quantized:
            return ""
        scored = self.recipe.graph[name].scored_before
        had_scores = record.get("start", ROLLOUTS if scored else "") == ROLLOUTS
        if had_scores != bool(scored):
            return "the scores before are taken otherwise"
        before = [start.name for start in scored if self.why(start.name)]
        return f"{before[0]} is scored" if before else ""

    def _is_asked_otherwise(self, record: Evaluation) -> bool:
        """Whether scores were taken by other settings of the evaluation than today's."""
        then = record.get("settings") or settings_written(self.results / "settings/evaluate.json")
        now = json.loads(self._asked.text)
        is_edited = bool(then) and then != now and not self._asked.grows(then)
        is_decoded_otherwise = record.get("decoding") != self.recipe.evaluation.decoding
        return is_edited or is_decoded_otherwise

    def _has_other_rows(self, record: Evaluation, part: Part) -> bool:
        """Whether scores are of another number of rows than the splits have; unknown numbers are the same."""
        scored = [scores.get("rows") for scores in record.get("environments", {}).values()]
        counts = [rows_in(self.results, blend, part.split) for blend in part.blends]
        if None in scored or None in counts:
            return False
        return sum(scored) != sum(counts)


def rows_in(results: Path, blend: str, split: str) -> int | None:
    """Return the rows of a blend's split; None where the blend, the split or its count is not there."""
    manifest = read_if_there(results / "data" / blend / "manifest.json", Manifest) or {}
    return manifest.get(split, {}).get("rows")


def scorings(recipe: Recipe, results: Path, names: Collection[str], due: DueScores) -> dict[str, Scoring]:
    """Return the scorings to come by stage, checkpoint or choice, of those in `names`.

    Damaged records give no estimate; their readers tell of the damage.
    """
    with suppress(UserError):
        found, paces = {}, {name: _pace_of(recipe, results, name) for name in names}
        measured = {name: pace for name, pace in paces.items() if pace is not None}
        usual = median(measured.values()) if measured else None
        for name in names:
            why = due.why(name)
            if not why:
                continue
            responses = _responses_left(recipe, results, name, due)
            pace = measured.get(name, usual)
            seconds = None if pace is None or responses is None else pace * responses
            found[name] = Scoring(name, why, responses, seconds)
        return found
    return {}


def _responses_left(recipe: Recipe, results: Path, name: str, due: DueScores) -> int | None:
    """Return the responses of the scores to come, without those that an interrupted call sampled; None: unknown."""
    left = 0
    for part in parts_of(recipe, results, name):
        if not due.of_part(name, part):
            continue
        for blend in part.blends:
            rows = rows_in(results, blend, part.split)
            if rows is None and part.split == "test":
                rows = recipe.blends[blend].test_rows or None
            if rows is None:
                return None
            left += part.policies * rows
        left -= sum(len(batch["answers"]) for batch in read_lines(part.path.with_suffix(SAMPLED), Batch))
    return max(0, left)


def _pace_of(recipe: Recipe, results: Path, name: str) -> float | None:
    """Return the seconds of a response: of a scoring under way, or else of the last one; None before any."""
    batches = [
        batch for part in parts_of(recipe, results, name) for batch in read_lines(part.path.with_suffix(SAMPLED), Batch)
    ]
    done = sum(len(batch["answers"]) for batch in batches)
    if done:
        return sum(batch["seconds"] for batch in batches) / done
    pace = read_if_there(StagePaths(results / name).logs / "scoring.json", Pace)
    return pace["seconds"] / max(1, pace["responses"]) if pace else None


def words_of_rescored(found: Mapping[str, Scoring]) -> Iterator[str]:
    """Yield a line for each reason to score models that are there, with the stages that share it."""
    reasons: dict[str, list[str]] = {}
    for scoring in found.values():
        if not scoring.why.endswith(COMES_FIRST):
            reasons.setdefault(scoring.why, []).append(scoring.stage)
    for why, names in reasons.items():
        yield f"held-out scores to come of {', '.join(names)}: {why}"
