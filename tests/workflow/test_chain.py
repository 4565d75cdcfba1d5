"""The chain from end to end on a short recipe: real data, real training, real reports."""

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from scripts.files import read_json
from scripts.rows.prompts import prompt_for_reading
from scripts.stage.training_folder import TrainingFolder
from tests.workflow.test_resume import train_by_hand

STAGES = ("sft", "rlvr1", "rlhf")


def test_plain_snakemake_makes_everything_says_how_far_it_is_and_has_nothing_to_do_afterwards(finished):
    for stage in STAGES:
        directory = finished.results / stage
        record, export, evaluation = (
            read_json(directory / name) for name in ("ckpt/record.json", "hf/record.json", "eval.json")
        )
        assert record["stage"] == stage
        assert record["step"] == {"sft": 30}.get(stage, 3)
        assert [it["steps"] for it in record["trained_by"]] == [[1, record["step"]]]
        assert f"<h1>Stage {stage}</h1>" in (directory / "stage.html").read_text()
        assert record["identity"] == read_json(directory / "run/identity.json")["identity"]
        assert export["content"] == evaluation["content"] == (directory / "hf/model").resolve().name
        rollouts = pd.read_parquet(directory / "rollouts.parquet")
        assert (len(rollouts), set(rollouts["split"])) == (40, {"rlvr1", "rlhf"})
        assert rollouts[["response_before", "response_after", "cut_before", "cut_after"]].notna().all().all()
        assert rollouts["reward_first"].notna().all() == (stage != "sft")
        rewards = rollouts.groupby("environment")["reward_after"].mean()
        assert rewards.to_dict() == pytest.approx(
            {name: it["after"] for name, it in evaluation["environments"].items()}
        )
        assert ("validation" in evaluation) == (stage == "sft")
        assert evaluation["mean"]["change"]["low"] <= evaluation["mean"]["change"]["high"]
        assert read_json(directory / "criteria.json")["verdict"] == "pass"
        metrics = pd.read_parquet(directory / "metrics.parquet")
        if stage == "sft":  # whose held-out rows were measured before the first step
            start, metrics = metrics.iloc[0], metrics.iloc[1:]
            assert start["step"] == 0 and start["validation_loss"] > metrics["validation_loss"].iloc[-1]
        assert metrics["step"].tolist() == list(range(1, record["step"] + 1))
        assert metrics[["loss", "lr", "grad_norm", "entropy", "seconds"]].notna().all().all()
        if stage != "sft":
            assert record["parents"][0]["stage"] == "sft"
            assert metrics[["reward_mean", "reward_std", "truncation_rate"]].notna().all().all()
    assert metrics["kl"].notna().all()  # rlhf has a reference policy
    assert pd.read_parquet(finished.results / "rlvr1/metrics.parquet")["kl"].isna().all()
    assert pd.read_csv(finished.results / "summary.csv")["stage"].tolist() == list(STAGES)
    assert "<html" in (finished.results / "report.html").read_text()[:1000].lower()
    parents = [read_json(finished.results / stage / "ckpt/record.json")["parents"] for stage in ("rlvr1", "rlhf")]
    assert parents[0] == parents[1], "both start from the same checkpoint"
    assert "rlvr1: step 3/3, reward " in finished.output and " s left" in finished.output
    assert "rlvr1: step 3/3" in (finished.results / "rlvr1/logs/train.log").read_text()
    assert "Nothing to be done" in finished.snakemake("--dry-run")


