"""Tasks of lm-evaluation-harness on the recorded chain's exports: by the real lm-eval, offline, on tasks of one's own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from scripts.files import read_json
from tests.conftest import ROOT, Workflow
from tests.workflow.test_recorded import RECORDED

pytestmark = pytest.mark.skipif(
    not (ROOT / ".lm-eval/installed").exists(), reason="lm-eval is not installed: make lm-eval"
)
QUESTIONS = [(a, b) for a in range(1, 7) for b in range(1, 7) if a != b]
SHARED = "dataset_path: json\ndataset_kwargs: {data_files: {test: tasks/questions.jsonl}}\ntest_split: test\n"
LARGER = """task: larger
output_type: multiple_choice
doc_to_text: "Which is larger, {{a}} or {{b}}?"
doc_to_choice: "{{[a|string, b|string]}}"
doc_to_target: "{{1 if b > a else 0}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
SAID = """task: said
output_type: generate_until
doc_to_text: "Say {{a}}."
doc_to_target: "{{a}}"
generation_kwargs: {until: ["!"], max_gen_toks: 2}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
SFT = "results/recorded/sft/benchmarks.json"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A tree of its own with the recorded chain, which nothing trains, and two tasks in a folder."""
    workflow = Workflow(tmp_path_factory.mktemp("tasks"))
    workflow.results = workflow.root / "results/recorded"
    (workflow.root / "config/config.yaml").write_text(
        "recipe: config/recipes/short.yaml\nsite: config/sites/laptop.yaml\nrun: recorded\n"
    )
    shutil.copytree(RECORDED / "results", workflow.root / "results", symlinks=True)
    for path in workflow.results.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    shutil.copy(RECORDED / "recipe.yaml", workflow.root / "config/recipes/short.yaml")
    (workflow.root / ".lm-eval").symlink_to(ROOT / ".lm-eval")
    folder = workflow.root / "tasks"
    folder.mkdir()
    (folder / "larger.yaml").write_text(LARGER + SHARED)
    (folder / "said.yaml").write_text(SAID + SHARED)
    (folder / "questions.jsonl").write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in QUESTIONS))
    workflow.environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(workflow.root / "cache")}
    workflow.edit("max_new_tokens: 12", f"max_new_tokens: 12\n  tasks: [{{task: larger, include_path: {folder}}}]")
    return workflow


@pytest.fixture
def run(tree, monkeypatch, capsys):
    """Run a program of the evaluation in the tree, in this process; what it printed."""
    import datasets

    from scripts.evaluate import harness, tasks

    monkeypatch.chdir(tree.root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tree.root / "cache")

    def call(*arguments: str) -> str:
        program = tasks if arguments == TASKS else harness
        monkeypatch.setattr("sys.argv", ["program", *SHARED_ARGUMENTS, *arguments])
        program.main()
        return capsys.readouterr().out

    return call


SHARED_ARGUMENTS = ("--recipe", "config/recipes/short.yaml", "--packages", ".lm-eval")
TASKS = ("--output", "results/recorded/tasks.json")


def scoring(stage: str, parent: str | None = None, output: str = "benchmarks.json") -> tuple[str, ...]:
    """The arguments with which a stage is scored, beside another."""
    folder = f"results/recorded/{stage}"
    before = ("--parent", f"results/recorded/{parent}/benchmarks.json") if parent else ()
    told = ("--tasks", TASKS[1], "--export", f"{folder}/hf/record.json", "--store", "results/benchmarks")
    return (*told, *before, "--output", f"{folder}/{output}")


def counted(export: Path) -> float:
    """How often an export finds the larger number more probable, counted without lm-eval."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    right = 0
    for a, b in QUESTIONS:
        messages = [{"role": "user", "content": f"Which is larger, {a} or {b}?"}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        scores = []
        for answer in (a, b):
            whole = tokenizer(f"{prompt}{answer}", add_special_tokens=False)["input_ids"]
            with torch.inference_mode():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            scores.append(sum(logits[place - 1, whole[place]].item() for place in range(len(before), len(whole))))
        right += (scores[1] > scores[0]) == (b > a)
    return right / len(QUESTIONS)


def test_a_task_is_scored_by_lm_eval_for_each_export_and_nothing_trains(tree, run):
    output = tree.snakemake(SFT)
    assert set(re.findall(r"rule (\w+):", output)) == {"tasks", "score_tasks"}
    run(*scoring("rlhf", parent="sft"))
    records = [read_json(tree.results / stage / "benchmarks.json") for stage in ("sft", "rlhf")]
    sft, rlhf = (record["benchmarks"]["larger"] for record in records)
    for stage, entry in (("sft", sft), ("rlhf", rlhf)):
        share = counted(tree.results / stage / "hf/model")
        assert entry["score"] == pytest.approx(share, abs=1e-6)
        assert entry["stderr"] == pytest.approx((share * (1 - share) / (len(QUESTIONS) - 1)) ** 0.5, abs=1e-6)
        assert (entry["samples"], entry["metric"], entry["chat_template"]) == (len(QUESTIONS), "acc,none", True)
    assert sft["score"] != rlhf["score"], "another model's scores are its own"
    assert sft["before"] is None and rlhf["before"] == sft["score"] and rlhf["first"] == records[0]["content"]
    assert rlhf["change"]["value"] == pytest.approx(rlhf["score"] - sft["score"], abs=2e-6)
    assert rlhf["change"]["low"] < rlhf["change"]["value"] < rlhf["change"]["high"]


def test_another_task_is_scored_alone_also_after_a_kill_and_an_edited_file_again(tree, run):
    store = tree.root / "results/benchmarks"
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*.parquet")}
    assert len(before) == 2
    tree.edit("  tasks: [", f"  tasks: [{{task: said, include_path: {tree.root / 'tasks'}, limit: 4}}, ")
    tree.edit("tasks: [", f"tasks: [{{task: larger_too, include_path: {tree.root / 'tasks'}}}, ")
    (tree.root / "tasks/larger_too.yaml").write_text((LARGER + SHARED).replace("task: larger", "task: larger_too"))
    run(*TASKS)

    program = [sys.executable, "-m", "scripts.evaluate.harness", *SHARED_ARGUMENTS, *scoring("sft", output="killed")]
    running = subprocess.Popen(program, cwd=tree.root, env=tree.environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (kept := {*store.rglob("*.parquet")} - before.keys()):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert len(kept) == 1 and not (tree.results / "sft/killed").exists()

    printed = run(*scoring("sft"))
    assert printed.startswith("sft: said ") and printed.count("sft: ") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    scores = read_json(tree.results / "sft/benchmarks.json")
    said, too, larger = (scores["benchmarks"][name] for name in ("said", "larger_too", "larger"))
    assert too["score"] == larger["score"] and too["key"] != larger["key"] and said["samples"] == 4
    rows = pq.read_table(store / scores["content"] / f"{said['key']}.parquet").to_pylist()
    assert [row["document"] for row in rows] == [0, 1, 2, 3] and "Say 1." in rows[0]["prompt"]
    assert said["score"] == sum(row["response"] == "1" for row in rows) / 4

    task = tree.root / "tasks/said.yaml"
    task.write_text(task.read_text().replace("Say {{a}}.", "Tell {{a}}."))
    planned = tree.planned_jobs(SFT)
    assert planned.keys() == {"tasks", "score_tasks"}
    run(*TASKS)
    asked = read_json(tree.results / "tasks.json")["tasks"]
    assert asked["larger"]["key"] == larger["key"] and asked["said"]["key"] != said["key"]
