"""A stage whose rollouts vLLM samples, trained for real by the workflow, in the environment of envs/vllm.txt.

STAGECOACH_VLLM_PYTHON names that environment's Python; without it, this Python is tried.
"""

import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from scripts.backends.trl.algorithm import PACKAGES
from scripts.backends.trl.versions import difference_of
from scripts.files import read_json, sha256_file, write_json
from scripts.recipe.yaml_file import pinned_versions
from tests.conftest import ROOT, Workflow
from tests.pretrained import save_beginning

PYTHON = os.environ.get("STAGECOACH_VLLM_PYTHON", sys.executable)
LACKING = difference_of(PYTHON, pinned_versions("vllm", (*PACKAGES, "vllm")))
STEPS = 4
ROUNDING = 0.05

pytestmark = pytest.mark.skipif(LACKING is not None, reason=f"vLLM cannot be tried: {LACKING}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tree in which all of the stage is made that vLLM samples for: training, held-out scores, figure."""
    workflow = Workflow(tmp_path_factory.mktemp("vllm"))
    shutil.copy(ROOT / "tests/vllm.yaml", workflow.root / "config/recipes/vllm.yaml")
    site = workflow.root / "config/sites/laptop.yaml"
    site.write_text(f"{site.read_text()}vllm_python: {PYTHON}\n")
    workflow.configure("vllm")
    workflow.snakemake(*(f"results/vllm/rlvr1/{name}" for name in ("eval.json", "stage.html")))
    return workflow


def metrics_of(log) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in log.read_text().splitlines()]).set_index("step")


def test_every_step_says_how_far_vllm_and_the_trainer_differ(trained):
    metrics = pd.read_parquet(trained.results / "rlvr1/metrics.parquet")
    assert list(metrics["step"]) == list(range(1, STEPS + 1))
    assert metrics["token_mult_prob_error"].between(1, 1 + ROUNDING, inclusive="neither").all()
    assert metrics["gen_kl_error"].between(0, ROUNDING, inclusive="neither").all()
    assert metrics["sampling_importance_ratio"].between(1 - ROUNDING, 1 + ROUNDING).all()
    assert "Sampler beside trainer" in (trained.results / "rlvr1/stage.html").read_text()


def test_rollouts_come_from_the_weights_of_the_step_before(trained):
    """Had vLLM kept the parent's weights, it would be about as far from the trainer as the parent is."""
    metrics = pd.read_parquet(trained.results / "rlvr1/metrics.parquet").iloc[1:]
    assert (metrics["kl"] > 1000 * metrics["gen_kl_error"]).all()


def test_an_interrupted_training_ends_with_the_same_bits(trained):
    results = trained.untrained("rlvr1")
    straight, run = trained.results / "rlvr1/run", results / "rlvr1/run"
    command = [
        *(PYTHON, "-m", "scripts.train.run", "--recipe", "config/recipes/vllm.yaml"),
        *("--results", results, "--stage", "rlvr1"),
    ]
    stopped = subprocess.run([*command, "--deadline", "0"], cwd=trained.root, check=False)
    assert stopped.returncode == os.EX_TEMPFAIL and list(metrics_of(run / "metrics.jsonl").index) == [1]
    subprocess.run(command, cwd=trained.root, check=True)
    weights = f"checkpoints/step_{STEPS}/model.safetensors"
    assert sha256_file(run / weights) == sha256_file(straight / weights)
    resumed = metrics_of(run / "metrics.jsonl")
    assert list(resumed.index) == list(range(1, STEPS + 1)) and resumed["gen_kl_error"].max() < ROUNDING


IDS = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from scripts.backends.trl.tokenization import token_ids
from scripts.rows.prompts import prompt_of, render_prompt
model, rows = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(model)
ours = token_ids([render_prompt(row, tokenizer) for row in rows], tokenizer)
engine = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=256)
one = SamplingParams(max_tokens=1, temperature=0)
chat = [each.prompt_token_ids for each in engine.chat([prompt_of(row) for row in rows], one, use_tqdm=False)]
given = engine.generate([{"prompt_token_ids": ids} for ids in ours], one, use_tqdm=False)
print("IDS " + json.dumps([ours, chat, [each.prompt_token_ids for each in given]]))
"""


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_vllm_reads_a_row_as_we_do_whether_it_gets_messages_or_tokens(architecture, tmp_path):
    """By the export's own template; a first token that template and tokenizer both give is there once."""
    save_beginning(architecture, tmp_path / "model", head_dim=32)  # the least that its attention takes on a CPU
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which is larger, 12 or 3?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": " é 🎉 <|im_end|> "},
    ]
    rows = [{"responses_create_params": {"input": talk}}, {"responses_create_params": {"input": "2 or 3?"}}]
    command = [PYTHON, "-c", IDS, str(tmp_path / "model"), json.dumps(rows)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("IDS ")]
    ours, chat, given = json.loads(line.removeprefix("IDS "))
    assert ours == chat == given
    assert architecture == "qwen3" or all(ids.count(ids[0]) == 1 for ids in ours)


ENGINE = """
import json, sys
from pathlib import Path
from scripts.sampling.vllm_engine import VllmEngine
rows, found = json.loads(sys.argv[2]), []
for temperature in (0.0, 1.0):
    engine = VllmEngine(Path(sys.argv[1]), max_new_tokens=8, temperature=temperature, seed=1)
    for done in ((), (0,)):
        found.append({place: each for batch in engine.respond(rows, done) for place, each in batch.items()})
    del engine
print("FOUND " + json.dumps(found))
"""


def test_responses_of_a_generated_blend_are_those_of_transformers_and_repeat_by_their_seeds(tmp_path):
    from scripts.model.generate import Sampler
    from scripts.model.loading import load_model
    from scripts.model.processor import load_processor

    save_beginning("llama", tmp_path / "model", head_dim=32)
    own = tmp_path / "model/generation_config.json"  # of which the tokens alone count, for both engines
    write_json(own, read_json(own) | {"repetition_penalty": 1.5, "min_p": 0.3, "max_new_tokens": 2})
    rows = [{"responses_create_params": {"input": f"Which is larger, {number} or 3?"}} for number in (1, 2, 12)]
    command = [PYTHON, "-c", ENGINE, str(tmp_path / "model"), json.dumps(rows)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    greedy, greedy_left, sampled, sampled_left = json.loads(line.removeprefix("FOUND "))
    sampler = Sampler(load_model(tmp_path / "model"), load_processor(tmp_path / "model"), 8, 0.0, 1)
    ours = {str(place): [*each] for batch in sampler.respond(rows) for place, each in batch.items()}
    assert greedy == ours
    for whole, left in ((greedy, greedy_left), (sampled, sampled_left)):
        assert left == {place: each for place, each in whole.items() if place != "0"}
    assert sampled != greedy
