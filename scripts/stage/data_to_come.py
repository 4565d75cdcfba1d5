"""Data that Snakemake would make anew if it ran now: fetched, split, or generated."""

import json
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from pathlib import Path

from scripts.contents import contents_of_run
from scripts.data.own_rows import gone_rows
from scripts.errors import UserError
from scripts.recipe.recipe import Recipe
from scripts.records import (
    ExportRecord,
    MadeFrom,
    Manifest,
    SelectionFacts,
    SourceRecord,
    read_if_there,
    read_record,
    read_text,
)
from scripts.stage.data_settings import (
    FROM,
    GENERATING,
    data_settings,
    is_of_other_source,
    is_of_sample,
    settings_of_data,
    settings_of_source,
    without_places,
)
from scripts.stage.own_data import OwnData, record_if_sound
from scripts.stage.paths import StagePaths
from scripts.stage.settings_file import RuleSettings, settings_written

COUNTS = ("holdout", "test")


def is_fetched(recipe: Recipe, results: Path) -> bool:
    """Whether the source's files are there and made from the settings and the user's own files of today."""
    data = results / "data"
    if not (data / "source/record.json").exists():
        return False
    with contents_of_run(results) as contents:
        rows = OwnData.of(recipe, data, contents)
    return not settings_of_source(recipe, data / "source/record.json", rows).differ()


def data_to_be_made(recipe: Recipe, results: Path) -> set[str]:
    """Return the blends whose data would be made anew if Snakemake ran now.

    When the source is fetched anew, a blend counts as unchanged whose own settings are and whose revision is pinned.
    """
    data = results / "data"
    record = read_if_there(data / "source/record.json", SourceRecord)
    with contents_of_run(results) as contents:
        rows = OwnData.of(recipe, data, contents)
        settings = settings_of_data(recipe, data, rows, contents)
    fetched = _fetched_anew(recipe, settings["source"], record, rows)
    fetched = {name for name in fetched if not _tells_its_rows(settings[f"fill/{name}"])}
    remade = fetched | {
        name
        for name in recipe.blends
        if not (manifest := data / name / "manifest.json").exists()
        or settings[f"fill/{name}"].differ()
        or (name in recipe.fetched and is_of_other_source(manifest, name, record))
    }
    generated = recipe.blends.keys() - recipe.fetched.keys() - remade
    remade |= {name for name in generated if _is_generated_anew(recipe, results, name, settings)}
    lineages = {name: {rows.name for rows in recipe.graph.rows(name).lineage} for name in recipe.blends}
    return {name for name, lineage in lineages.items() if not remade.isdisjoint(lineage)}


def gone_files(recipe: Recipe, results: Path) -> list[str]:
    """Return a line for each file or folder of rows that is gone since it was fetched."""
    with contents_of_run(results) as contents:
        gone = gone_rows(recipe, contents)
    return gone if gone and is_fetched(recipe, results) else []


def _fetched_anew(recipe: Recipe, source: RuleSettings, record: SourceRecord | None, rows: OwnData) -> set[str]:
    """Return the blends of which other rows may be fetched if Snakemake ran now."""
    is_fetched = record is not None and not source.differ()
    if record is None or is_fetched:
        return set()  # a source that is gone is fetched again for a blend without splits alone
    if not source.made_from.exists():
        return {*recipe.fetched}
    before, now = without_places(read_record(source.made_from, MadeFrom)), json.loads(source.text)
    is_other = {name: before.get(name) != now[name] for name in ("source", "tables")}
    if any(is_other.values()) or rows.has_other_tables:
        return {*recipe.fetched}
    anew = set()
    for name, blend in recipe.fetched.items():
        has_other_settings = before["blends"].get(name) != now["blends"][name]
        if has_other_settings or rows.is_other(name) or not blend.is_pinned(recipe.source):
            anew.add(name)
    return anew


def _tells_its_rows(splits: RuleSettings) -> bool:
    """Whether the settings of a blend's splits, now and then, tell all that decides its rows."""
    return FROM in splits.values and FROM in settings_written(splits.made_from)