@pytest.mark.slow
def test_chat_answers_as_the_stage_was_scored_and_says_where_an_answer_was_cut(finished):
    rollouts = pd.read_parquet(finished.results / "rlvr1/rollouts.parquet")
    asked = rollouts[~rollouts["prompt"].str.contains("\n")].head(5)
    assert len(asked) == 5
    messages = "".join(f"{prompt}\n\n" for prompt in asked["prompt"])
    done = finished.run("stagecoach", "chat", "rlvr1", typed=messages)
    answers = list(asked["response_after"].str.strip())
    assert sum(answer in done.stdout for answer in answers) >= 4, (done.stdout, answers)  # a batch rounds otherwise
    done = finished.run("stagecoach", "chat", "rlvr1", "--max-new-tokens", "1", typed="What is 3 + 4?\n")
    assert "(cut after 1 tokens; more by --max-new-tokens)" in done.stdout


@pytest.mark.slow
def test_chat_reads_bytes_that_are_no_utf_8_and_refuses_options_without_a_meaning(finished):
    asked = (
        r"""printf 'caf\xe9?\n\n\xff\xfe\xed\xa0\x80\n' | stagecoach chat rlvr1 --system $'\xff' --max-new-tokens 1"""
    )
    done = finished.run("bash", "-c", asked)
    assert done.stdout.count("(cut after 1 tokens; more by --max-new-tokens)") == 2
    for option, value in (("--temperature", "1e-320"), ("--temperature", "nan"), ("--max-new-tokens", "9" * 30)):
        refused = finished.run("stagecoach", "chat", "rlvr1", option, value, check=False)
        assert refused.returncode == 1 and refused.stdout.startswith(f"error: {option} is "), refused.stdout


def test_each_stage_of_a_mixed_chain_has_the_rules_that_it_is_for(fresh):
    fresh.edit("name: short", "name: short\nrelease: v0.7.0")
    fresh.edit(
        "evaluation:",
        "  pairs: {kind: preferences, rows: 60, holdout: 20, environments: [genrm_simple_agent]}\nevaluation:",
    )
    fresh.edit(
        "  rlvr1: {algorithm: grpo, parent: sft",
        """  dpo:
    {algorithm: dpo, backend: nemo_rl, reward: pairs, parent: sft, blend: pairs, config: dpo.yaml, max_num_steps: 3,
     cluster: {num_nodes: 1}, policy: {train_global_batch_size: 4, max_total_sequence_length: 64}}
  rlvr1: {algorithm: grpo, parent: dpo""",
    )
    output = fresh.snakemake("--dry-run", "--printshellcmds")
    planned = {
        (rule, stage)
        for rule, stage in re.findall(r"^(?:local)?rule (\w+):(?:\n .+)*?\n +wildcards: stage=(\w+)", output, re.M)
    }
    trl = {"sft", "rlvr1", "rlhf"}
    assert {stage for rule, stage in planned if rule == "convert"} == {"dpo"}
    assert {stage for rule, stage in planned if rule == "export"} == trl
    assert {stage for rule, stage in planned if rule == "evaluate"} == trl
    before = r"--export results/short/rlvr1/hf/record.json --start +results/short/dpo/hf/record"
    assert re.search(before, output), "nobody scores its parent, so it does"
    assert {stage for rule, stage in planned if rule in ("train", "gate", "stage_page")} == trl | {"dpo"}


def test_a_card_splits_laid_out_for_other_tools_and_snakemakes_own_report_are_made_when_asked_for(copied):
    card, folder = copied.results / "rlhf/card.md", copied.results / "data/rlvr1"
    assert not card.exists()
    copied.snakemake("results/short/rlhf/card.md", "results/short/data/rlvr1/dataset")
    assert "## Lineage" in card.read_text()
    manifest = read_json(folder / "dataset/manifest.json")
    assert Path(manifest["train"]).read_bytes() == (folder / "train-split.jsonl").read_bytes()
    assert manifest["test"] == ""
    copied.snakemake("--report", "mine.html")
    assert (copied.root / "mine.html").stat().st_size > 100_000


