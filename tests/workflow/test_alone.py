"""Stages that learn from written answers, with no prompts and no evaluation, from an empty folder to the report."""

import json
import shutil

import pytest
import yaml

from scripts.files import read_json
from tests.conftest import ROOT, Workflow

ALONE = ROOT / "tests/alone.yaml"
STAGES = ("sft.seed-1", "sft.seed-2", "dpo", "kto", "rm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The finished tree: two variants of SFT, of which the better goes on; DPO ends early."""
    workflow = Workflow(tmp_path_factory.mktemp("alone"))
    recipe = yaml.safe_load(ALONE.read_text())
    stages = recipe["stages"]
    stages["sft"] |= {"sweep": {"seed": [1, 2]}, "best": "validation_loss"}
    for name in ("dpo", "kto", "rm"):
        stages[name]["parent"] = {"stage": "sft", "best": "validation_loss"}
    stages["dpo"]["dpo"] = {"max_num_steps": 40, "val_period": 2}
    stages["dpo"] |= {"stop_when": {"patience": 2, "min_change": 0.5}, "checkpointing": {"keep_last_k": 1}}
    (workflow.root / "config/recipes/alone.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    workflow.configure("alone")
    workflow.output = workflow.snakemake()
    return workflow


def test_everything_is_made_and_nothing_is_left_to_do(alone):
    for name in (*STAGES, "sft.best-validation_loss"):
        assert (alone.results / name / "metrics.parquet").exists(), name
    assert (alone.results / "report.html").exists() and not (alone.results / "environments.html").exists()
    assert not alone.planned_jobs()["train"] and "Nothing to be done" in alone.snakemake("--dry-run")


def test_eval_json_has_what_held_out_rows_gave_before_and_after(alone):
    figures = {"sft.seed-1": {"loss"}, "dpo": {"loss", "accuracy", "margin"}, "kto": {"loss", "margin"}}
    for name, known in (figures | {"rm": {"loss", "accuracy", "margin"}}).items():
        record = read_json(alone.results / name / "eval.json")
        found = record["validation"]
        assert record.keys() == {"stage", "step", "content", "validation"}
        assert found.keys() == {"rows", "step"} | known and found["step"] == record["step"]
        assert found["rows"] == (20 if name == "sft.seed-1" else 10)
        for figure in known:
            change = found[figure]["after"] - found[figure]["before"]
            assert found[figure]["change"] == pytest.approx(change)
    loss = read_json(alone.results / "sft.seed-1/eval.json")["validation"]["loss"]
    assert loss["change"] < -1


def test_a_stage_that_ends_early_publishes_its_best_checkpoint_and_says_so(alone):
    record = read_json(alone.results / "dpo/ckpt/record.json")
    selected = record["selected"]
    assert record["step"] == selected["best"] <= selected["last"] < selected["planned"] == 40
    lines = (alone.results / "dpo/run/metrics.jsonl").read_text().splitlines()
    losses = {entry["step"]: entry.get("validation_loss") for entry in map(json.loads, lines)}
    assert max(losses) == selected["last"]
    assert selected["value"] == losses[record["step"]] == min(losses[step] for step in losses if step and losses[step])
    says = f"step {record['step']}, the best by validation_loss ("
    places = ("logs/train.log", "stage.html")
    assert all(says in (alone.results / "dpo" / place).read_text() for place in places)
    assert says in alone.run("python", "-m", "scripts.commands", "status").stdout
    assert read_json(alone.results / "dpo/hf/record.json")["step"] == record["step"]


def test_the_variant_with_the_lowest_loss_goes_on(alone):
    choice = read_json(alone.results / "sft.best-validation_loss/choice.json")
    losses = {name: read_json(alone.results / name / "eval.json")["validation"]["loss"]["after"] for name in STAGES[:2]}
    best = min(losses, key=losses.get)
    assert choice["chosen"] == [best] and choice["candidates"][0]["score"] == losses[best]
    parent = read_json(alone.results / "rm/ckpt/record.json")["parents"][0]
    assert parent["stage"] == best


def test_pages_cards_and_the_summary_show_the_loss_before_and_after(alone):
    page = (alone.results / "sft.seed-1/stage.html").read_text()
    assert "Validation loss" in page and 'data-name="sft.seed-1-validation"' in page
    assert "validation loss" in (alone.results / "sft/sweep.html").read_text()
    summary = (alone.results / "summary.csv").read_text()
    assert "validation_loss_before,validation_loss_after,validation_accuracy_after" in summary
    alone.snakemake("--", "results/alone/rm/card.md")
    card = (alone.results / "rm/card.md").read_text()
    assert "On 10 held-out rows of written answers" in card and "validation accuracy" in card


def test_a_training_that_was_lost_after_its_last_measurement_ends_at_the_same_step(alone, tmp_path):
    copied = alone.copied_to(tmp_path / "copied")
    before = read_json(copied.results / "dpo/ckpt/record.json")
    run = (copied.results / "dpo/run").resolve()
    shutil.rmtree(run / f"checkpoints/step_{before['selected']['last']}", ignore_errors=True)
    for part in ("ckpt", "hf"):
        shutil.rmtree(copied.results / "dpo" / part)
    copied.snakemake("--", "results/alone/dpo/ckpt/record.json")
    after = read_json(copied.results / "dpo/ckpt/record.json")
    assert (after["selected"], after["files"]) == (before["selected"], before["files"])
