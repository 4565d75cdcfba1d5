"""A chain that an earlier commit finished, under today's code: all of it is fresh, its lineage verifies, its runs resume."""

import base64
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, Workflow
from tests.recorded.identities import TABLE, identities

RECORDED = ROOT / "tests/recorded"
STAGES = ("sft", "rlvr", "rlhf")
NOTHING = "Nothing to be done (all requested files are present and up to date)."


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The recorded chain as it was written, its files all of one time, and the same after `stagecoach migrate`.

    Each with what Snakemake noted of the outputs, and without.
    """
    made = {}
    for name in ("noted", "plain"):
        root = tmp_path_factory.mktemp(name)
        workflow = Workflow(root)
        workflow.configure("recorded")
        shutil.copy(RECORDED / "recipe.yaml", root / "config/recipes/recorded.yaml")
        shutil.copytree(RECORDED / "results", root / "results", symlinks=True)
        then = time.time() - 3600
        for path in workflow.results.rglob("*"):
            os.utime(path, (then, then), follow_symlinks=False)
        if name == "noted":
            for output, metadata in json.loads((RECORDED / "snakemake.json").read_text()).items():
                write_metadata(root, output, metadata)
        made[f"{name}, written"] = workflow.copied_to(tmp_path_factory.mktemp(f"{name}_written"))
        workflow.run("python", "-m", "scripts.commands", "migrate")
        made[name] = workflow
    return made


@pytest.fixture
def recorded(trees, tmp_path):
    """The migrated chain in a tree of its own, without what Snakemake noted of it."""
    return trees["plain"].copied_to(tmp_path)


@pytest.fixture
def noted(trees, tmp_path):
    """The migrated chain with what Snakemake noted of each output, as far as it was to remember."""
    return trees["noted"].copied_to(tmp_path)


@pytest.fixture
def written(trees, tmp_path):
    """The chain as a version before 0.3.0 wrote it, with Snakemake's notes."""
    return trees["noted, written"].copied_to(tmp_path)


def write_metadata(root: Path, output: str, metadata: dict) -> None:
    path = root / ".snakemake/metadata" / base64.urlsafe_b64encode(output.encode()).decode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metadata))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def recorded_json(*parts: str) -> dict:
    return json.loads((RECORDED / "results/recorded").joinpath(*parts).read_text())


def test_results_of_an_earlier_version_are_refused_and_nothing_is_touched(written):
    before = files(written.results)
    said = written.snakemake("--dry-run", check=False)
    assert "results/recorded/sft/run and 2 more: trained by a version before 0.3.0; stagecoach migrate" in said
    assert "rule train" not in said and "Traceback" not in said
    for command in ("plan", "status"):
        told = written.run("python", "-m", "scripts.commands", command, check=False).stdout
        assert told.count("stagecoach migrate takes them over, and trains nothing") == 1 and "fresh" not in told
    assert files(written.results) == before


def test_after_migrate_nothing_is_to_be_done_and_every_file_is_as_it_was(recorded):
    assert NOTHING in recorded.snakemake("--dry-run")
    before = files(RECORDED / "results/recorded")
    assert {name: (recorded.results / name).read_bytes() for name in before} == before
    migrated = {path: path.stat().st_mtime_ns for path in recorded.results.rglob("*")}
    assert "nothing to take over" in recorded.run("python", "-m", "scripts.commands", "migrate").stdout
    assert NOTHING in recorded.snakemake("--dry-run")
    assert {path: path.stat().st_mtime_ns for path in recorded.results.rglob("*")} == migrated


def test_with_what_snakemake_noted_nothing_but_the_runs_pages_is_to_be_made(noted):
    assert set(noted.planned_jobs()) <= {"pages", "report_html", "all"}


@pytest.mark.parametrize(("key", "is_found"), [("input", True), ("params", False)])
def test_another_input_than_the_noted_would_be_found_and_another_param_would_not(noted, key, is_found):
    assert noted.planned() == set()
    for output in ("results/recorded/rlvr/ckpt", "results/recorded/rlvr/ckpt/record.json"):
        metadata = json.loads((RECORDED / "snakemake.json").read_text())[output]
        metadata["input"] = sorted([*metadata["input"], "results/recorded/settings/train/rlvr.json"])
        write_metadata(noted.root, output, metadata | {key: metadata[key][1:]})
    assert ("rlvr" in noted.planned()) == is_found


def test_plan_and_status_call_every_stage_fresh_whose_identity_is_the_recorded(recorded):
    plan = recorded.run("python", "-m", "scripts.commands", "plan").stdout.splitlines()
    status = recorded.run("python", "-m", "scripts.commands", "status").stdout.splitlines()
    for stage in STAGES:
        assert any(line.split()[:2] == [stage, "fresh"] for line in plan), plan
        assert any(line.split()[:3] == [stage, "fresh", "2/2"] for line in status), status


def test_of_a_store_that_is_gone_plan_and_snakemakes_jobs_agree_that_its_stages_train(noted):
    assert not noted.planned_jobs()["train"]
    lost = (noted.results / "rlvr/ckpt/weights").resolve().parents[1]
    lost.rename(noted.root / "away")
    assert noted.planned_jobs()["train"] == {"rlvr", "rlhf"}
    plan = noted.run("python", "-m", "scripts.commands", "plan").stdout
    assert re.search(rf"^rlvr +trains again .*{lost.name}/exports/\w+ is gone", plan, re.MULTILINE), plan
    assert re.search(r"^sft +fresh", plan, re.MULTILINE) and re.search(r"^rlhf .*rlvr comes first", plan, re.MULTILINE)
    (noted.root / "away").rename(lost)
    assert not noted.planned_jobs()["train"]