def data_elsewhere(recipe: Recipe, results: Path, root: Path, blends: Iterable[str]) -> dict[str, Path]:
    """Return manifests of equal splits that lie in other folders of results, for blends whose splits are to be made.

    The settings there tell all that decides the rows, and are the same.
    """
    settings = data_settings(recipe, results)
    places = sorted([*root.glob("data/*/manifest.json"), *root.glob("*/data/*/manifest.json")])
    places = [each for each in places if is_of_sample(each) == is_of_sample(results)]
    found: dict[str, Path] = {}
    for name, manifest in product(sorted(recipe.fetched.keys() & {*blends}), places):
        with suppress(UserError):  # a damaged record tells nothing
            if name not in found and _has_equal_splits(recipe, name, settings, manifest):
                found[name] = manifest
    return found


def _has_equal_splits(recipe: Recipe, name: str, settings: dict[str, RuleSettings], manifest: Path) -> bool:
    """Whether a manifest of another folder is of the splits that a blend would get."""
    made_from, splits = manifest.with_name("made_from.json"), settings[f"fill/{name}"]
    if not made_from.exists() or read_text(made_from) != splits.text:
        return False
    if FROM in splits.values:
        return True
    # Without that hash, rows are the same only where the source's settings decide all of them.
    now, blend = json.loads(settings["source"].text), recipe.blends[name]
    decides = blend.decided_by(now, name)
    if decides is None:
        return False
    fetched = manifest.parents[1] / "source"
    before = read_if_there(fetched / "made_from.json", MadeFrom)
    record = read_if_there(fetched / "record.json", SourceRecord)
    if before is None or record is None or is_of_other_source(manifest, name, record):
        return False
    has_same_tables = before.get("tables") == now["tables"]
    return has_same_tables and blend.decided_by(before, manifest.parent.name) == decides


def has_other_rows(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether a blend whose splits are made anew surely gets other rows: by count, source or seed of synthesis."""
    data, blend = results / "data", recipe.blends[name]
    if name not in recipe.fetched or not (data / name / "manifest.json").exists():
        return False
    if is_of_other_source(data / name / "manifest.json", name, record_if_sound(data / "source/record.json")):
        return True
    settings = data_settings(recipe, results)
    fill, source = settings[f"fill/{name}"], settings["source"]
    if not fill.made_from.exists():
        return fill.is_contradicted()
    before, now = settings_written(fill.made_from), fill.values
    if any(before.get(key) != now.get(key) for key in COUNTS):
        return True
    if not source.made_from.exists():
        return False
    fetched, asked = settings_written(source.made_from), json.loads(source.text)
    return blend.decided_by(fetched, name) != blend.decided_by(asked, name)


def _is_generated_anew(recipe: Recipe, results: Path, name: str, settings: dict[str, RuleSettings]) -> bool:
    """Whether models would make a generated blend's rows anew: by other settings, other prompts, or other contents."""
    exports = {maker: StagePaths(results / maker).export_record for maker in recipe.blends[name].makers}
    records = {maker: read_if_there(path, ExportRecord) for maker, path in exports.items()}
    contents = {maker: exported and exported["content"] for maker, exported in records.items()}
    made = read_if_there(results / "data" / name / "manifest.json", Manifest)
    is_of_others = (made.get("generated") or {}).get("by") != contents
    if is_of_others or _is_of_other_prompts(recipe, results, name):
        return True
    return any(settings[f"generated/{name}/{step}"].differ() for step in GENERATING)


def is_sampled_anew(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether models would respond anew for a generated blend that is made anew: otherwise only judged or selected."""
    made = read_if_there(results / "data" / name / "manifest.json", Manifest)
    if made is None or _is_of_other_prompts(recipe, results, name):
        return True
    then = (made.get("generated") or {}).get("by") or {}
    for maker in recipe.blends[name].models:
        exported = read_if_there(StagePaths(results / maker).export_record, ExportRecord)
        if exported is None or then.get(maker) != exported["content"]:
            return True
    return data_settings(recipe, results)[f"generated/{name}/sample"].differ()


def _is_of_other_prompts(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether a generated blend's rows were selected by other rows of prompts than there are; unknown counts as no."""
    selected = read_if_there(results / "data" / name / "generated/selection.json", SelectionFacts)
    (source,) = recipe.blends[name].prompts
    prompts = read_if_there(results / "data" / source / "manifest.json", Manifest)
    if selected is None or prompts is None or "prompts_sha256" not in selected:
        return False
    return selected["prompts_sha256"] != prompts["train"]["sha256"]
