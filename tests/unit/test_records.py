"""A damaged record is one message, records are held against what they describe, and nothing else is read or loaded."""

import json
import os
import shutil
from pathlib import Path

import pytest

from scripts.backends.protocol import StopRequest
from scripts.commands.doctor import diagnose
from scripts.commands.migrate import take_runs
from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.commands.status import status_text
from scripts.data.fill import main as fill_program
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.recipe.criteria import Criterion
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import sync_configs
from scripts.records import (
    CheckpointRecord,
    Evaluation,
    ExportRecord,
    Gate,
    Manifest,
    RunIdentity,
    SourceRecord,
    read_record,
)
from scripts.report.chain import chain_text, read_chain, readable
from scripts.report.overview import Lineage, write_overview
from scripts.report.pages import rows_of, write_environments_page
from scripts.report.stage_page import main as write_stage_page
from scripts.report.verify import verify
from scripts.stage.consistency import exported_model, refuse_damage
from scripts.stage.data_to_come import data_to_be_made
from scripts.stage.paths import StagePaths
from scripts.stage.rule_settings import settings_files, write_settings
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder
from scripts.train.run import Attempt, train_stage
from tests.conftest import ROOT, SHORT
from tests.damages import PIPE, damaged, damages, paths_within, replaced

RECIPE = load_recipe(SHORT)
SITE = load_site(ROOT / "config/sites/laptop.yaml", RECIPE)
TYPES = {
    "sft/ckpt/record.json": CheckpointRecord,
    "rlvr1/hf/record.json": ExportRecord,
    "rlvr1/run/identity.json": RunIdentity,
    "rlvr1/eval.json": Evaluation,
    "rlvr1/gate.json": Gate,
    "data/rlvr1/manifest.json": Manifest,
    "data/source/record.json": SourceRecord,
}
LEAST = 105
WITHOUT_RECORD = ("binary", "a list", "a number", "an empty object", "nested deep", "a directory", PIPE)
"""Damages of a file that holds no record: a sample of all."""
GATE = [Criterion(metric="final_truncation_rate", max=0.5, action="stop")]


@pytest.fixture(scope="module")
def finished_chain(tmp_path_factory, made):
    """The published stages with the configs of the recipe, in a folder that tests leave as they found it."""
    results = tmp_path_factory.mktemp("finished") / "short"
    shutil.copytree(made, results, symlinks=True)
    sync_configs(RECIPE, results)
    write_settings(RECIPE, results)
    for settings in settings_files(RECIPE, results).values():  # as the rules that make data do
        if settings.made_from and settings.made_from.parent.is_dir():
            settings.made_from.write_text(settings.text)
    write_json(results / "rlvr1/logs/scoring.json", {"responses": 12, "seconds": 3.5})
    return results


def alter(path: Path, **values) -> None:
    write_json(path, read_json(path) | values)


# --- damage ---


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_of_any_value_of_any_type_at_any_place_a_record_is_read_or_it_is_one_message(made, tmp_path, name):
    record, path = read_json(made / name), tmp_path / "record.json"
    refused = 0
    for place in paths_within(record):
        for by in (None, 7, 1.5, "text", [], {}, [[]], {"key": [{}]}, True):
            path.write_text(json.dumps(replaced(record, place, by)))
            try:
                read_record(path, TYPES[name])
            except UserError as error:
                refused += 1
                assert str(error).startswith(f"{path}: damaged (") and "\n" not in str(error)
    assert refused


def commands(results: Path, pages: Path) -> dict:
    """What each command does with a folder of results."""
    stages = {"sft": "", "rlvr1": "sft"}

    def report() -> None:
        write_overview(results, Lineage(stages), pages / "overview.html")
        list(rows_of(StagePaths(results / name) for name in stages))
        write_environments_page(
            [each for name in stages if (each := readable(results / name / "eval.json", Evaluation, tells=True))],
            pages / "environments.html",
        )
        write_stage_page(results / "rlvr1", results / "data/rlvr1/manifest.json", pages / "stage.html")

    def lineage() -> None:
        chain = read_chain(results / "rlvr1/ckpt")
        chain_text(chain)
        verify(chain)

    def snakemake() -> None:
        """What each call does as it reads the workflow."""
        refuse_damage(RECIPE, results)
        sync_configs(RECIPE, results)
        write_settings(RECIPE, results)
        data_to_be_made(RECIPE, results)

    return {
        "plan": lambda: plan_text(Project(RECIPE, SITE, results)),
        "status": lambda: status_text(Project(RECIPE, SITE, results)),
        "snakemake": snakemake,
        "report": report,
        "lineage": lineage,
    }


