"""Settings of rules as small files, which Snakemake compares by content like any other input.

``<results>/settings/<rule>.json`` holds settings of a whole run, ``settings/<rule>/<name>.json`` of a blend, stage or
choice. They are written whenever Snakemake reads the workflow. Results of an earlier commit have no settings files and
adopt them: a file is dated before the results, unless the results' own records contradict it.
"""

import json
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.data.source_record import content_of
from scripts.errors import UserError
from scripts.files import filled_by_program, read_bytes, write_text
from scripts.recipe.blend import COMPOSES, Blend
from scripts.recipe.criteria import BENCHMARKS, HELD_OUT
from scripts.recipe.evaluation import OF_TASKS
from scripts.recipe.generated import judging_of, servers_elsewhere
from scripts.recipe.recipe import Recipe
from scripts.recipe.resolve import own_environments
from scripts.recipe.source import HubSource, SyntheticSource
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
)
from scripts.rewards.judging_code import code_of
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
# Keys of `evaluation` that change no held-out score, or change the inputs of the rule.
ASKING = OF_TASKS - {"chat_template_kwargs"} | {"stages", "blends", "test", "gym_servers"}
SPLITTING = {"holdout", "test", "reasoning", "missing_images"}
PUBLISHED = {"format", "source", "file"}
SYNTHESIZED = {*PUBLISHED, "kind", "environments", "rows", "holdout", "pictures", "hallucinated_tools"}
COMPOSED = {*PUBLISHED, *COMPOSES, "kind", "environments", "columns", "shuffle", "seed"}
Settings = dict[str, Any]


