"""Scores of a stage's held-out rows and benchmarks, with their changes, and the warnings on chosen scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scripts.model.generation_settings import words_of
from scripts.recipe.expand import VALIDATED
from scripts.recipe.sampling import words_of_decoding
from scripts.records import (
    Benchmark,
    Benchmarks,
    CheckpointRecord,
    Choice,
    Evaluation,
    Scores,
    read_if_there,
    read_record,
)
from scripts.report.page import short_name
from scripts.stage.bootstrap import Change
from scripts.stage.paths import StagePaths

UNKNOWN: Change = {"value": None, "low": None, "high": None}
"""A change without value or interval."""


class Score(NamedTuple):
    """A score before and after a stage; None: unknown. A benchmark has the standard `error`, and answers `cut`.

    `change` counts from the stage's start, `from_first` from the chain's first scored stage.
    """

    name: str
    rows: int | None
    before: float | None
    after: float
    change: Change
    from_first: Change
    error: float | None
    cut: float | None


def scores_of(record: Evaluation | Benchmarks | None) -> list[Score]:
    """Return the scores of an eval.json (environments, then the mean) or of a benchmarks.json."""
    if record is None:
        return []
    if "benchmarks" in record:
        entries = record["benchmarks"]
    elif "mean" in record:
        entries = record["environments"] | {"mean": record["mean"]}
    else:
        entries = {}  # a stage that answers no prompts
    return [_score(name, entry) for name, entry in entries.items()]


def scores_by_tag(record: Evaluation | None, key: Literal["tags", "metrics"] = "tags") -> list[Score]:
    """Return the scores of an eval.json by environment and tag, or its own metrics by environment and name."""
    environments = (record or {}).get("environments", {}).items()
    return [
        _score(f"{short_name(name)}: {part}", scores)
        for name, entry in environments
        for part, scores in entry.get(key, {}).items()
    ]


def sampling_sentences(record: Evaluation | Benchmarks | None) -> list[str]:
    """Return how a record's responses were sampled, and which settings of the model's folder did not count."""
    if record is None:
        return []
    sentences = []
    if decoding := record.get("decoding"):
        sentences.append(f"Sampled by evaluation of the recipe: {words_of_decoding(decoding)}.")
    for name, entry in record.get("benchmarks", {}).items():
        if generation := entry.get("generation"):
            settings = ", ".join(f"{key} {value}" for key, value in generation.items())
            sentences.append(f"{short_name(name)} is sampled by lm-eval's settings of the task: {settings}.")
    if unused := record.get("not_used"):
        sentences.append(f"{words_of(unused, 'evaluation.*')}.")
    return sentences


def _score(name: str, entry: Scores | Benchmark) -> Score:
    before, after = entry.get("before"), entry["after"] if "after" in entry else entry["score"]
    return Score(
        name=short_name(name),
        rows=entry.get("rows", entry.get("samples")),
        before=before,
        after=after,
        change=entry.get("change") or UNKNOWN | {"value": None if before is None else after - before},
        from_first=entry.get("change_from_first") or UNKNOWN,
        error=entry.get("stderr"),
        cut=entry.get("cut"),
    )


def scores_side_by_side(
    records: list[Evaluation | Benchmarks | None], scores_in: Callable[[Any], list[Score]] = scores_of
) -> dict[str, list[Score | None]]:
    """Return the scores of each environment, benchmark or tag, an entry (or None) a record; the mean last."""
    columns = [{score.name: score for score in scores_in(record)} for record in records]
    names = dict.fromkeys(name for scores in columns for name in scores)
    return {name: [scores.get(name) for scores in columns] for name in sorted(names, key=lambda name: name == "mean")}


def by_validation(choice: Choice) -> bool:
    """Whether a choice went by a figure of held-out rows of written answers."""
    return choice["by"] in VALIDATED


def _words_of_choice(choice: Choice, name: str) -> str:
    chosen = f"{name} was chosen among {len(choice['candidates'])} by {choice['by']}"
    if by_validation(choice):
        return f"{chosen}, on the rows measured here, so its figures flatter it."
    return f"{chosen}, on the rows scored here, so the scores overestimate it."


def selection_sentences(results: Path, chain: list[str]) -> list[str]:
    """Return the warnings on the scores of a chain's last stage; `chain`: folders' names, parents first.

    Scores that chose a stage overestimate it, the test split's score does not.
    """
    records = [read_if_there(StagePaths(results / name).record, CheckpointRecord) for name in chain]
    trained = [(record["identity"], record["step"]) for record in records if record]
    says, ends, is_scored = [], [StagePaths(results / chain[-1])], False
    for path in sorted(results.glob("*/choice.json")):
        choice = read_record(path, Choice)
        among = len(choice["candidates"])
        for each in choice["candidates"]:
            key = each["identity"], each["step"]
            if among > 1 and each["name"] in choice["chosen"] and key in trained:
                says.append(_words_of_choice(choice, each["name"]))
                is_scored = is_scored or not by_validation(choice)
                ends += [StagePaths(path.parent)] if key == trained[-1] else []
    test = next((found for folder in ends if (found := read_if_there(folder.test, Evaluation))), None)
    if test is not None:
        mean, change = test["mean"], test["mean"]["change"]
        figure = f"{mean['after']:.2f} after {chain[-1]}, {mean['before']:.2f} of the model that the chain started from"
        if change:
            figure += f" ({change['value']:+.2f}, 95 % interval {change['low']:+.2f} to {change['high']:+.2f})"
        says.append(f"On the test split, which no choice has used: {figure}.")
    elif is_scored:
        says.append("For a score without this bias, set evaluation.test: true in the recipe and test: N in a blend.")
    return list(dict.fromkeys(says))