@pytest.mark.slow
def test_no_damage_of_any_record_ends_a_command_but_by_one_message(finished_chain, tmp_path):
    every = [*damages(finished_chain, "rlvr1", "rlvr1", 4), *damages(finished_chain, "sft", "sft", 40)]
    tried = every[:: len(every) // (LEAST + 5)]
    assert len(tried) >= LEAST
    calls = commands(finished_chain, tmp_path)
    for command in calls.values():
        command()  # without a damage all go through
    for number, damage in enumerate(tried):
        with damaged(finished_chain / damage.file, damage.make):
            for name, command in calls.items():
                if name == "report" and number % 4:  # it draws, which takes a moment
                    continue
                try:
                    command()
                except UserError as error:
                    assert name in ("snakemake", "report", "lineage"), f"{name} does not go on: {damage}"
                    assert str(finished_chain) in str(error), damage


def test_settings_and_paces_that_are_damaged_are_one_message_or_nothing(finished_chain, tmp_path):
    calls = commands(finished_chain, tmp_path)
    every = damages(finished_chain, "rlvr1", "rlvr1")
    files = {damage.file for damage in every}
    settings = {file for file in files if file.startswith("settings/") or file.endswith("made_from.json")}
    tried = {"rlvr1/logs/scoring.json", "data/source/made_from.json", "data/rlvr1/made_from.json", min(settings)}
    assert tried <= files
    of_them = [damage for damage in every if damage.file in tried and damage.kind in WITHOUT_RECORD]
    assert len(of_them) == len(tried) * len(WITHOUT_RECORD)
    for damage in of_them:
        with damaged(finished_chain / damage.file, damage.make):
            calls["plan"]()
            calls["status"]()
            try:
                calls["snakemake"]()
            except UserError as error:
                assert str(error).startswith(str(finished_chain / damage.file)), damage
                assert "delete it" in str(error) or "remove or rename" in str(error), damage


def test_a_walk_of_a_finished_chain_finds_every_record_that_has_a_reader(finished_chain):
    found = {damage.file for damage in damages(finished_chain, "rlvr1", "rlvr1")}
    assert found >= {name for name in TYPES if name.startswith("rlvr1/")}
    assert found >= {"rlvr1/run/attempts.jsonl", "rlvr1/run/checkpoints/step_3/files.json", "rlvr1/config.yaml"}
    assert not any("weights" in name or name.endswith("tokenizer.json") for name in found)


def test_plan_and_status_go_on_whatever_damages_a_manifest(finished_chain):
    calls = commands(finished_chain, finished_chain)
    manifests = [each for each in damages(finished_chain, "sft", "sft") if each.file.endswith("manifest.json")]
    assert {"a dangling link", "binary", "a directory"} <= {damage.kind for damage in manifests}
    for damage in manifests:
        with damaged(finished_chain / damage.file, damage.make):
            calls["plan"]()
            calls["status"]()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be taken on by root alone")
def test_a_record_that_may_not_be_read_is_told_with_what_to_look_at(finished_chain):
    path = finished_chain / "rlvr1/hf/record.json"
    mode = path.stat().st_mode
    path.chmod(0o600)
    for folder in (finished_chain, *finished_chain.parents):
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=r"rlvr1/hf/record.json: cannot be read \(Permission denied\)"):
            read_record(path, ExportRecord)
    finally:
        os.seteuid(0)
        path.chmod(mode)


def test_status_and_plan_show_a_damaged_stage_and_go_on_with_the_others(chain):
    project, record = Project(RECIPE, SITE, chain), chain / "rlvr1/hf/record.json"
    whole = record.read_text()
    for text_of in (status_text, plan_text):
        record.write_text(whole)
        before = {line.split()[0]: line.split() for line in text_of(project).splitlines() if line}
        record.write_text("[]")
        lines = {line.split()[0]: line for line in text_of(project).splitlines() if line}
        assert lines["sft"].split() == before["sft"]
        assert lines["rlvr1"].split()[1] == "damaged" and "delete it, and Snakemake exports" in lines["rlvr1"]


def test_the_summary_and_the_heat_map_leave_out_what_is_damaged_and_say_so(chain, capsys):
    (chain / "sft/gate.json").write_text('{"verdict": []}')
    (chain / "sft/eval.json").write_text("{}")
    assert [row["gate"] for row in rows_of(StagePaths(chain / name) for name in ("sft", "rlvr1"))] == [
        "damaged",
        "warn",
    ]
    damaged, kept = (readable(chain / name / "eval.json", Evaluation, tells=True) for name in ("sft", "rlvr1"))
    assert damaged is None and kept["stage"] == "rlvr1"
    said = capsys.readouterr().err
    assert "sft/gate.json: damaged" in said and "sft/eval.json: damaged" in said


