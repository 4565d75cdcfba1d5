"""Tasks of lm-evaluation-harness on the recorded chain's exports: by the real lm-eval, offline, on tasks of one's own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.errors import UserError
from scripts.files import read_json
from scripts.program import arguments_of
from tests.conftest import ROOT, Workflow
from tests.workflow.test_recorded import RECORDED

pytestmark = pytest.mark.skipif(
    not (ROOT / ".lm-eval/installed").exists(), reason="lm-eval is not installed: make lm-eval"
)
QUESTIONS = [(a, b) for a in range(1, 7) for b in range(1, 7) if a != b]
TASKS = Path(__file__).with_name("tasks")
SFT = "results/recorded/sft/benchmarks.json"


def give_tasks(workflow: Workflow) -> Path:
    """Make the tasks' folder in a tree, and let it score them by the lm-eval that is installed here, offline."""
    (workflow.root / ".lm-eval").symlink_to(ROOT / ".lm-eval")
    folder = shutil.copytree(TASKS, workflow.root / "tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in QUESTIONS))
    workflow.environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(workflow.root / "cache")}
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A tree of its own with the recorded chain, which nothing trains, and two tasks in a folder."""
    workflow = Workflow(tmp_path_factory.mktemp("tasks"))
    workflow.configure(run="recorded")
    shutil.copytree(RECORDED / "results", workflow.root / "results", symlinks=True)
    for path in workflow.results.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    shutil.copy(RECORDED / "recipe.yaml", workflow.root / "config/recipes/short.yaml")
    folder = give_tasks(workflow)
    workflow.run("python", "-m", "scripts.commands", "migrate")
    workflow.edit("max_new_tokens: 12", f"max_new_tokens: 12\n  tasks: [{{task: larger, include_path: {folder}}}]")
    return workflow


@pytest.fixture
def run(tree, monkeypatch, capsys):
    """Score a stage of the tree, beside another, by the program in this process; what it printed."""
    from scripts.evaluate import tasks

    monkeypatch.chdir(tree.root)
    for name, value in tree.environment.items():
        monkeypatch.setenv(name, value)

    def call(*arguments: str) -> str:
        tasks.main(**arguments_of(tasks.main, [*SHARED_ARGUMENTS, *arguments]))
        return capsys.readouterr().out

    return call


SHARED_ARGUMENTS = ("--recipe", "config/recipes/short.yaml", "--packages", ".lm-eval")


def scoring(stage: str, parent: str | None = None) -> tuple[str, ...]:
    """The arguments with which a stage is scored, beside another."""
    folder = f"results/recorded/{stage}"
    before = ("--parent", f"results/recorded/{parent}/benchmarks.json") if parent else ()
    told = ("--export", f"{folder}/hf/record.json", "--store", "results/benchmarks")
    return (*told, *before, "--output", f"{folder}/benchmarks.json")


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


def test_another_task_is_scored_alone_also_after_a_kill_and_an_edited_folder_again(tree, run):
    store, sft = tree.root / "results/benchmarks", tree.results / "sft/benchmarks.json"
    another = tree.root / "more"
    another.mkdir()
    shutil.copy(TASKS / "said.yaml", another)
    (another / "too.yaml").write_text((TASKS / "larger.yaml").read_text().replace("task: larger", "task: larger_too"))
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*.json*")}
    assert len(before) == 4, "results and samples of two exports"
    more = f"{{task: larger_too, include_path: {another}}}, {{task: said, include_path: {another}, limit: 4}}"
    tree.edit("  tasks: [", f"  tasks: [{more}, ")
    program = [sys.executable, "-m", "scripts.evaluate.tasks", *SHARED_ARGUMENTS, *scoring("sft")]
    sft.unlink()
    running = subprocess.Popen(
        program, cwd=tree.root, env=tree.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout.readline().startswith("sft: larger_too ")
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    kept = {path: path.stat().st_mtime_ns for path in store.glob("*/[!.]*/**/*.json*")}
    assert len(kept) == 6 and kept.items() >= before.items() and not sft.exists()

    run(*scoring("sft"))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    scores = read_json(sft)
    said, too, larger = (scores["benchmarks"][name] for name in ("said", "larger_too", "larger"))
    assert too["score"] == larger["score"] and too["key"] != larger["key"] and said["samples"] == 4
    (samples,) = (store / scores["content"] / said["key"]).rglob("samples_said_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1, 2, 3] and "Say 1." in str(rows[0]["arguments"])
    assert said["score"] == sum(row["filtered_resps"] == ["1"] for row in rows) / 4
    assert larger["cut"] is None, "nothing is generated"
    tokenizer = AutoTokenizer.from_pretrained(tree.results / "sft/hf/model")
    assert said["cut"] == sum(len(tokenizer(row["resps"][0][0])["input_ids"]) >= 2 for row in rows) / 4

    task = another / "said.yaml"
    task.write_text(task.read_text().replace("Say {{a}}.", "Tell {{a}}."))
    assert tree.planned_jobs(SFT).keys() == {"tasks", "score_tasks"}
    run(*scoring("sft"))
    again = read_json(sft)["benchmarks"]
    assert again["larger"]["key"] == larger["key"] and again["said"]["key"] != said["key"]


def test_a_task_that_lm_eval_does_not_know_is_one_message(tree, run):
    tree.edit("  tasks: [", "  tasks: [gsm9k, ")
    with pytest.raises(UserError, match=r"evaluation\.tasks: gsm9k: lm-eval ended with 1: .*gsm9k"):
        run("--output", "results/recorded/tasks.json")