@pytest.mark.slow
def test_another_run_is_compared_from_its_files_and_stale_by_its_summary_alone(copied):
    other = shutil.copytree(copied.results, copied.root / "other/short", symlinks=True)
    (other / "rlvr1/eval.json").write_text("{")
    beside = ("results/short/compare.html", "--config", "compare=[./other/short]")
    copied.snakemake(*beside)
    page = (copied.results / "compare.html").read_text()
    assert "Identical in all runs" in page and "Left out: rlvr1 of other/short" in page
    for path in other.rglob("*.json"):
        path.touch()
    assert "Nothing to be done" in copied.snakemake("--dry-run", *beside)
    (other / "summary.csv").write_text("changed")
    planned = copied.planned_jobs("--config", "compare=[./other/short]")
    assert {"compare", "report_html"} <= set(planned) <= {"compare", "report_html", "all"}
    refused = copied.run("snakemake", "--dry-run", "--config", "compare=nothere", check=False)
    assert refused.returncode == 1 and "results/nothere: no run with a trained stage there" in refused.stdout


def test_what_changes_no_weight_plans_no_training_and_a_gate_judged_again_does_not_hide_a_stale_stage(copied):
    copied.edit("name: short", "name: short\ndescription: a comment")
    copied.edit("rlvr1: {algorithm: grpo,", "rlvr1: {gate: [{metric: held_out_change, min: -1}], algorithm: grpo,")
    jobs = copied.planned_jobs()
    assert jobs["train"] == set() and jobs["gate"] == {"rlvr1"}
    copied.edit(
        "    sft: {max_num_steps: 30}", "    sft: {max_num_steps: 30}\n    gate: [{metric: held_out_change, min: -1}]"
    )
    copied.edit("algorithm: grpo, parent: sft, blend: rlvr1", "algorithm: grpo, seed: 9, parent: sft, blend: rlvr1")
    jobs = copied.planned_jobs()
    assert jobs["train"] == {"rlvr1"} and jobs["gate"] == {"sft", "rlvr1"}


def test_a_lineage_is_whole_and_a_stage_published_again_by_another_commit_stays_what_it_is(copied):
    target = "results/short/rlhf/ckpt"
    assert "files are as recorded" in copied.run("python", "-m", "scripts.commands", "lineage", target).stdout
    before = {path: path.read_bytes() for path in copied.results.glob("*/*/record.json")}
    script = copied.root / "scripts/errors.py"
    script.write_text(script.read_text() + "# another commit\n")
    log = copied.results / "sft/run/metrics.jsonl"
    stamp = log.stat().st_mtime_ns
    assert "already trained; publishing it" in copied.snakemake("--force", "results/short/sft/ckpt")
    assert log.stat().st_mtime_ns == stamp
    assert {path: path.read_bytes() for path in before} == before
    assert copied.planned() == set()
    assert copied.planned("results/short/rlhf/hf/record.json") == set()


@pytest.mark.slow
def test_what_the_chain_ends_with_is_scored_on_test_rows_beside_the_model_that_it_started_from(copied):
    copied.edit("  rlvr1:\n    rows: 80\n", "  rlvr1:\n    rows: 80\n    test: 16\n")
    copied.edit("max_new_tokens: 12", "max_new_tokens: 12\n  test: true")
    copied.edit("  rlvr1: {algorithm: grpo, parent: sft, blend: rlvr1}\n", "")
    copied.edit("  rlhf: {algorithm", "# {algorithm")
    before = (copied.results / "sft/eval.json").read_bytes()
    output = copied.snakemake("results/short/sft/test.json")
    assert "rule train:" not in output and (copied.results / "sft/eval.json").read_bytes() == before
    test = read_json(copied.results / "sft/test.json")
    rollouts = pd.read_parquet(copied.results / "sft/test_rollouts.parquet")
    rows = [json.loads(line) for line in (copied.results / "data/rlvr1/test-split.jsonl").open()]
    assert len(rows) == 16
    assert rollouts["prompt"].tolist() == [prompt_for_reading(row) for row in rows]
    assert rollouts[["reward_before", "reward_after"]].notna().all().all()
    assert sum(each["rows"] for each in test["environments"].values()) == 16 and test["mean"]["before"] is not None
    validation = pd.read_parquet(copied.results / "sft/rollouts.parquet")
    assert not {*rollouts["prompt"]} & {*validation.query("split == 'rlvr1'")["prompt"]}
    jobs = copied.planned_jobs("results/short/overview.html", "results/short/summary.csv")
    assert jobs["train"] == jobs["test"] == set()


