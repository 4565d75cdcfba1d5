"""A stage trains on rows that another stage's model made: sampled, judged and selected by the workflow, for real."""

import json
import os
import re
import signal
import time

import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import ROOT, Workflow

BLEND = "results/short/data/pairs"
PARITY = '''"""Rewards responses whose bytes have an even sum."""


def verify(row, response):
    return float(sum(response.encode()) % 2 == 0)


def good_answer(row):
    return "even"
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tree with SFT, two generated blends of its responses, and a stage on each, made up to the report."""
    workflow = Workflow(tmp_path_factory.mktemp("generated"))
    (workflow.root / "parity.py").write_text(PARITY)
    (workflow.root / "rows").mkdir()
    agent = {"type": "responses_api_agents", "name": "parity"}
    with (workflow.root / "rows/asked.jsonl").open("w") as file:
        for number in range(80):
            asked = {"input": [{"role": "user", "content": f"say {number % 70}"}]}
            file.write(json.dumps({"agent_ref": agent, "responses_create_params": asked}) + "\n")
    recipe = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    source = {"kind": "generated", "by": "sft", "prompts": "asked", "samples": 4, "max_new_tokens": 20, "shards": 2}
    recipe["stages"]["sft"]["default_gate"] = False
    recipe["environments"] = {"parity": "parity.py"}
    recipe["blends"] = {
        "sft": recipe["blends"]["sft"],
        "asked": {"source": {"kind": "folder", "path": "rows"}, "holdout": 10, "environments": ["parity"]},
        "pairs": {"source": source, "select": {"pairs": {"margin": 0.5}}, "holdout": 4},
        "hard": {"source": source, "select": {"pass_rate": {"max": 0.9}}, "holdout": 4},
    }
    policy = {"max_total_sequence_length": 64, "optimizer": {"lr": 1e-3}, "train_global_batch_size": 4}
    dpo = {"algorithm": "dpo", "parent": "sft", "blend": "pairs", "dpo": {"max_num_steps": 2}, "policy": policy}
    rlvr = {"algorithm": "grpo", "parent": "sft", "blend": "hard", "probe": {"action": "warn"}}
    recipe["stages"] = {"sft": recipe["stages"]["sft"], "dpo": dpo, "rlvr": rlvr}
    (workflow.root / "config/recipes/short.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    workflow.output = workflow.snakemake()
    return workflow


@pytest.fixture
def copied(made, tmp_path):
    return made.copied_to(tmp_path)


def change(workflow, keys, value):
    """Change a setting of the recipe, by its path."""
    path = workflow.root / "config/recipes/short.yaml"
    recipe = place = yaml.safe_load(path.read_text())
    *before, last = keys.split(".")
    for key in before:
        place = place[key]
    place[last] = value
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))


def rules_planned(workflow):
    """The rules of the jobs that a dry run plans."""
    return set(re.findall(r"^rule (\w+):", workflow.snakemake("--dry-run"), re.M))


def generated(workflow, blend="pairs"):
    return (workflow.results / f"data/{blend}/generated/{blend}.jsonl").read_bytes()


def parity(answer):
    return sum(answer[0]["content"].encode()) % 2


def sampled(workflow):
    """The lines of responses that lie in the folder of all calls."""
    return sum(len(path.read_text().splitlines()) for path in (workflow.root / "results/samples").rglob("*.jsonl"))


def test_the_rows_name_the_model_that_made_them_and_hold_nothing_held_out(made):
    content = json.loads((made.results / "sft/hf/record.json").read_text())["content"]
    rows = [json.loads(line) for line in generated(made).splitlines()]
    held_out = [json.loads(line) for line in (made.results / "data/asked/val-split.jsonl").read_text().splitlines()]
    questions = {row["responses_create_params"]["input"][0]["content"] for row in held_out}
    assert rows and not questions & {row["prompt"][0]["content"] for row in rows}
    for row in rows:
        assert row["made"]["chosen"]["model"] == row["made"]["rejected"]["model"] == content
        assert row["made"]["chosen"]["reward"] == 1.0 and row["made"]["rejected"]["reward"] == 0.0
        assert [parity(row[name]) for name in ("chosen", "rejected")] == [0, 1]
    manifest = json.loads((made.results / "data/pairs/manifest.json").read_text())
    assert manifest["generated"]["by"] == {"sft": content}
    assert manifest["generated"]["left_out"]["prompts that are held out"] > 0


def test_both_blends_share_one_sampling(made):
    assert len(list((made.root / "results/samples").iterdir())) == 2, "one of responses, and one of verdicts"
    tables = [pq.read_table(made.results / f"data/{name}/generated/judged.parquet") for name in ("pairs", "hard")]
    assert tables[0].equals(tables[1])
    assert {*tables[0]["environment"].to_pylist()} == {"parity"}


def test_report_card_and_lineage_name_the_maker(made):
    content = json.loads((made.results / "sft/hf/record.json").read_text())["content"]
    page = (made.results / "data/pairs/generated.html").read_text()
    assert f"sft ({content})" in page and "Prompts by pass rate" in page and "Responses by length" in page
    lineage = made.run("python", "-m", "scripts.commands", "lineage", "results/short/dpo/ckpt").stdout
    assert f"pairs of generated by sft@{content}" in lineage
    made.snakemake("results/short/dpo/card.md")
    assert f"| dpo | pairs | generated by sft | {content} |" in (made.results / "dpo/card.md").read_text()


def test_what_is_made_is_not_made_again(made):
    output = made.snakemake("--dry-run")
    assert "Nothing to be done" in output
    plan = made.run("python", "-m", "scripts.commands", "plan").stdout
    assert "3 fresh" in plan and "blend " not in plan


def test_another_threshold_samples_and_judges_nothing(copied):
    before, lines = generated(copied), sampled(copied)
    change(copied, "blends.pairs.select", {"pairs": {"margin": 0.5, "rejected": "random", "max_length_ratio": 1.5}})
    plan = copied.run("python", "-m", "scripts.commands", "plan").stdout
    assert re.search(r"^dpo .*its data are made anew first", plan, re.M) and re.search(r"^rlvr +fresh", plan, re.M)
    planned = rules_planned(copied)
    assert {"select", "fill_generated", "train"} <= planned and "sample" not in planned
    copied.snakemake(f"{BLEND}/generated/pairs.jsonl")
    assert generated(copied) != before and sampled(copied) == lines


def test_another_reward_judges_again_and_samples_nothing(copied):
    lines = sampled(copied)
    path = copied.root / "parity.py"
    path.write_text(path.read_text().replace("% 2 == 0", "% 2 == 1"))
    planned = rules_planned(copied)
    assert {"judge", "select"} <= planned and "sample" not in planned
    copied.snakemake(f"{BLEND}/generated/pairs.jsonl")
    rows = [json.loads(line) for line in generated(copied).splitlines()]
    assert rows and all(parity(row["chosen"]) for row in rows)
    assert sampled(copied) > lines, "the verdicts are new"


def test_another_number_of_shards_gives_the_same_rows_and_trains_nothing(copied):
    before, lines = generated(copied), sampled(copied)
    change(copied, "blends.pairs.source.shards", 3)
    assert "sample" in rules_planned(copied)
    copied.snakemake(f"{BLEND}/manifest.json")
    assert generated(copied) == before and sampled(copied) == lines
    plan = copied.run("python", "-m", "scripts.commands", "plan").stdout
    assert "3 fresh" in plan


@pytest.mark.long
def test_another_model_makes_other_rows(copied):
    change(copied, "stages.sft.seed", 9)
    planned = copied.planned_jobs()
    assert planned["train"] == {"sft", "dpo", "rlvr"} and "sample" in planned
    plan = copied.run("python", "-m", "scripts.commands", "plan").stdout
    assert re.search(r"^dpo .*sft comes first", plan, re.M)
    assert re.search(r"blend pairs: 4 responses of sft to \d+ prompts, in 2 jobs", plan)


@pytest.mark.long
def test_nothing_is_sampled_from_a_stage_whose_gate_says_stop(copied):
    change(copied, "stages.sft.gate", [{"metric": "final_loss", "max": 1e-6, "action": "stop"}])
    change(copied, "blends.pairs.source.seed", 5)
    output = copied.snakemake(f"{BLEND}/manifest.json", check=False)
    assert "blend pairs is not sampled" in output and "the gate of sft says stop" in output


def test_a_kill_while_sampling_costs_a_batch_and_changes_no_row(copied):
    before = generated(copied)
    for name in ("results/samples", "results/short/data/pairs", "results/short/data/hard"):
        copied.run("rm", "-r", name)
    process = copied.begin("snakemake", "--cores", "1", f"{BLEND}/generated/pairs.jsonl")
    until = time.monotonic() + 200
    while not (kept := [*(copied.root / "results/samples").rglob("*.jsonl")]):
        assert time.monotonic() < until and process.poll() is None, copied.said()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    begun = sum(len(json.loads(line)) for path in kept for line in path.read_text().splitlines() if line.endswith("}"))
    copied.snakemake("--unlock")
    output = copied.snakemake("--rerun-incomplete", f"{BLEND}/generated/pairs.jsonl")
    earlier = sum(map(int, re.findall(r"responses of sft: \d+ in all, (\d+) of them from earlier calls", output)))
    assert earlier >= begun > 0
    assert generated(copied) == before
