"""A third backend is one package: put beside the others, it is planned, trained, resumed, exported, gated and reported."""

import json
import shutil
import signal
import subprocess
import time

from tests.conftest import ROOT
from tests.workflow.test_resume import program

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


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_package_is_small():
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")) < 100


def test_it_trains_in_one_chain_with_another_backend_and_no_other_file_changes(copied):
    shutil.copytree(PACKAGE, copied.root / "scripts/backends/plain")
    recipe = copied.root / "config/recipes/short.yaml"
    recipe.write_text(recipe.read_text() + STAGE)
    assert copied.planned() == {"polish"}
    plan = copied.run("python", "-m", "scripts.commands", "plan").stdout.splitlines()
    assert ["polish", "trains", "40", "of", "40"] in [line.split()[:5] for line in plan]

    target = "results/short/report.html"
    log = (copied.root / "snakemake.log").open("w")
    streams = {"stdout": log, "stderr": subprocess.STDOUT}
    command = ["snakemake", target, "results/short/summary.csv"]
    snakemake = subprocess.Popen(command, cwd=copied.root, env=copied.environment, start_new_session=True, **streams)
    polish = copied.results / "polish"
    while not (polish / "run/metrics.jsonl").exists():
        assert snakemake.poll() is None, (copied.root / "snakemake.log").read_text()
        time.sleep(0.02)
    program(snakemake).send_signal(signal.SIGTERM)
    assert snakemake.wait(180) == 0, (copied.root / "snakemake.log").read_text()

    ends = [entry for entry in records(polish / "run/attempts.jsonl") if entry["event"] == "end"]
    assert [entry["outcome"] for entry in ends] == ["unfinished", "finished"] and 0 < ends[0]["step"] < 40
    assert [entry["step"] for entry in records(polish / "run/metrics.jsonl")] == list(range(1, 41))
    parent = json.loads((copied.results / "rlvr1/hf/record.json").read_text())
    record = json.loads((polish / "ckpt/record.json").read_text())
    assert record["step"] == 40 and record["facts"]["parent_export"] == parent["content"]
    assert json.loads((polish / "gate.json").read_text())["verdict"] == "pass"
    assert json.loads((polish / "eval.json").read_text())["environments"]
    assert "polish" in (copied.results / "summary.csv").read_text() and (polish / "stage.html").is_file()
    assert copied.planned() == set()
    shown = copied.run("python", "-m", "scripts.commands", "lineage", "results/short/polish/ckpt").stdout
    assert "polish" in shown and "files are as recorded" in shown

    content = copied.content("polish")  # of steps 31 to 40 trained at a stretch
    for path in (polish / "ckpt", polish / "run/checkpoints/step_40"):
        shutil.rmtree(path)
    copied.snakemake("results/short/polish/ckpt")
    assert copied.content("polish") == content and records(polish / "run/attempts.jsonl")[-1]["outcome"] == "finished"
