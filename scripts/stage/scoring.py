"""Estimate the rest of held-out scorings: a line of ``eval.sampled.jsonl`` is a batch of a scoring under way, and
``logs/scoring.json`` has the pace of the last one."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.records import Manifest, read_if_there, read_lines
from scripts.stage.paths import StagePaths
from scripts.stage.state import StageState

Batch = dict[str, Any]
"""`answers` by the rows' places (reward, reason of no verdict, text, tokens, cut), the policy's key `of`, `seconds`."""
SAMPLED = ".sampled.jsonl"


def seconds_to_score(recipe: Recipe, results: Path, states: Mapping[str, StageState]) -> dict[str, float]:
    """Return the expected seconds of the scorings to come by stage, where any scoring of the run has a pace.

    A stage that is to train is scored again. Damaged records give no estimate; their readers tell of the damage.
    """
    with suppress(UserError):
        to_come, measured = {}, {}
        records = {blend: results / "data" / blend / "manifest.json" for blend in recipe.blends}
        manifests = {blend: read for blend, path in records.items() if (read := read_if_there(path, Manifest))}
        for name, settings in recipe.stages.items() if recipe.evaluation else ():
            paths, begun = StagePaths(results / name), settings.before and recipe.is_scored(settings.before)
            of_test = recipe.evaluation.tested_blends(recipe) if name in recipe.evaluation.tested_stages(recipe) else []
            of_scores = recipe.evaluation.blends_in(recipe) if recipe.is_scored(name) else []
            parts = (paths.evaluation, "validation", of_scores, 1 if begun else 2), (paths.test, "test", of_test, 2)
            batches = [batch for path, *_ in parts for batch in read_lines(path.with_suffix(SAMPLED), Batch)]
            done = sum(len(batch["answers"]) for batch in batches)
            pace = {"responses": done, "seconds": sum(batch["seconds"] for batch in batches)}
            if pace := pace if done else read_if_there(paths.logs / "scoring.json", dict[str, float]):
                measured[name] = pace["seconds"] / max(1, pace["responses"])
            to_come[name] = -done + sum(
                policies * manifests[blend][split].get("rows", 0)
                for path, split, blends, policies in parts
                for blend in manifests.keys() & blends
                if states[name].left != 0 or not path.exists()
            )
        pace = median(measured.values()) if measured else 0.0
        return {name: measured.get(name, pace) * rows for name, rows in to_come.items() if measured and rows > 0}
    return {}