def test_tracking_is_planned_for_every_stage_where_the_config_names_a_project_and_nowhere_else(copied):
    assert not list(copied.results.glob("*/tracking.json"))
    config = copied.root / "config/config.yaml"
    config.write_text(config.read_text() + "tracking: {project: post-training}\n")
    jobs = copied.planned_jobs()
    assert jobs["track"] == set(STAGES) and jobs["train"] == set()


@pytest.mark.skipif(find_spec("wandb") is not None, reason="envs/wandb.txt is installed")
def test_tracking_without_its_library_is_refused_before_anything_runs(fresh):
    output = fresh.snakemake("--config", "tracking={project: post-training}", check=False)
    assert "tracking in config/config.yaml needs wandb: python -m pip install" in output
    assert not (fresh.results / "data").exists()


@pytest.mark.slow
def test_a_stage_trained_by_hand_and_resumed_ends_with_the_same_weights(copied):
    results, expected = copied.untrained("rlvr1"), copied.content("rlvr1")
    copied.results, stage = results, results / "rlvr1"
    train_by_hand(copied, results)
    assert copied.content("rlvr1") == expected
    for step in (2, 3):
        shutil.rmtree(stage / f"run/checkpoints/step_{step}")
    shutil.rmtree(stage / "ckpt")
    assert "rlvr1: resumes from step 1, planned step 3" in train_by_hand(copied, results).stdout
    assert copied.content("rlvr1") == expected


@pytest.mark.slow
def test_a_second_run_takes_over_what_is_trained_and_goes_on_to_the_same_bits(copied):
    (copied.results / "sft/eval.json").unlink()  # which an undisturbed chain of this commit scores in the store
    copied.snakemake("results/short/sft/eval.json")
    targets = ("results/again/sft/eval.json", "results/again/sft/ckpt/record.json")
    sampled = copied.root / "results/again/sft/eval.sampled.jsonl"  # of a scoring killed when its scores were stored
    sampled.parent.mkdir(parents=True)
    sampled.touch()
    output = copied.snakemake(*targets, "--printshellcmds", "--config", "run=again")
    assert "--publish-only 1" in output, "though its data were made in the same call"
    again = copied.root / "results/again"
    ours, theirs = (read_json(run / "sft/ckpt/record.json") for run in (again, copied.results))
    assert ours == theirs
    for link in ("ckpt/weights", "hf/model"):
        assert (again / "sft" / link).resolve() == (copied.results / "sft" / link).resolve()
    assert "from an earlier call" in (again / "sft/logs/evaluate.log").read_text() and not sampled.exists()
    assert (again / "sft/eval.json").read_bytes() == (copied.results / "sft/eval.json").read_bytes()
    shutil.rmtree(copied.results / "rlvr1/run/checkpoints/step_3")
    results = copied.untrained("rlvr1")
    assert "rlvr1: resumes from step 2" in train_by_hand(copied, results, "--root", "results").stdout
    trained = read_json(results / "rlvr1/ckpt/record.json")
    assert trained["files"]["model.safetensors"]["sha256"] == copied.content("rlvr1")


def test_a_mistake_in_the_recipe_is_one_clear_message_before_anything_runs(fresh):
    fresh.edit("max_num_steps: 30", "max_num_step: 30")
    output = fresh.snakemake("--dry-run", check=False)
    assert "stages.sft.sft.max_num_step: unknown key; did you mean max_num_steps?" in output
    assert "config/recipes/short.yaml:" in output and "Traceback" not in output
    assert not (fresh.root / "results").exists()


