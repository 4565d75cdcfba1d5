"""Settings of rules as small files, which Snakemake compares by content like any other input.

``<results>/settings/<rule>.json`` holds settings of a whole run, ``settings/<rule>/<name>.json`` of a blend, stage or
choice. They are written whenever Snakemake reads the workflow. Results of versions before 0.3.0 have none, and get them
by `stagecoach migrate`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.contents import Contents, contents_of_run
from scripts.files import filled_by_program, write_text
from scripts.recipe.criteria import BENCHMARKS, HELD_OUT
from scripts.recipe.recipe import Recipe
from scripts.records import CheckpointRecord, Criteria, Gate, read_if_there, read_text
from scripts.snakemake_notes import forget_notes
from scripts.stage.again import folders_again
from scripts.stage.amendment import amendments_of
from scripts.stage.data_settings import settings_of_data
from scripts.stage.lost import lost_of, mark_of_loss
from scripts.stage.own_data import OwnData
from scripts.stage.paths import StagePaths
from scripts.stage.score_settings import settings_of_scores, settings_of_tasks
from scripts.stage.settings_file import FOLDER, RuleSettings, settings_written

LOST = "lost"
"""A setting of training: when the checkpoint was published whose files are gone."""


def settings_files(recipe: Recipe, results: Path, again: Mapping[str, str] | None = None) -> dict[Path, RuleSettings]:
    """Return the settings of every rule by the path of the settings file.

    `again` has the folders of the store in which this call is to train stages again.
    """
    with contents_of_run(results) as contents:
        return _all_settings(recipe, results, contents, again or {})


def _all_settings(
    recipe: Recipe, results: Path, contents: Contents, again: Mapping[str, str]
) -> dict[Path, RuleSettings]:
    """Return the settings of every rule by path, with files outside of results as `contents` knows them."""
    card = {"license": recipe.license} | recipe.card_facts
    named = {"card": RuleSettings(card, [results / name / "card.md" for name in recipe.stages])}
    named |= settings_of_data(recipe, results / "data", OwnData.of(recipe, results / "data", contents), contents)
    trained = (*recipe.stages, *recipe.checkpoints)
    for name in trained:
        named[f"gate/{name}"] = _of_gate(recipe, StagePaths(results / name))
        named[f"train/{name}"] = _of_training(recipe, StagePaths(results / name), again)
        if quantize := recipe.graph[name].settings.quantize:
            made = [results / name / "quantized/hf/record.json"]
            named[f"quantize/{name}"] = RuleSettings(quantize.model_dump(mode="json"), made)
    for name, choice in recipe.choices.items():
        values = choice.model_dump(mode="json", include={"stage", "by"})
        named[f"choose/{name}"] = RuleSettings(values, [results / name / "choice.json"])
    if recipe.evaluation:
        named["evaluate"] = settings_of_scores(recipe, results, contents)
        named["tasks"] = settings_of_tasks(recipe, results, contents)
    return {results / FOLDER / f"{name}.json": settings for name, settings in named.items()}


def scores_settings(recipe: Recipe, results: Path) -> RuleSettings:
    """Return the settings of held-out scores; the recipe has an evaluation."""
    with contents_of_run(results) as contents:
        return settings_of_scores(recipe, results, contents)


def write_settings(recipe: Recipe, results: Path, again: Mapping[str, str] | None = None) -> None:
    """Write every settings file whose text differs.

    `again` has the new folders of stages that the call trains again. A dry run writes the folders, too: the next call
    writes the file as before, and Snakemake finds no change.

    The settings file comes last, with its time, so that after a kill the next call does all of it again.
    """
    with contents_of_run(results) as contents:
        for path, settings in _all_settings(recipe, results, contents, again or {}).items():
            _write(recipe, path, settings)


def _write(recipe: Recipe, path: Path, settings: RuleSettings) -> None:
    """Write a settings file if its text differs, dated before what was made from the same settings."""
    is_new = not path.exists()
    made = [output for output in settings.outputs if output.exists()]
    if not is_new and read_text(path) == settings.text:
        _date_if_passed_over(path, settings, made)
        return
    before = settings_written(path)
    was_lost = before.pop(LOST, None) is not None
    has_come_back = was_lost and before == json.loads(settings.text)
    is_same = bool(settings.made_from) and not settings.differ()
    if not made or (is_new and not (is_same and settings.made_from.exists())):
        write_text(path, settings.text)
        return
    is_grown = settings.grows(before)
    had_other_inputs = is_grown and not settings.made_from  # the files that are settings now
    if had_other_inputs:  # Snakemake's notes of the outputs' inputs name others; the time stamps count now
        forget_notes(made)
    is_adopted = has_come_back or is_same or had_other_inputs
    then = min(output.stat().st_mtime_ns for output in made) - 1_000_000_000
    with filled_by_program(path) as fresh:
        fresh.write_text(settings.text, encoding="utf-8")
        if is_adopted:
            os.utime(fresh, ns=(then, then))


def _date_if_passed_over(path: Path, settings: RuleSettings, made: list[Path]) -> None:
    """Date a settings file now whose text is that of before although the data were made from something else.

    A file of rows was edited while it was fetched, and the edit was taken back.
    """
    if settings.differs_from is None or not made or not settings.made_from.exists():
        return
    is_older = path.stat().st_mtime_ns <= min(output.stat().st_mtime_ns for output in made)
    if is_older and settings.differ():
        os.utime(path)


def _of_training(recipe: Recipe, paths: StagePaths, again: Mapping[str, str]) -> RuleSettings:
    """Names of blend and starts, whose files may be older than the checkpoint, amendments, and a loss of its files."""
    stage = recipe.graph[paths.name].settings

    def is_other() -> bool:
        """Whether the checkpoint was trained on another blend or from another parent; a choice stands for any."""
        record = read_if_there(paths.record, CheckpointRecord) or {}
        parent = next((parent["stage"] for parent in record.get("parents", ())), None)
        is_other_parent = bool(record) and stage.parent not in recipe.choices and parent != stage.parent
        is_other_blend = record.get("data", {}).get("blend", stage.blend) != stage.blend
        return is_other_parent or is_other_blend or bool(asked) or bool(lost_of(recipe, paths))

    more = {name: value for name, value in (("roles", stage.roles), ("continues", stage.continues)) if value}
    trained = recipe.graph[paths.name].stage
    trains_in = folders_again(paths.sibling(trained))
    asked = [again[trained]] if trained in again and again[trained] not in trains_in else []
    if trains_in or asked:
        more["again"] = [*trains_in, *asked]
    amendments = amendments_of(paths.sibling(trained))
    if amendments:
        more["amended"] = [each["identity"] for each in amendments]
    written = paths.directory.parent / FOLDER / "train" / f"{paths.name}.json"
    lost = mark_of_loss(recipe, paths, settings_written(written).get(LOST))
    if lost is not None:
        more[LOST] = lost
    return RuleSettings({"blend": stage.blend, "parent": stage.parent, **more}, [paths.ckpt, paths.record], is_other)


def _of_gate(recipe: Recipe, paths: StagePaths) -> RuleSettings:
    stage = recipe.graph[paths.name].settings
    criteria = [criterion.model_dump(mode="json") for criterion in stage.gate]

    def is_other() -> bool:
        """Whether the verdict is of other criteria, or contradicts them; earlier commits had no default gate."""
        judged, gate = read_if_there(paths.criteria, Criteria), read_if_there(paths.gate, Gate)
        if judged is None or gate is None:
            return False
        kept = not stage.default_gate
        then = [_bounds(**criterion) for criterion in judged["criteria"] if kept or not criterion.get("default")]
        return then != [_bounds(**criterion) for criterion in criteria] or (
            judged.get("verdict", gate["verdict"]) != gate["verdict"]
        )

    switch = {} if stage.default_gate else {"default_gate": False}
    return RuleSettings({"criteria": criteria} | switch, [paths.gate], is_other)


def _bounds(
    metric: str, environment: str | None, against: str | None, benchmark: str | None = None, **rest: Any
) -> tuple[Any, ...]:
    """What a criterion asks for, whether the recipe or a verdict's record says it."""
    of = benchmark or environment if metric in ("held_out_change", "benchmark_score", "benchmark_change") else None
    since = against if metric in (*HELD_OUT, *BENCHMARKS) else None
    return metric, of, since, rest["min"], rest["max"], rest["action"]
