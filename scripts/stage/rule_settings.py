"""Settings of rules as small files, which Snakemake compares by content like any other input.

``<results>/settings/<rule>.json`` holds settings of a whole run, ``settings/<rule>/<name>.json`` of a blend, stage or
choice. They are written whenever Snakemake reads the workflow. Results of versions before 0.3.0 have none, and get them
by `stagecoach migrate`.
"""

import json
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from scripts.contents import Contents, contents_of_run
from scripts.data.own_rows import DIGITS, OwnRows, fetched_rows, gone_rows, has_own_rows, own_rows
from scripts.data.source_record import content_of
from scripts.errors import UserError
from scripts.files import canonical_json, filled_by_program, sha256_file, sha256_text, write_text
from scripts.recipe.blend import COMPOSES, Blend
from scripts.recipe.criteria import BENCHMARKS, HELD_OUT
from scripts.recipe.evaluation import OF_TASKS, Task
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments, read_values
from scripts.recipe.source import FolderSource, HubSource, SyntheticSource
from scripts.recipe.task_files import data_of_task, files_of_task
from scripts.records import (
    CheckpointRecord,
    Criteria,
    ExportRecord,
    Gate,
    LeftUnjudged,
    MadeFrom,
    Manifest,
    Origin,
    SelectionFacts,
    SourceRecord,
    read_if_there,
    read_record,
    read_text,
)
from scripts.rewards.judging_code import code_of, hash_of_environment
from scripts.stage.again import folders_again
from scripts.stage.amendment import amendments_of
from scripts.stage.lost import lost_of, mark_of_loss
from scripts.stage.paths import StagePaths