def test_a_damaged_blend_fails_its_own_rule_and_leaves_nothing_half_made(copied):
    blend = copied.results / "data/source/rlvr1.jsonl"
    blend.write_bytes(blend.read_bytes()[:-20])
    output = copied.snakemake("results/short/data/rlvr1/manifest.json", check=False)
    assert "rlvr1.jsonl:80: not valid JSON" in output and "fetch the file again" in output
    assert "Traceback" not in output
    left = {path.name for path in (copied.results / "data/rlvr1").iterdir()}
    assert left == {"check.json", "made_from.json", "measured"}, "of the blend before"


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_full_or_read_only_results_folder_is_one_clear_message(fresh, options):
    (fresh.root / "results").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", fresh.root / "results"], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small or read-only file system needs root")
    try:
        output = fresh.snakemake("results/short/data/rlvr1/manifest.json", check=False)
        left = [path.name for path in (fresh.root / "results").rglob("*.jsonl")]
    finally:
        subprocess.run(["umount", fresh.root / "results"], check=True)
    assert "cannot be written (" in output and "Traceback" not in output
    assert left == []


def test_a_stages_export_and_evaluation_are_one_slurm_job(fresh):
    output = fresh.snakemake("results/short/rlvr1/eval.json", "--dry-run", "--config", "site=config/sites/cluster.yaml")
    groups = {name: re.findall(r"^    rule (\w+):", jobs, re.MULTILINE) for name, jobs in blocks_of_groups(output)}
    assert groups == {"after_sft": ["evaluate", "export"], "after_rlvr1": ["evaluate", "export"]}
    assert "Group job" not in fresh.snakemake("--dry-run")


def blocks_of_groups(output: str) -> list[tuple[str, str]]:
    """Each group in what a dry run printed, with what follows it up to the next group."""
    parts = re.split(r"Group job (\w+) ", output)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_a_gate_that_says_stop_stops_the_chain_before_the_next_stage_trains(copied):
    gate = "gate: [{metric: held_out_change, min: 2.0}]"
    copied.edit("    sft: {max_num_steps: 30}", f"    sft: {{max_num_steps: 30}}\n    {gate}")
    copied.edit("rlvr1: {algorithm: grpo,", "rlvr1: {algorithm: grpo, seed: 9,")
    output = copied.snakemake("results/short/rlvr1/ckpt", check=False)
    assert "gate.json: the gate of sft says stop" in output
    assert re.search(
        r"held_out_change since the parent is .*, min 2; look at results/short/sft/rollouts.parquet", output
    )
    assert (copied.results / "rlvr1/run/attempts.jsonl").read_text().count('"begin"') == 1


@pytest.mark.long
def test_a_stage_that_diverges_is_ended_while_it_trains_and_goes_on_when_its_gate_allows(copied):
    wide, narrow = (f"gate: [{{metric: max_grad_norm, max: {bound}}}]," for bound in ("1.0e+9", "1.0e-9"))
    old = "rlvr1: {algorithm: grpo,"
    copied.edit(old, f"{old} grpo: {{max_num_steps: 14}}, {narrow}")
    output = copied.snakemake("results/short/rlvr1/ckpt", check=False)
    assert "rlvr1: stopped, as its gate would stop the chain: max_grad_norm is " in output
    assert "first at step 5" in output
    assert [attempt["outcome"] for attempt in TrainingFolder(copied.results / "rlvr1/run").attempts] == ["failed"], (
        "once"
    )
    assert not (copied.results / "rlvr1/ckpt/record.json").exists()
    copied.edit(narrow, wide)
    output = copied.snakemake("results/short/rlvr1/ckpt", "results/short/rlvr1/gate.json")
    assert "rlvr1: resumes from step 10, planned step 14" in output and "the gate says pass" in output