def test_the_lineage_takes_a_damaged_parent_from_what_its_child_recorded(chain, capsys):
    whole = chain_text(read_chain(chain / "rlvr1/ckpt"))
    (chain / "sft/ckpt/record.json").write_text("null")
    found = read_chain(chain / "rlvr1/ckpt")
    assert chain_text(found).splitlines()[:8] == whole.splitlines()[:8]
    assert any("sft/ckpt/record.json: damaged" in problem for problem in verify(found).problems)


def test_a_run_directory_without_and_with_a_damaged_identity_gets_the_same_advice(chain):
    stage = Stage(RECIPE, chain, "rlvr1")
    run, said = stage.paths.directory / "run", []
    store, path = stage.paths.run, run / "identity.json"
    before = read_json(path)
    run.unlink()
    store.rename(run)  # as earlier commits had it
    path.write_text("{}")
    for _ in range(2):
        with pytest.raises(UserError, match=r"write the file again .* or move the directory away") as refusal:
            list(take_runs(chain, stage.paths))
        said.append(str(refusal.value).partition(";")[2])
        path.unlink(missing_ok=True)
    assert said[0] == said[1]
    record = read_json(stage.paths.record)
    write_json(path, {"identity": record["identity"], **record["facts"]})  # the advice
    list(take_runs(chain, stage.paths))
    assert TrainingFolder(stage.paths.run).identity == before["identity"]


# --- records and what they describe ---


def link_to_another(results: Path) -> None:
    link = results / "sft/hf/model"
    link.unlink()
    link.symlink_to("../../rlvr1/exports/" + read_json(results / "rlvr1/hf/record.json")["content"])


def longer_split(results: Path) -> None:
    with (results / "data/rlvr1/train-split.jsonl").open("a") as file:
        file.write("{}\n")


CONTRADICTIONS = {
    "content": (lambda results: alter(results / "sft/hf/record.json", content="0" * 16), "do not hash to its content"),
    "link": (link_to_another, "sft/hf/model: a link to"),
    "identity": (lambda results: alter(results / "sft/ckpt/record.json", identity="0" * 16), "its facts hash to"),
    "step": (lambda results: alter(results / "sft/ckpt/record.json", step=2), "is of step 2, but"),
    "run": (lambda results: alter(results / "sft/run/identity.json", config="0"), "its facts hash to"),
    "split": (longer_split, "train-split.jsonl: has"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_altered_record_is_told_before_it_makes_anything_stale(chain, name):
    sync_configs(RECIPE, chain)
    refuse_damage(RECIPE, chain)
    spoil, words = CONTRADICTIONS[name]
    spoil(chain)
    with pytest.raises(UserError, match=words):
        refuse_damage(RECIPE, chain)
    found = diagnose(Project(RECIPE, SITE, chain))
    assert any(words in finding.message for finding in found) and all(finding.stops for finding in found)


@pytest.mark.parametrize("name", ["content", "link"])
def test_nothing_trains_from_an_export_that_is_not_the_recorded_one_and_the_run_directory_stays(chain, name):
    sync_configs(RECIPE, chain)
    stage = Stage(RECIPE, chain, "rlvr1", is_written=True)
    CONTRADICTIONS[name][0](chain)
    before = sorted(path.name for path in stage.paths.directory.iterdir())
    with pytest.raises(UserError, match=CONTRADICTIONS[name][1]):
        train_stage(stage, Attempt(), StopRequest())
    assert sorted(path.name for path in stage.paths.directory.iterdir()) == before


def test_what_is_loaded_is_the_folder_that_the_facts_name_with_the_recorded_files(chain):
    stage, record = Stage(RECIPE, chain, "rlvr1"), chain / "sft/hf/record.json"
    folder = (chain / "sft/run/exports").resolve() / stage.facts["parent_export"]
    assert stage.parent_export == exported_model(record) == folder
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content, words in (
        (whole + b"0", "bytes instead of"),
        (whole[:-1] + b"\1", "other content"),
        (None, "missing"),
    ):
        weights.unlink(missing_ok=True)
        if content is not None:
            weights.write_bytes(content)
        with pytest.raises(UserError, match=rf"model.safetensors: .*{words}"):
            exported_model(record)


# --- data ---


def test_a_blend_is_filled_by_hand_without_a_record_of_its_source(tmp_path):
    blend = tmp_path / "mine.jsonl"
    blend.write_text('{"agent_ref": {"name": "x"}}\n' * 12)
    fill_program(blend, 2, tmp_path / "splits")
    manifest = read_json(tmp_path / "splits/manifest.json")
    assert manifest["source"] == {"name": str(tmp_path), "revision": "folder"} and manifest["train"]["rows"] == 10