FOLDER = "settings"
GENERATING = ("sample", "judge", "select")
"""The rules that make a generated blend, by whose names their settings go."""
LOST = "lost"
"""A setting of training: when the checkpoint was published whose files are gone."""
UNJUDGED = "unjudged.json"
"""Beside judged.parquet: what could not be judged, for the next call to ask again."""
METADATA = Path(".snakemake/metadata")
COMMIT = re.compile(r"[0-9a-f]{40}")
CONTENTS, OWN_TABLES = "contents", "own_tables"
"""Settings of the source: hashes of the rows in the user's own folders by blend, and of tables there."""
OF_OWN_FILES = frozenset({CONTENTS, OWN_TABLES})
FROM = "from"
"""A setting of splits: a hash of all that decides a blend's rows, where nothing else can change them."""
# Keys of `evaluation` that change no held-out score, or change the inputs of the rule.
ASKING = OF_TASKS - {"chat_template_kwargs"} | {"stages", "blends", "test", "gym_servers"}
SPLITTING = {"holdout", "test", "reasoning", "missing_images"}
COUNTS = ("holdout", "test")
PUBLISHED = {"format", "source", "file"}
SYNTHESIZED = {*PUBLISHED, "kind", "environments", "rows", "holdout", "pictures", "hallucinated_tools"}
COMPOSED = {*PUBLISHED, *COMPOSES, "kind", "environments", "columns", "shuffle", "seed"}
Settings = dict[str, Any]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of a rule, the files made from them, and whether the records among those files contradict them.

    `made_from` is where the rule copies the settings file once the data are made from it. `differs_from` compares the
    settings with the values of that copy; None: the texts are compared. `added` are settings that results of earlier
    versions lack, which do without them unless their records contradict the settings.
    """

    values: Settings
    outputs: list[Path]
    is_contradicted: Callable[[], bool] = lambda: False
    made_from: Path | None = None
    differs_from: Callable[[Settings], bool] | None = None
    added: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The settings file's text."""
        return json.dumps(self.values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def differ(self) -> bool:
        """Whether the data on disk were made from other settings, as the copy says or else their records."""
        if not self.made_from.exists():
            return self.is_contradicted()
        if self.differs_from is not None:
            return self.differs_from(settings_written(self.made_from))
        return _text_in(self.made_from) != self.text

    def grows(self, before: Settings) -> bool:
        """Whether the settings are those of before and some that earlier versions lacked, with nothing against them."""
        lacking = self.added & self.values.keys() - before.keys()
        kept = {name: value for name, value in self.values.items() if name not in lacking}
        return bool(lacking) and before == json.loads(json.dumps(kept)) and not self.is_contradicted()


def _text_in(path: Path) -> str:
    """Return the text of a settings file; damage makes it another text."""
    return read_text(path)


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
    named |= _of_data(recipe, results / "data", _Rows.of(recipe, results / "data", contents), contents)
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
        named["evaluate"] = _of_scores(recipe, results, contents)
        named["tasks"] = _of_tasks(recipe, results, contents)
    return {results / FOLDER / f"{name}.json": settings for name, settings in named.items()}


def scores_settings(recipe: Recipe, results: Path) -> RuleSettings:
    """Return the settings of held-out scores; the recipe has an evaluation."""
    with contents_of_run(results) as contents:
        return _of_scores(recipe, results, contents)


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
    if not is_new and _text_in(path) == settings.text:
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
    if had_other_inputs:
        for output in made:  # Snakemake's note of its inputs names others; its time stamp counts now
            with suppress(OSError):
                (METADATA / urlsafe_b64encode(str(output).encode()).decode()).unlink()
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


def settings_written(path: Path) -> Settings:
    """Return the values of a settings file; none where it is missing, damaged or no file."""
    with suppress(UserError):
        return read_if_there(path, Settings) or {}
    return {}


def is_fetched(recipe: Recipe, results: Path) -> bool:
    """Whether the source's files are there and made from the settings and the user's own files of today."""
    data = results / "data"
    if not (data / "source/record.json").exists():
        return False
    with contents_of_run(results) as contents:
        rows = _Rows.of(recipe, data, contents)
    return not _of_source(recipe, data / "source/record.json", rows).differ()


def data_to_be_made(recipe: Recipe, results: Path) -> set[str]:
    """Return the blends whose data would be made anew if Snakemake ran now.

    When the source is fetched anew, a blend counts as unchanged whose own settings are and whose revision is pinned.
    """
    data = results / "data"
    record = read_if_there(data / "source/record.json", SourceRecord)
    with contents_of_run(results) as contents:
        rows = _Rows.of(recipe, data, contents)
        settings = _of_data(recipe, data, rows, contents)
    fetched = _fetched_anew(recipe, settings["source"], record, rows)
    fetched = {name for name in fetched if not _tells_its_rows(settings[f"fill/{name}"])}
    remade = fetched | {
        name
        for name in recipe.blends
        if not (manifest := data / name / "manifest.json").exists()
        or settings[f"fill/{name}"].differ()
        or (name in recipe.fetched and _is_of_other_source(manifest, name, record))
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


def _fetched_anew(recipe: Recipe, source: RuleSettings, record: SourceRecord | None, rows: "_Rows") -> set[str]:
    """Return the blends of which other rows may be fetched if Snakemake ran now."""
    is_fetched = record is not None and not source.differ()
    if record is None or is_fetched:
        return set()  # a source that is gone is fetched again for a blend without splits alone
    if not source.made_from.exists():
        return {*recipe.fetched}
    before, now = _without_places(read_record(source.made_from, MadeFrom)), json.loads(source.text)
    is_other = {name: before.get(name) != now[name] for name in ("source", "tables")}
    if any(is_other.values()) or rows.has_other_tables:
        return {*recipe.fetched}
    return {
        name
        for name, blend in recipe.fetched.items()
        if before["blends"].get(name) != now["blends"][name] or rows.is_other(name) or not _is_pinned(recipe, blend)
    }


def _tells_its_rows(splits: RuleSettings) -> bool:
    """Whether the settings of a blend's splits, now and then, tell all that decides its rows."""
    return FROM in splits.values and FROM in settings_written(splits.made_from)


@dataclass(frozen=True)
class _Rows:
    """Rows and tables in the user's own folders: as they are now, and as they were fetched."""

    now: OwnRows
    then: OwnRows
    are_own: bool
    """Whether any blend has rows in such a folder."""
    record: SourceRecord | None
    """What was fetched, by the source's record; None without one, or where it is damaged, which is told elsewhere."""

    @classmethod
    def of(cls, recipe: Recipe, data: Path, contents: Contents) -> "_Rows":
        """Return the rows of a recipe whose data are in this folder."""
        record = _record_if_sound(data / "source/record.json")
        now, then = own_rows(recipe, contents, record), fetched_rows(recipe, record)
        return cls(now, then, has_own_rows(recipe), record)

    def of_blend(self, name: str) -> str | None:
        """Return the hash of a blend's files; where they are gone, of those that it was made of."""
        return self.now.blends.get(name, self.then.blends.get(name))

    def is_other(self, name: str) -> bool:
        """Whether a blend was made of other files than there are; unknown counts as no."""
        now, then = self.now.blends.get(name), self.then.blends.get(name)
        return now is not None and then is not None and now != then

    @property
    def tables(self) -> str | None:
        """The hash of the tables; where they are gone, of those that were fetched."""
        return self.now.tables or self.then.tables

    @property
    def has_other_tables(self) -> bool:
        """Whether other tables were fetched than there are; unknown counts as no."""
        return bool(self.now.tables and self.then.tables) and self.now.tables != self.then.tables

    @property
    def are_other(self) -> bool:
        """Whether anything was made of other files than there are."""
        return self.has_other_tables or any(map(self.is_other, self.now.blends))


def data_elsewhere(recipe: Recipe, results: Path, root: Path, blends: Iterable[str]) -> dict[str, Path]:
    """Return manifests of equal splits that lie in other folders of results, for blends whose splits are to be made.

    The settings there tell all that decides the rows, and are the same.
    """
    settings = _settings_of_data(recipe, results)
    places = sorted([*root.glob("data/*/manifest.json"), *root.glob("*/data/*/manifest.json")])
    places = [each for each in places if _is_sample(each) == _is_sample(results)]
    found: dict[str, Path] = {}
    for name, manifest in product(sorted(recipe.fetched.keys() & {*blends}), places):
        with suppress(UserError):  # a damaged record tells nothing
            if name not in found and _has_equal_splits(recipe, name, settings, manifest):
                found[name] = manifest
    return found


def _has_equal_splits(recipe: Recipe, name: str, settings: dict[str, RuleSettings], manifest: Path) -> bool:
    """Whether a manifest of another folder is of the splits that a blend would get."""
    made_from, splits = manifest.with_name("made_from.json"), settings[f"fill/{name}"]
    if not made_from.exists() or _text_in(made_from) != splits.text:
        return False
    if FROM in splits.values:
        return True
    if manifest.parent.name != name or not recipe.is_synthetic(recipe.blends[name]):
        return False
    fetched = manifest.parents[1] / "source"
    before = read_if_there(fetched / "made_from.json", MadeFrom)
    record = read_if_there(fetched / "record.json", SourceRecord)
    if before is None or record is None or _is_of_other_source(manifest, name, record):
        return False
    now = json.loads(settings["source"].text)
    is_same_source = (before.get("source"), before.get("tables")) == (now["source"], now["tables"])
    return is_same_source and before["blends"].get(name) == now["blends"][name]


def _is_sample(path: Path) -> bool:
    """Whether a path lies in the results of a sample of the rows."""
    return any(part.startswith("sample-") for part in path.parts)


def has_other_rows(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether a blend whose splits are made anew surely gets other rows: by count, source or seed of synthesis."""
    data, blend = results / "data", recipe.blends[name]
    if blend.generated or not (data / name / "manifest.json").exists():
        return False
    if _is_of_other_source(data / name / "manifest.json", name, _record_if_sound(data / "source/record.json")):
        return True
    settings = _settings_of_data(recipe, results)
    fill, source = settings[f"fill/{name}"], settings["source"]
    if not fill.made_from.exists():
        return fill.is_contradicted()
    before, now = settings_written(fill.made_from), fill.values
    if any(before.get(key) != now.get(key) for key in COUNTS):
        return True
    if not recipe.is_synthetic(blend) or not source.made_from.exists():
        return False
    fetched, asked = settings_written(source.made_from), json.loads(source.text)
    return fetched.get("source") != asked["source"] or fetched.get("blends", {}).get(name) != asked["blends"][name]


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
    for maker in recipe.blends[name].generated.models:
        exported = read_if_there(StagePaths(results / maker).export_record, ExportRecord)
        if exported is None or then.get(maker) != exported["content"]:
            return True
    return _settings_of_data(recipe, results)[f"generated/{name}/sample"].differ()


def _is_of_other_prompts(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether a generated blend's rows were selected by other rows of prompts than there are; unknown counts as no."""
    selected = read_if_there(results / "data" / name / "generated/selection.json", SelectionFacts)
    prompts = read_if_there(results / "data" / recipe.blends[name].generated.prompts / "manifest.json", Manifest)
    if selected is None or prompts is None or "prompts_sha256" not in selected:
        return False
    return selected["prompts_sha256"] != prompts["train"]["sha256"]


def _settings_of_data(recipe: Recipe, results: Path) -> dict[str, RuleSettings]:
    """Return the settings of the rules that make data, by the contents of files as a run knows them."""
    data = results / "data"
    with contents_of_run(results) as contents:
        return _of_data(recipe, data, _Rows.of(recipe, data, contents), contents)


def _of_data(recipe: Recipe, data: Path, rows: _Rows, contents: Contents) -> dict[str, RuleSettings]:
    """Settings of the rules that make data: of the source, and of each blend's splits and check."""
    found = {"source": _of_source(recipe, data / "source/record.json", rows)}
    for name, blend in recipe.blends.items():
        manifest = data / name / "manifest.json"
        found[f"fill/{name}"] = _of_splits(recipe, name, manifest, rows)
        checked = blend.model_dump(mode="json", include={"kind", "environments", "allow"})
        found[f"check/{name}"] = RuleSettings(checked, [manifest.with_name("check.json")])
        found |= _of_generating(recipe, name, data, contents) if blend.generated else {}
    return found


def _record_if_sound(path: Path) -> SourceRecord | None:
    """Return the source's record; None where it is missing, or damaged, which is told elsewhere."""
    with suppress(UserError):
        return read_if_there(path, SourceRecord)
    return None


def _of_splits(recipe: Recipe, name: str, manifest: Path, rows: _Rows) -> RuleSettings:
    """Settings of a blend's splits; where its rows change by settings and by the user's own files alone, these too."""
    blend = recipe.blends[name]
    values = blend.model_dump(mode="json", include=SPLITTING) | {"names_environments": blend.names_environments}
    values |= {"seed": recipe.seed or 0} if blend.reasoning else {}
    if blend.holdout_by:
        values |= blend.model_dump(mode="json", include={"holdout_by"}) | {"holdout_seed": blend.seed}
    is_other_split = partial(_is_other_split, blend, manifest)
    made_from = manifest.with_name("made_from.json")
    if not rows.are_own or not _is_told_by_settings(recipe, name, rows.record):

        def differs(before: Settings) -> bool:
            """Whether the splits were made by other settings; before the source was fetched, these may tell more."""
            then = {name: value for name, value in before.items() if name != FROM}
            return then != json.loads(json.dumps(values))

        return RuleSettings(values, [manifest], is_other_split, made_from, differs)
    decides = {
        "blend": _without_places(_published(recipe, blend)),
        "source": _without_places(recipe.source.model_dump(mode="json")),
        "tables": recipe.tables,
        CONTENTS: rows.of_blend(name),
        OWN_TABLES: rows.tables,
    }
    told = values | {FROM: sha256_text(canonical_json(decides))[:DIGITS]}
    is_of_other_rows = rows.is_other(name) or rows.has_other_tables or _is_of_other_source(manifest, name, rows.record)

    def is_contradicted() -> bool:
        return is_of_other_rows or is_other_split()

    def differs_from(before: Settings) -> bool:
        if FROM in before:
            return before != json.loads(json.dumps(told))
        return is_of_other_rows or before != json.loads(json.dumps(values))

    return RuleSettings(told, [manifest], is_contradicted, made_from, differs_from, frozenset({FROM}))


def told_by_settings(recipe: Recipe, results: Path) -> set[str]:
    """Return the blends whose settings tell all that decides their rows; none where no row is in an own folder."""
    record = _record_if_sound(results / "data/source/record.json")
    if not has_own_rows(recipe):
        return set()
    return {name for name in recipe.fetched if _is_told_by_settings(recipe, name, record)}


def _is_told_by_settings(recipe: Recipe, name: str, record: SourceRecord | None) -> bool:
    """Whether a blend's rows can only change with its settings, or with files in the user's own folders.

    The hub's branches move, and synthetic rows are made together.
    """
    blend = recipe.blends[name]
    if name not in recipe.fetched or recipe.is_synthetic(blend):
        return False
    is_written_here = isinstance(recipe.source, SyntheticSource)  # its tables follow from its settings
    origins = {} if record is None or is_written_here else record.get("tables", {})
    of_hub = [table for table, origin in origins.items() if origin != "folder"]
    are_pinned = all(COMMIT.fullmatch(recipe.tables.get(table, "")) for table in of_hub)
    return _is_pinned(recipe, blend) and are_pinned


def _of_source(recipe: Recipe, path: Path, rows: _Rows) -> RuleSettings:
    """Settings of the source, with the contents of the user's own files instead of where they are.

    What was fetched is compared by the source's record, which hashed the files while they were read.
    """
    blends = {name: _published(recipe, blend) for name, blend in recipe.fetched.items()}
    values = {"source": recipe.source.model_dump(mode="json"), "tables": recipe.tables, "blends": blends}
    values = _without_places(values)
    own = {name: rows.of_blend(name) for name in recipe.fetched}
    own = {name: digest for name, digest in own.items() if digest is not None}
    told = {CONTENTS: own} if own else {}
    told |= {OWN_TABLES: rows.tables} if rows.tables else {}

    def is_contradicted() -> bool:
        return rows.are_other or _is_other_source(recipe, path)

    def differs_from(before: Settings) -> bool:
        then = {name: value for name, value in _without_places(before).items() if name not in OF_OWN_FILES}
        return rows.are_other or then != json.loads(json.dumps(values))

    made_from = path.with_name("made_from.json")
    return RuleSettings(values | told, [path], is_contradicted, made_from, differs_from, OF_OWN_FILES)


def _of_generating(recipe: Recipe, name: str, data: Path, contents: Contents) -> dict[str, RuleSettings]:
    """Settings of the rules that sample the responses of a generated blend, judge them and select rows."""
    blend, folder = recipe.blends[name], data / name / "generated"
    told = recipe.model.reading
    asked = {
        "sample": (blend.generated.asked | told, sorted(folder.glob("samples/*.parquet"))),
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


def _without_places(value: Any) -> Any:
    """Return settings without the paths of the user's own folders, whose contents count."""
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if not isinstance(value, dict):
        return value
    is_folder = value.get("kind") == "folder"
    return {key: _without_places(each) for key, each in value.items() if not (is_folder and key == "path")}


def _published(recipe: Recipe, blend: Blend) -> Settings:
    """Settings of a blend that decide its file in the source."""
    carried = {"holdout_by"} if blend.holdout_column else set()
    keys = COMPOSED | carried if blend.is_composed else SYNTHESIZED if recipe.is_synthetic(blend) else PUBLISHED
    return blend.model_dump(mode="json", include=keys, exclude_defaults=True)


def _is_pinned(recipe: Recipe, blend: Blend) -> bool:
    """Whether every source of a blend gives the same rows whenever it is fetched, but for edits of own files."""
    sources = [part.source or recipe.source for part in [*blend.parts(), *blend.decontaminate]]
    return all(
        isinstance(source, SyntheticSource | FolderSource)
        or (isinstance(source, HubSource) and COMMIT.fullmatch(source.revision))
        for source in sources
    )


def _is_other_source(recipe: Recipe, path: Path) -> bool:
    """Whether the source's record lacks a blend, or names another repository, pinned revision or seed."""
    origins = (read_if_there(path, SourceRecord) or {}).get("blends")
    return origins is not None and any(
        name not in origins or _is_other_origin(recipe, blend, origins[name]) for name, blend in recipe.fetched.items()
    )


def _is_other_origin(recipe: Recipe, blend: Blend, origin: Origin) -> bool:
    source = blend.source or recipe.source
    if recipe.is_synthetic(blend):
        return origin["revision"] != f"synthetic-{source.seed}"
    if blend.is_composed or not isinstance(source, HubSource):
        return False
    wanted = source.revision if COMMIT.fullmatch(source.revision) else origin["revision"]
    return (origin["source"], origin["revision"]) != (source.repository, wanted)


def _is_other_split(blend: Blend, path: Path) -> bool:
    """Whether a manifest counts other held-out or test rows than a blend sets; of a sample it may count fewer."""
    manifest = read_if_there(path, Manifest)
    if manifest is None:
        return False
    if blend.holdout_by is not None:
        return True  # of an earlier commit, which held out the last rows
    is_sample = _is_sample(path)
    held_out, tested = manifest["validation"].get("rows"), manifest.get("test", {}).get("rows", 0)
    if is_sample or held_out is None:
        return bool(tested) != bool(blend.test)
    return tested != blend.test or (isinstance(blend.holdout, int) and held_out != blend.holdout)


def _is_of_other_source(path: Path, blend: str, record: SourceRecord | None) -> bool:
    """Whether a manifest was made from other files than the source's record now describes."""
    manifest = read_if_there(path, Manifest)
    content = ((manifest or {}).get("source") or {}).get("content")
    return bool(record and content) and content != content_of(record, blend)


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


def _of_scores(recipe: Recipe, results: Path, contents: Contents) -> RuleSettings:
    """Settings of held-out scores, with the contents of the user's environments that judge the responses."""
    values = recipe.evaluation.model_dump(mode="json", exclude=ASKING, exclude_defaults=True)
    values |= recipe.model.reading
    files = ("eval.json", "rollouts.parquet", "test.json", "test_rollouts.parquet")
    trained = (*recipe.stages, *recipe.checkpoints)
    scored = [results / name / file for name in trained for file in files]
    scored += [results / name / "quantized" / file for name in trained for file in files[:2]]
    judging = {name for rows in recipe.graph.scored_rows for name in rows.blend.environments}
    own = {name: path for name, path in own_environments(recipe).items() if name in judging}
    if own:
        values["environments"] = {name: hash_of_environment(path, contents.of) for name, path in own.items()}

    def is_contradicted() -> bool:
        """Whether an environment is newer than the scores, of earlier versions, and no stage was trained with it."""
        return any(_is_newer(path, scored) and not _was_trained_with(name, path) for name, path in own.items())

    def _was_trained_with(name: str, path: Path) -> bool:
        configs = [_written_config(StagePaths(results / stage).run / "config.yaml") for stage in recipe.stages]
        return sha256_file(path) in [config.get("environments", {}).get(name) for config in configs]

    return RuleSettings(values, scored, is_contradicted, added=frozenset({"environments"}))


def _of_tasks(recipe: Recipe, results: Path, contents: Contents) -> RuleSettings:
    """Settings of lm-eval's tasks, with the contents of the user's own definitions and data."""
    values, outputs = recipe.evaluation.asked, [results / "tasks.json"]
    files = [file for task in recipe.evaluation.task_list for file in _files_read(task).values()]
    if files:
        values = values | {"files": _of_task_folders(recipe, contents)}
    is_contradicted = partial(_any_is_newer, files, outputs)
    return RuleSettings(values, outputs, is_contradicted, added=frozenset({"files"}))


def _of_task_folders(recipe: Recipe, contents: Contents) -> dict[str, str]:
    """Return a hash of the files of each task of the user's own, by the task's name."""
    found = {}
    for task in recipe.evaluation.task_list:
        files = _files_read(task)
        if files:
            hashes = contents.of_all(map(str, files.values()))
            named = {name: hashes[str(file)] for name, file in files.items()}
            found[task.task] = sha256_text(canonical_json(named))[:DIGITS]
    return found


def _files_read(task: Task) -> dict[str, Path]:
    """Return the files that a task of the user's own reads, by names that stay if all is moved; none of lm-eval's."""
    folder = Path(task.include_path or "").absolute()
    inside = {str(Path(file).relative_to(folder)): Path(file) for file in files_of_task(task)}
    elsewhere = {f"{place}: {Path(file).name}": Path(file) for place, file in enumerate(data_of_task(task))}
    return inside | elsewhere


def _any_is_newer(files: list[Path], outputs: list[Path]) -> bool:
    return any(_is_newer(file, outputs) for file in files)


def _is_newer(file: Path, outputs: list[Path]) -> bool:
    """Whether a file was written after the oldest output that is there."""
    times = [output.stat().st_mtime_ns for output in outputs if output.exists()]
    return bool(times) and file.stat().st_mtime_ns > min(times)


def _written_config(path: Path) -> Settings:
    """Return the values of a training's config; none where it is missing or damaged."""
    with suppress(UserError):
        return read_values(path) if path.exists() else {}
    return {}


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
