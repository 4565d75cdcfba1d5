"""Estimate the rest of held-out scorings: a line of ``eval.sampled.jsonl`` is a batch of a scoring under way, and
``logs/scoring.json`` has the pace of the last one."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from scripts.recipe.recipe import Recipe
from scripts.records import Manifest, read_if_there, read_lines
from scripts.stage.paths import StagePaths
from scripts.stage.state import StageState


class Batch(TypedDict):
    """Answers by the rows' places (reward, reason of no verdict, text, tokens, cut); `of`: the policy with the rows."""

    of: str
    answers: dict[str, tuple[float, str | None, str, int, bool]]
    seconds: float


def sampled_of(scores: Path) -> Path:
    """Return the file of a scoring under way; `scores` is eval.json or test.json."""
    return scores.with_suffix(".sampled.jsonl")


def seconds_to_score(recipe: Recipe, results: Path, states: Mapping[str, StageState]) -> dict[str, float]:
    """Return the expected seconds of the scorings to come by stage, where any scoring of the run has a pace.

    A stage that is to train is scored again.
    """
    to_come, measured = {}, {}
    for name, settings in recipe.stages.items():
        paths, begun = StagePaths(results / name), settings.parent and recipe.is_scored(settings.parent)
        of_test = recipe.evaluation.tested_blends(recipe) if name in recipe.evaluation.tested_stages(recipe) else []
        of_scores = recipe.evaluation.blends_in(recipe) if recipe.is_scored(name) else []
        parts = (paths.evaluation, "validation", of_scores, 1 if begun else 2), (paths.test, "test", of_test, 2)
        batches = [batch for path, *_ in parts for batch in read_lines(sampled_of(path), Batch)]
        done = sum(len(batch["answers"]) for batch in batches)
        pace = {"responses": done, "seconds": sum(batch["seconds"] for batch in batches)}
        if pace := pace if done else read_if_there(paths.logs / "scoring.json", dict[str, float]):
            measured[name] = pace["seconds"] / max(1, pace["responses"])
        to_come[name] = -done + sum(
            policies * _rows(results / "data" / blend / "manifest.json", split)
            for path, split, blends, policies in parts
            for blend in blends
            if states[name].left != 0 or not path.exists()
        )
    pace = median(measured.values()) if measured else 0.0
    return {name: measured.get(name, pace) * rows for name, rows in to_come.items() if measured and rows > 0}


def _rows(manifest: Path, split: str) -> int:
    splits: dict[str, Any] = read_if_there(manifest, Manifest) or {}
    return splits.get(split, {}).get("rows", 0)
