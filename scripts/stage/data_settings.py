"""Settings of the rules that make data: the source, splits and checks of blends, and generated rows."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from scripts.contents import Contents, contents_of_run
from scripts.data.own_rows import DIGITS, has_own_rows
from scripts.data.source_record import content_of
from scripts.files import canonical_json, sha256_text
from scripts.recipe.blend import Blend
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.source import COMMIT
from scripts.records import LeftUnjudged, Manifest, SourceRecord, read_if_there
from scripts.rewards.judging_code import code_of
from scripts.stage.own_data import OwnData, record_if_sound
from scripts.stage.settings_file import RuleSettings, Settings

GENERATING = ("sample", "judge", "select")
"""The rules that make a generated blend, by whose names their settings go."""
UNJUDGED = "unjudged.json"
"""Beside judged.parquet: what could not be judged, for the next call to ask again."""
CONTENTS, OWN_TABLES = "contents", "own_tables"
"""Settings of the source: hashes of the rows in the user's own folders by blend, and of tables there."""
OF_OWN_FILES = frozenset({CONTENTS, OWN_TABLES})
FROM = "from"
"""A setting of splits: a hash of all that decides a blend's rows, where nothing else can change them."""


def data_settings(recipe: Recipe, results: Path) -> dict[str, RuleSettings]:
    """Return the settings of the rules that make data, by the contents of files as a run knows them."""
    data = results / "data"
    with contents_of_run(results) as contents:
        return settings_of_data(recipe, data, OwnData.of(recipe, data, contents), contents)


def settings_of_data(recipe: Recipe, data: Path, rows: OwnData, contents: Contents) -> dict[str, RuleSettings]:
    """Settings of the rules that make data: of the source, and of each blend's splits and check."""
    found = {"source": settings_of_source(recipe, data / "source/record.json", rows)}
    for name, blend in recipe.blends.items():
        manifest = data / name / "manifest.json"
        found[f"fill/{name}"] = _of_splits(recipe, name, manifest, rows)
        checked = blend.model_dump(mode="json", include={"kind", "environments", "allow"})
        found[f"check/{name}"] = RuleSettings(checked, [manifest.with_name("check.json")])
    for name in recipe.generated:
        found |= _of_generating(recipe, name, data, contents)
    return found


def _of_splits(recipe: Recipe, name: str, manifest: Path, rows: OwnData) -> RuleSettings:
    """Settings of a blend's splits; where its rows change by settings and by the user's own files alone, these too."""
    blend = recipe.blends[name]
    values = blend.split_settings(recipe.seed or 0)
    is_other_split = partial(_is_other_split, blend, manifest)
    made_from = manifest.with_name("made_from.json")
    if not rows.are_own or not _is_told_by_settings(recipe, name, rows.record):

        def differs(before: Settings) -> bool:
            """Whether the splits were made by other settings; before the source was fetched, these may tell more."""
            then = {name: value for name, value in before.items() if name != FROM}
            return then != json.loads(json.dumps(values))

        return RuleSettings(values, [manifest], is_other_split, made_from, differs)
    decides = {
        "blend": without_places(blend.source_settings()),
        "source": without_places(recipe.source.model_dump(mode="json")),
        "tables": recipe.tables,
        CONTENTS: rows.of_blend(name),
        OWN_TABLES: rows.tables,
    }
    told = values | {FROM: sha256_text(canonical_json(decides))[:DIGITS]}
    is_of_other_rows = rows.is_other(name) or rows.has_other_tables or is_of_other_source(manifest, name, rows.record)

    def is_contradicted() -> bool:
        return is_of_other_rows or is_other_split()

    def differs_from(before: Settings) -> bool:
        if FROM in before:
            return before != json.loads(json.dumps(told))
        return is_of_other_rows or before != json.loads(json.dumps(values))

    return RuleSettings(told, [manifest], is_contradicted, made_from, differs_from, frozenset({FROM}))


def told_by_settings(recipe: Recipe, results: Path) -> set[str]:
    """Return the blends whose settings tell all that decides their rows; none where no row is in an own folder."""
    record = record_if_sound(results / "data/source/record.json")
    if not has_own_rows(recipe):
        return set()
    return {name for name in recipe.fetched if _is_told_by_settings(recipe, name, record)}


def _is_told_by_settings(recipe: Recipe, name: str, record: SourceRecord | None) -> bool:
    """Whether a blend's rows can only change with its settings, or with files in the user's own folders.

    The hub's branches move, and synthetic rows are made together.
    """
    is_written_here = not recipe.source.publishes  # the tables follow from the source's settings
    origins = {} if record is None or is_written_here else record.get("tables", {})
    of_hub = [table for table, origin in origins.items() if origin != "folder"]
    are_pinned = all(COMMIT.fullmatch(recipe.tables.get(table, "")) for table in of_hub)
    return recipe.blends[name].is_told_by_settings(recipe.source) and are_pinned