@dataclass(frozen=True)
class RuleSettings:
    """Settings of a rule, the files made from them, and whether the records among those files contradict them.

    `made_from` is where the rule copies the settings file once the data are made from it.
    """

    values: Settings
    outputs: list[Path]
    is_contradicted: Callable[[], bool] = lambda: False
    made_from: Path | None = None

    @property
    def text(self) -> str:
        """The settings file's text."""
        return json.dumps(self.values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def differ(self) -> bool:
        """Whether the data on disk were made from other settings, as the copy says or else their records."""
        if self.made_from.exists():
            return _text_in(self.made_from) != self.text
        return self.is_contradicted()


def _text_in(path: Path) -> str:
    """Return the text of a settings file; damage makes it another text."""
    return read_bytes(path).decode(errors="replace")


def settings_files(recipe: Recipe, results: Path) -> dict[Path, RuleSettings]:
    """Return the settings of every rule by the path of the settings file."""
    card = {"license": recipe.license} | recipe.card_facts
    named = {"card": RuleSettings(card, [results / name / "card.md" for name in recipe.stages])}
    named |= _of_data(recipe, results / "data")
    trained = (*recipe.stages, *recipe.checkpoints)
    for name in trained:
        named[f"gate/{name}"] = _of_gate(recipe, StagePaths(results / name))
        named[f"train/{name}"] = _of_training(recipe, StagePaths(results / name))
        if quantize := recipe.settings_of(name).quantize:
            made = [results / name / "quantized/hf/record.json"]
            named[f"quantize/{name}"] = RuleSettings(quantize.model_dump(mode="json"), made)
    for name, choice in recipe.choices.items():
        values = choice.model_dump(mode="json", include={"stage", "by"})
        named[f"choose/{name}"] = RuleSettings(values, [results / name / "choice.json"])
    if recipe.evaluation:
        scored = [results / name / file for name in trained for file in ("eval.json", "test.json")]
        values = recipe.evaluation.model_dump(mode="json", exclude=ASKING, exclude_defaults=True)
        values |= recipe.model.reading
        named["evaluate"] = RuleSettings(values, scored)
        named["tasks"] = RuleSettings(recipe.evaluation.asked, [results / "tasks.json"])
    return {results / FOLDER / f"{name}.json": settings for name, settings in named.items()}


def write_settings(recipe: Recipe, results: Path) -> None:
    """Write every settings file whose text differs; adopt it where the results are older than settings files.

    The settings file comes last, with its time, so that after a kill the next call does all of it again.
    """
    for path, settings in settings_files(recipe, results).items():
        is_new = not path.exists()
        if not is_new and _text_in(path) == settings.text:
            continue
        before = _written(path)
        was_lost = before.pop(LOST, None) is not None
        has_come_back = was_lost and before == json.loads(settings.text)
        made = [output for output in settings.outputs if output.exists()]
        if not made or (is_new and settings.is_contradicted()):
            write_text(path, settings.text)
            continue
        if is_new:
            for output in made:  # Snakemake's note of its inputs names no settings file; its time stamp counts now
                with suppress(OSError):
                    (METADATA / urlsafe_b64encode(str(output).encode()).decode()).unlink()
            if settings.made_from:
                write_text(settings.made_from, settings.text)
        is_adopted = is_new or has_come_back or (settings.made_from and not settings.differ())
        then = min(output.stat().st_mtime_ns for output in made) - 1_000_000_000
        with filled_by_program(path) as fresh:
            fresh.write_text(settings.text, encoding="utf-8")
            if is_adopted:
                os.utime(fresh, ns=(then, then))


def _written(path: Path) -> Settings:
    """Return the values of a settings file; none where it is missing, damaged or no file."""
    with suppress(UserError):
        return read_if_there(path, Settings) or {}
    return {}


def is_fetched(recipe: Recipe, results: Path) -> bool:
    """Whether the source's files are there and made from the settings of today."""
    data = results / "data"
    return (data / "source/record.json").exists() and not _of_data(recipe, data)["source"].differ()


def data_to_be_made(recipe: Recipe, results: Path) -> set[str]:
    """Return the blends whose data would be made anew if Snakemake ran now.

    When the source is fetched anew, a blend counts as unchanged whose own settings are and whose revision is pinned.
    """
    data, settings = results / "data", _of_data(recipe, results / "data")
    source, record = settings["source"], read_if_there(data / "source/record.json", SourceRecord)
    if record is None or is_fetched(recipe, results):
        fetched = set()  # a source that is gone is fetched again for a blend without splits alone
    elif source.made_from.exists():
        before, now = read_record(source.made_from, MadeFrom), json.loads(source.text)
        is_whole = before | {"blends": {}} != now | {"blends": {}}
        fetched = {
            name
            for name, blend in recipe.fetched.items()
            if is_whole or before["blends"].get(name) != now["blends"][name] or not _is_pinned(recipe, blend)
        }
    else:
        fetched = {*recipe.fetched}
    remade = fetched | {
        name
        for name in recipe.blends
        if not (manifest := data / name / "manifest.json").exists()
        or settings[f"fill/{name}"].differ()
        or (name in recipe.fetched and _is_of_other_source(manifest, name, record))
    }
    generated = recipe.blends.keys() - recipe.fetched.keys() - remade
    remade |= {name for name in generated if _is_generated_anew(recipe, results, name, settings)}
    return {name for name in recipe.blends if not remade.isdisjoint(recipe.prompts_behind(name))}


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


def _is_of_other_prompts(recipe: Recipe, results: Path, name: str) -> bool:
    """Whether a generated blend's rows were selected by other rows of prompts than there are; unknown counts as no."""
    selected = read_if_there(results / "data" / name / "generated/selection.json", SelectionFacts)
    prompts = read_if_there(results / "data" / recipe.blends[name].generated.prompts / "manifest.json", Manifest)
    if selected is None or prompts is None or "prompts_sha256" not in selected:
        return False
    return selected["prompts_sha256"] != prompts["train"]["sha256"]


def _of_data(recipe: Recipe, data: Path) -> dict[str, RuleSettings]:
    """Settings of the rules that make data: of the source, and of each blend's splits and check."""
    record = data / "source/record.json"
    blends = {name: _published(recipe, blend) for name, blend in recipe.fetched.items()}
    values = {"source": recipe.source.model_dump(mode="json"), "tables": recipe.tables, "blends": blends}
    is_other = partial(_is_other_source, recipe, record)
    found = {"source": RuleSettings(values, [record], is_other, record.with_name("made_from.json"))}
    for name, blend in recipe.blends.items():
        manifest = data / name / "manifest.json"
        values = blend.model_dump(mode="json", include=SPLITTING) | {"names_environments": blend.names_environments}
        values |= {"seed": recipe.seed or 0} if blend.reasoning else {}
        if blend.holdout_by:
            values |= blend.model_dump(mode="json", include={"holdout_by"}) | {"holdout_seed": blend.seed}
        is_other = partial(_is_other_split, blend, manifest)
        found[f"fill/{name}"] = RuleSettings(values, [manifest], is_other, manifest.with_name("made_from.json"))
        checked = blend.model_dump(mode="json", include={"kind", "environments", "allow"})
        found[f"check/{name}"] = RuleSettings(checked, [manifest.with_name("check.json")])
        found |= _of_generating(recipe, name, data) if blend.generated else {}
    return found


def _of_generating(recipe: Recipe, name: str, data: Path) -> dict[str, RuleSettings]:
    """Settings of the rules that sample the responses of a generated blend, judge them and select rows."""
    blend, folder = recipe.blends[name], data / name / "generated"
    told = recipe.model.reading
    asked = {
        "sample": (blend.generated.asked | told, sorted(folder.glob("samples/*.parquet"))),
        "judge": (_of_judging(recipe, name, folder), [folder / "judged.parquet"]),
        "select": (blend.select.model_dump(mode="json"), [folder / f"{name}.jsonl"]),
    }
    return {
        f"generated/{name}/{step}": RuleSettings(values, made, made_from=folder / f"{step}.json")
        for step, (values, made) in asked.items()
    }


def _of_judging(recipe: Recipe, name: str, folder: Path) -> Settings:
    """Return what the verdicts on a generated blend's responses depend on besides the rows and the reward model.

    `asked_again` counts the calls that left responses without a verdict: the next call asks for them again.
    """
    judging, own = judging_of(recipe, name), own_environments(recipe)
    prompts = recipe.blends[recipe.blends[name].generated.prompts]
    values = judging.model_dump(mode="json", include={"gym"}) | recipe.model.reading
    values["code"] = {str(each): code_of(each, own).sha256 for each in prompts.environments}
    if judging.gym:
        values["code"]["gym"] = code_of("gym", {}, is_by_gym=True).sha256
    if servers := servers_elsewhere(judging):
        values["servers"] = servers
    unjudged = read_if_there(folder / UNJUDGED, LeftUnjudged)
    if unjudged and unjudged["calls"]:
        values["asked_again"] = unjudged["calls"]
    return values


def _published(recipe: Recipe, blend: Blend) -> Settings:
    """Settings of a blend that decide its file in the source."""
    carried = {"holdout_by"} if blend.holdout_column else set()
    keys = COMPOSED | carried if blend.is_composed else SYNTHESIZED if recipe.is_synthetic(blend) else PUBLISHED
    return blend.model_dump(mode="json", include=keys, exclude_defaults=True)


def _is_pinned(recipe: Recipe, blend: Blend) -> bool:
    """Whether every source of a blend gives the same rows whenever it is fetched."""
    sources = [part.source or recipe.source for part in blend.parts()]
    return all(
        isinstance(source, SyntheticSource) or (isinstance(source, HubSource) and COMMIT.fullmatch(source.revision))
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
    is_sample = any(part.startswith("sample-") for part in path.parts)
    held_out, tested = manifest["validation"].get("rows"), manifest.get("test", {}).get("rows", 0)
    if is_sample or held_out is None:
        return bool(tested) != bool(blend.test)
    return tested != blend.test or (isinstance(blend.holdout, int) and held_out != blend.holdout)


def _is_of_other_source(path: Path, blend: str, record: SourceRecord | None) -> bool:
    """Whether a manifest was made from other files than the source's record now describes."""
    manifest = read_if_there(path, Manifest)
    content = ((manifest or {}).get("source") or {}).get("content")
    return bool(record and content) and content != content_of(record, blend)


def _of_training(recipe: Recipe, paths: StagePaths) -> RuleSettings:
    """Names of blend and starts, whose files may be older than the checkpoint, amendments, and a loss of its files."""
    stage = recipe.settings_of(paths.name)

    def is_other() -> bool:
        """Whether the checkpoint was trained on another blend or from another parent; a choice stands for any."""
        record = read_if_there(paths.record, CheckpointRecord) or {}
        parent = next((parent["stage"] for parent in record.get("parents", ())), None)
        is_other_parent = bool(record) and stage.parent not in recipe.choices and parent != stage.parent
        is_other_blend = record.get("data", {}).get("blend", stage.blend) != stage.blend
        return is_other_parent or is_other_blend or bool(lost_of(recipe, paths))

    more = {name: value for name, value in (("roles", stage.roles), ("continues", stage.continues)) if value}
    amendments = amendments_of(paths.sibling(recipe.stage_trained(paths.name)))
    if amendments:
        more["amended"] = [each["identity"] for each in amendments]
    written = paths.directory.parent / FOLDER / "train" / f"{paths.name}.json"
    lost = mark_of_loss(recipe, paths, _written(written).get(LOST))
    if lost is not None:
        more[LOST] = lost
    return RuleSettings({"blend": stage.blend, "parent": stage.parent, **more}, [paths.ckpt, paths.record], is_other)


def _of_gate(recipe: Recipe, paths: StagePaths) -> RuleSettings:
    stage = recipe.settings_of(paths.name)
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
