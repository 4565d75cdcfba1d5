"""A third backend is one package: put beside the others, it is planned, trained, resumed, exported, gated and reported."""

import shutil
import signal

import pytest

from scripts.files import read_json
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT
from tests.programs import until
from tests.stages import logged
from tests.workflow.test_resume import program

pytestmark = pytest.mark.long

PACKAGE = ROOT / "tests/backend/plain"
STAGE = """  polish:
    algorithm: sft
    backend: plain
    parent: rlvr1
    blend: sft
    steps: 40
    batch: 8
    tokens: 64
    lr: 0.01
    checkpointing: {save_period: 10}
    gate: [{metric: max_grad_norm, max: 1.0e+4}, {metric: held_out_change, min: -1.0}]
"""


def test_a_small_package_trains_in_one_chain_with_another_backend_and_no_other_file_changes(copied):
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")) < 100
    shutil.copytree(PACKAGE, copied.root / "scripts/backends/plain")
    recipe = copied.root / "config/recipes/short.yaml"
    recipe.write_text(recipe.read_text() + STAGE)
    assert copied.planned() == {"polish"}
    plan = copied.run("python", "-m", "scripts.commands", "plan").stdout.splitlines()
    assert ["polish", "trains", "40", "of", "40"] in [line.split()[:5] for line in plan]

    polish = copied.results / "polish"
    snakemake = copied.begin("snakemake", "results/short/report.html", "results/short/summary.csv")
    until((polish / "run/metrics.jsonl").exists, 180, copied.said)
    program(snakemake).send_signal(signal.SIGTERM)
    assert snakemake.wait(180) == 0, copied.said()

    attempts = TrainingFolder(polish / "run").attempts
    assert [it["outcome"] for it in attempts] == ["unfinished", "finished"] and 0 < attempts[0]["to"] < 40
    assert [step["step"] for step in logged(polish / "run")] == list(range(1, 41))
    parent, record = read_json(copied.results / "rlvr1/hf/record.json"), read_json(polish / "ckpt/record.json")
    assert record["step"] == 40 and record["facts"]["parent_export"] == parent["content"]
    assert read_json(polish / "gate.json")["verdict"] == "pass" and read_json(polish / "eval.json")["environments"]
    assert "polish" in (copied.results / "summary.csv").read_text() and (polish / "stage.html").is_file()
    assert copied.planned() == set()
    shown = copied.run("python", "-m", "scripts.commands", "lineage", "results/short/polish/ckpt").stdout
    assert "polish" in shown and "files are as recorded" in shown

    content = copied.content("polish")  # of steps 31 to 40 trained at a stretch
    for path in (polish / "ckpt", polish / "run/checkpoints/step_40"):
        shutil.rmtree(path)
    copied.snakemake("results/short/polish/ckpt")
    assert copied.content("polish") == content and TrainingFolder(polish / "run").attempts[-1]["outcome"] == "finished"