def settings_of_source(recipe: Recipe, path: Path, rows: OwnData) -> RuleSettings:
    """Settings of the source, with the contents of the user's own files instead of where they are.

    What was fetched is compared by the source's record, which hashed the files while they were read.
    """
    blends = {name: blend.source_settings() for name, blend in recipe.fetched.items()}
    values = {"source": recipe.source.model_dump(mode="json"), "tables": recipe.tables, "blends": blends}
    values = without_places(values)
    own = {name: rows.of_blend(name) for name in recipe.fetched}
    own = {name: digest for name, digest in own.items() if digest is not None}
    told = {CONTENTS: own} if own else {}
    told |= {OWN_TABLES: rows.tables} if rows.tables else {}

    def is_contradicted() -> bool:
        return rows.are_other or _is_other_source(recipe, path)

    def differs_from(before: Settings) -> bool:
        then = {name: value for name, value in without_places(before).items() if name not in OF_OWN_FILES}
        return rows.are_other or then != json.loads(json.dumps(values))

    made_from = path.with_name("made_from.json")
    return RuleSettings(values | told, [path], is_contradicted, made_from, differs_from, OF_OWN_FILES)


def _of_generating(recipe: Recipe, name: str, data: Path, contents: Contents) -> dict[str, RuleSettings]:
    """Settings of the rules that sample the responses of a generated blend, judge them and select rows."""
    blend, folder = recipe.generated[name], data / name / "generated"
    told = recipe.model.reading
    asked = {
        "sample": (blend.source.asked | told, sorted(folder.glob("samples/*.parquet"))),
        "judge": (_of_judging(recipe, name, folder, contents), [folder / "judged.parquet"]),
        "select": (blend.select.model_dump(mode="json"), [folder / f"{name}.jsonl"]),
    }
    return {
        f"generated/{name}/{step}": RuleSettings(values, made, made_from=folder / f"{step}.json")
        for step, (values, made) in asked.items()
    }


def _of_judging(recipe: Recipe, name: str, folder: Path, contents: Contents) -> Settings:
    """Return what the verdicts on a generated blend's responses depend on besides the rows and the reward model.

    `asked_again` counts the calls that left responses without a verdict: the next call asks for them again.
    """
    rows, own = recipe.graph.rows(name), own_environments(recipe)
    judging, (prompts,) = rows.judging, rows.prompts
    values = judging.model_dump(mode="json", include={"gym"}) | recipe.model.reading
    environments = prompts.blend.environments
    values["code"] = {str(each): code_of(each, own, hash_of=contents.of).sha256 for each in environments}
    if judging.gym:
        values["code"]["gym"] = code_of("gym", {}, is_by_gym=True).sha256
    if rows.servers_elsewhere:
        values["servers"] = rows.servers_elsewhere
    unjudged = read_if_there(folder / UNJUDGED, LeftUnjudged)
    if unjudged and unjudged["calls"]:
        values["asked_again"] = unjudged["calls"]
    return values


def without_places(value: Any) -> Any:
    """Return settings without the paths of the user's own folders, whose contents count."""
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, dict):
        return value
    is_folder = value.get("kind") == "folder"
    return {key: without_places(each) for key, each in value.items() if not (is_folder and key == "path")}


def _is_other_source(recipe: Recipe, path: Path) -> bool:
    """Whether the source's record lacks a blend, or names another repository, pinned revision or seed."""
    origins = (read_if_there(path, SourceRecord) or {}).get("blends")
    return origins is not None and any(
        name not in origins or blend.contradicts(recipe.source, origins[name]) for name, blend in recipe.fetched.items()
    )


def is_of_sample(path: Path) -> bool:
    """Whether a path lies in the results of a sample of the rows."""
    return any(part.startswith("sample-") for part in path.parts)


def _is_other_split(blend: Blend, path: Path) -> bool:
    """Whether a manifest counts other held-out or test rows than a blend sets; of a sample it may count fewer."""
    manifest = read_if_there(path, Manifest)
    if manifest is None:
        return False
    if blend.split_by is not None:
        return True  # of an earlier commit, which held out the last rows
    is_sample = is_of_sample(path)
    held_out, tested = manifest["validation"].get("rows"), manifest.get("test", {}).get("rows", 0)
    if is_sample or held_out is None:
        return bool(tested) != bool(blend.test_rows)
    return tested != blend.test_rows or (isinstance(blend.holdout, int) and held_out != blend.holdout)


def is_of_other_source(path: Path, blend: str, record: SourceRecord | None) -> bool:
    """Whether a manifest was made from other files than the source's record now describes."""
    manifest = read_if_there(path, Manifest)
    content = ((manifest or {}).get("source") or {}).get("content")
    return bool(record and content) and content != content_of(record, blend)
