"""A reward that fails in the middle of a training is corrected, with another rate, and goes on from the checkpoint."""

import html
import json
from pathlib import Path

import pytest
import yaml

from scripts.files import read_json
from tests.conftest import SHORT, Workflow

STEPS, PERIOD = 6, 2
# As if a response at last met what the code did not foresee: from this call on, it judges nothing.
ENVIRONMENT = """
from pathlib import Path


def verify(row, response):
    calls = Path(__file__).with_name("calls")
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size > 70:
        int("not a number")
    return min(1.0, len(response) / 20)
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A tree whose only stage failed after some checkpoints."""
    workflow = Workflow(tmp_path_factory.mktemp("amended"))
    rows = [{"prompt": f"Is {number} odd?", "answer": str(number % 2)} for number in range(40)]
    (workflow.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workflow.root / "mine.py").write_text(ENVIRONMENT)
    short = yaml.safe_load(SHORT.read_text())
    settings = short["defaults"]["grpo"]
    settings["grpo"]["max_num_steps"] = STEPS
    recipe = {
        "name": "amended",
        "seed": 3,
        "source": {"kind": "folder", "path": "."},
        "model": short["model"],
        "environments": {"mine": "mine.py"},
        "blends": {"b": {"kind": "prompts", "environment": "mine", "file": "rows.jsonl", "holdout": 4}},
        "evaluation": short["evaluation"],
        "stages": {
            "rlvr": settings
            | {
                "algorithm": "grpo",
                "blend": "b",
                "checkpointing": {"save_period": PERIOD},
                "probe": {"tolerated_share": 0.99},
            }
        },
    }
    (workflow.root / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (workflow.root / "config/config.yaml").write_text(
        yaml.safe_dump({"recipe": "recipe.yaml", "site": "config/sites/laptop.yaml", "run": "amended"})
    )
    workflow.results = workflow.root / "results/amended"
    workflow.output = workflow.snakemake("results/amended/rlvr/ckpt/record.json", check=False)
    return workflow


def logged(run: Path) -> list[int]:
    """The steps that a folder logged."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [entry["step"] for entry in map(json.loads, lines) if "seconds" in entry]


def test_it_fails_is_corrected_amended_and_goes_on_from_its_newest_checkpoint(failed):
    assert "environment mine: verify of" in failed.output and "ValueError: invalid literal" in failed.output
    before = (failed.results / "rlvr/run").resolve()
    steps = sorted(int(path.name.removeprefix("step_")) for path in (before / "checkpoints").glob("step_*"))
    step = steps[-1]
    assert 0 < step < STEPS
    failed.edit('int("not a number")', "pass", "mine.py")
    failed.edit("lr: 0.001", "lr: 0.002", "recipe.yaml")
    planned = failed.run("stagecoach", "plan").stdout
    assert (
        f"step {step} was reached before environments.mine and policy.optimizer.lr changed" in planned
        and "trains again" not in planned
    )
    assert f"{STEPS} of {STEPS}" in planned
    because = "int failed on words"
    failed.run("stagecoach", "amend", "rlvr", "--because", because)
    assert f"resumes at step {step}" in failed.run("stagecoach", "plan").stdout
    output = failed.snakemake()
    amended = (failed.results / "rlvr/run").resolve()
    assert (
        amended != before
        and f"rlvr: resumes from step {step}" in (failed.results / "rlvr/logs/attempts.log").read_text()
    )
    assert logged(amended) == [*range(1, STEPS + 1)], output
    rates = [
        entry["lr"] for entry in map(json.loads, (amended / "metrics.jsonl").read_text().splitlines()) if "lr" in entry
    ]
    assert rates == [0.001] * step + [0.002] * (STEPS - step)
    record = read_json(failed.results / "rlvr/ckpt/record.json")
    assert record["step"] == STEPS and record["identity"] == amended.name
    assert record["facts"]["amended"] == {"from": before.name, "step": step}
    assert [each["because"] for each in record["amended"]] == [because]
    changed = "environments.mine, policy.optimizer.lr 0.001 -> 0.002"
    told = f"at step {step} of {STEPS}: {changed} changed, because {because}"
    lineage = failed.run("stagecoach", "lineage", "results/amended/rlvr/ckpt").stdout
    assert f"amended {told}" in lineage and "files are as recorded" in lineage
    failed.snakemake("results/amended/rlvr/card.md")
    for page in ("rlvr/card.md", "rlvr/stage.html"):
        assert told in html.unescape((failed.results / page).read_text()), page
    failed.edit("def verify", "# a longer answer earns more\ndef verify", "mine.py")
    assert "Nothing to be done" in failed.snakemake("--dry-run"), "a comment is no other environment"
    assert "1 fresh" in failed.run("stagecoach", "plan").stdout
    failed.run("stagecoach", "amend", "rlvr", "--undo")
    assert failed.planned() == {"rlvr"} and f"{STEPS} of {STEPS}" in failed.run("stagecoach", "plan").stdout
    failed.run("stagecoach", "amend", "rlvr", "--because", because)
    failed.snakemake()
    assert read_json(failed.results / "rlvr/ckpt/record.json")["identity"] == amended.name