def test_without_snakemakes_notes_a_changed_gate_is_judged_again_and_nothing_trains(recorded):
    recipe = recorded.root / "config/recipes/recorded.yaml"
    text = recipe.read_text()
    assert "max: 0.01" in text
    for bound in ("0.001", "0.9"):  # the other way round, too
        recipe.write_text(text.replace("max: 0.01", f"max: {bound}"))
        jobs = recorded.planned_jobs()
        assert jobs["gate"] == {"rlvr", "rlhf"} and not jobs["train"]
    recorded.snakemake("results/recorded/rlvr/gate.json")
    assert recorded_json("rlvr/gate.json")["verdict"] == "warn"
    assert json.loads((recorded.results / "rlvr/gate.json").read_text())["verdict"] == "pass"
    jobs = recorded.planned_jobs()
    assert jobs["gate"] == {"rlhf"} and not jobs["train"]


def test_an_altered_content_and_a_turned_link_are_told_before_anything_is_planned(noted):
    record, link = noted.results / "sft/hf/record.json", noted.results / "sft/hf/model"
    whole = record.read_text()
    record.write_text(whole.replace(json.loads(whole)["content"], "0" * 16))
    said = noted.snakemake("--dry-run", check=False)
    assert "its files do not hash to its content" in said and "rule train" not in said and "Traceback" not in said
    record.write_text(whole)
    link.unlink()
    link.symlink_to("../../rlvr/exports")
    said = noted.snakemake("--dry-run", check=False)
    assert "sft/hf/model: a link to" in said and "rule train" not in said and "Traceback" not in said


def test_the_lineage_of_the_last_checkpoint_verifies(recorded):
    done = recorded.run("python", "-m", "scripts.commands", "lineage", "results/recorded/rlhf/ckpt", "--json")
    lineage = json.loads(done.stdout)
    assert lineage["problems"] == []
    found = {stage["stage"]: (stage["identity"], stage["content"]) for stage in lineage["stages"]}
    assert found == {
        stage: (
            recorded_json(stage, "run/identity.json")["identity"],
            recorded_json(stage, "hf/record.json")["content"],
        )
        for stage in STAGES
    }


def test_another_start_trains_from_the_model_and_the_chain_of_before_comes_back(noted):
    rlvr, sft = noted.results / "rlvr", files(noted.results / "sft")
    identity = recorded_json("rlvr/run/identity.json")["identity"]
    noted.snakemake("results/recorded/rlvr/ckpt/record.json", "--config", "start=rlvr")
    record = json.loads((rlvr / "ckpt/record.json").read_text())
    assert record["parents"] == [] and record["identity"] != identity
    trained = files(RECORDED / "results/recorded/rlvr/run/checkpoints")
    assert (
        files(noted.root / f"results/store/{identity}/checkpoints") == trained and files(noted.results / "sft") == sft
    )

    def plan(*options: str) -> dict[str, str]:
        lines = noted.run("python", "-m", "scripts.commands", "plan", *options).stdout.splitlines()
        return {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in STAGES}

    assert plan("--start", "rlvr").keys() == {"rlvr", "rlhf"}
    said = noted.snakemake("results/recorded/rlvr/ckpt/record.json")
    assert f"step 2 of identity {identity} is already trained; publishing it" in said


def test_a_run_directory_publishes_the_same_again_and_another_goes_on_from_its_newest_checkpoint(noted):
    published = {name: files(RECORDED / "results/recorded/sft" / name) for name in ("ckpt", "hf", "exports")}
    for name in ("ckpt", "hf", "exports", "run/exports"):
        shutil.rmtree(noted.results / "sft" / name)
    (noted.results / "sft/metrics.parquet").unlink()
    shutil.rmtree(noted.results / "rlvr/ckpt")
    shutil.rmtree(noted.results / "rlvr/run/checkpoints/step_2")
    targets = [f"results/recorded/{name}" for name in ("rlvr/ckpt/record.json", "sft/metrics.parquet")]
    noted.snakemake(*targets)

    for name, content in published.items():
        again = files(noted.results / "sft" / (name if name != "exports" else "run/exports"))
        again.pop(".snakemake_timestamp", None)
        notes = {path for path in again if path.endswith(".json") and "/" not in path and name == "exports"}
        assert {path: text for path, text in again.items() if path not in notes} == content
        on_numbers = {path for path in notes if path.endswith(".finite.json")}
        assert len(on_numbers) < 2 and len(notes - on_numbers) < 2
    record = json.loads((noted.results / "rlvr/ckpt/record.json").read_text())
    before = recorded_json("rlvr/ckpt/record.json")
    assert record["step"] == 2
    assert record["identity"] == before["identity"]
    assert record["facts"] == before["facts"]
    attempts = [json.loads(line) for line in (noted.results / "rlvr/run/attempts.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in attempts] == [("begin", 0), ("end", 2), ("begin", 1), ("end", 2)]
    assert not list(noted.results.glob("*/run.*"))


def test_the_identities_of_every_recipes_stages_are_the_recorded():
    assert identities() == json.loads(TABLE.read_text())


def test_the_inputs_and_settings_of_every_recipes_jobs_are_the_recorded(fresh):
    fresh.environment["PYTHONPATH"] = str(ROOT)
    fresh.run("python", "-m", "tests.recorded.jobs", "jobs.json")
    assert json.loads((fresh.root / "jobs.json").read_text()) == json.loads((RECORDED / "jobs.json").read_text())
