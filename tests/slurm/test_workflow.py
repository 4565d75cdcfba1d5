"""The whole chain through Snakemake's Slurm executor, one stage of it on two hosts."""

import json
import re

import pyarrow.parquet as pq
import pytest
import yaml

from scripts.remote.remote_store import RemoteStore
from scripts.slurm.jobs import latest_jobs
from scripts.stage.remote import push
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import Workflow
from tests.programs import until

SITE = {
    "name": "test",
    "threads": 1,
    "slurm": {
        "partition": "batch",
        "margin": 15,
        "object_store_mb": 100,
        "arguments": {"comment": '{"IdleReaper": {"minutes": "60"}}'},
        "light": {"cpus": 1, "mem_mb": "2G"},
    },
    "stages": {"rlvr1": {"nodes": 2, "arguments": {"exclude": "node1"}}},
}
QUICK = ("--seconds-between-status-checks", "2", "--slurm-init-seconds-before-status-checks", "2")


def on_cluster(root, cluster) -> Workflow:
    """A tree whose site is the cluster."""
    workflow = Workflow(root)
    workflow.environment = cluster.environment
    (root / "config/sites/test.yaml").write_text(yaml.safe_dump(SITE))
    workflow.configure(site="test")
    return workflow


@pytest.fixture(scope="module")
def trained(slurm, tmp_path_factory):
    """A tree in which `snakemake --profile profiles/slurm` has run to the report."""
    workflow = on_cluster(tmp_path_factory.mktemp("chain"), slurm)
    workflow.output = workflow.snakemake("--profile", "profiles/slurm", *QUICK)
    return workflow


def test_the_chain_runs_to_its_report_and_a_stage_trains_on_two_hosts(trained, slurm):
    assert (trained.results / "report.html").exists()
    for stage, nodes in {"sft": 1, "rlvr1": 2, "rlhf": 1}.items():
        (attempt,) = TrainingFolder(trained.results / stage / "run").attempts
        assert (attempt["outcome"], attempt["nodes"]) == ("finished", nodes)
        assert attempt["host"].startswith("node"), "it ran on a host of the cluster"
    logs = [log.read_text() for log in trained.results.glob("rlvr1/logs/ray-*/ray-node*.log")]
    assert sum("Running command on head node" in log for log in logs) == 1 and len(logs) == 2
    assert {host: slurm.processes(host) for host in slurm.hosts} == {host: [] for host in slurm.hosts}


def test_the_sites_comment_and_a_stages_excluded_nodes_are_slurms_and_the_stages_stay_known(
    trained, slurm, monkeypatch
):
    monkeypatch.chdir(trained.root)
    comment, job = (
        SITE["slurm"]["arguments"]["comment"],
        latest_jobs(trained.results.relative_to(trained.root))["rlvr1"].job,
    )
    assert f"{job.id}|{comment}|node[2-3]" in slurm.run("squeue", "--states=all", "--noheader", "--format=%i|%k|%N")


def test_decisions_are_taken_beside_snakemake_and_the_rest_is_submitted(trained):
    submitted = set(re.findall(r"^ *rule (\w+):", trained.output, re.MULTILINE))
    assert submitted == {"fill", "check", "train", "export", "evaluate"}


def test_nothing_is_left_to_do_afterwards_and_slurm_is_not_needed_to_see_that(trained, monkeypatch):
    monkeypatch.setattr(trained, "environment", {**trained.environment, "SLURM_CONF": "/nonexistent"})
    assert "Nothing to be done" in trained.snakemake("--profile", "profiles/slurm", "--dry-run")
    assert trained.run("python", "-m", "scripts.commands", "plan").stdout.count("fresh") >= 3
    assert re.search(r"rlvr1 +fresh", trained.run("python", "-m", "scripts.commands", "status").stdout)


def test_a_dry_run_shows_what_a_stage_would_ask_for_by_the_profiles_name_too(trained):
    (trained.root / "slurm").symlink_to("profiles/slurm")  # as in the repository
    training = (trained.results / "rlvr1/run").resolve()
    training.rename(trained.root / "away")
    try:
        output = trained.snakemake("--profile", "slurm", "--dry-run", "--force", "results/short/rlvr1/ckpt")
    finally:
        (trained.root / "away").rename(training)
    train = re.search(r"rule train: (.+\n(?:    .+)+)", output)[1]
    assert train.startswith("stage=rlvr1; Forced execution\n    resources: ")
    for asked in ("nodes=2", "gres=gpu:8", "runtime=60", "slurm_extra=--exclusive", "--exclude=node1"):
        assert asked in train
    assert re.search(r"(?m)^rlvr1: would start at 20\S+, submitted now$", output)


def test_publishing_again_takes_a_light_job(trained):
    output = trained.snakemake("--profile", "profiles/slurm", *QUICK, "--force", "results/short/rlvr1/ckpt")
    train = re.search(r"rule train:(?:\n    .+)+", output)[0]
    assert "nodes=1," in train and "gres" not in train
    assert json.loads((trained.results / "rlvr1/ckpt/record.json").read_text())["step"] == 3
    assert len(TrainingFolder(trained.results / "rlvr1/run").attempts) == 1


def test_what_another_run_trained_takes_a_light_job_too(trained):
    trained.untrained("rlvr1").rename(trained.root / "results/again")
    target = "results/again/rlvr1/ckpt"
    output = trained.snakemake("--profile", "profiles/slurm", *QUICK, target, "--config", "run=again")
    train = re.search(r"rule train:(?:\n    .+)+", output)[0]
    assert "nodes=1," in train and "gres" not in train
    (attempt,) = TrainingFolder(trained.root / "results/again/rlvr1/run").attempts
    assert attempt["nodes"] == 2


@pytest.mark.slow
def test_a_light_job_pushes_and_another_tree_publishes_what_is_in_the_store_without_training(trained, slurm, tmp_path):
    store = {"remote": str(tmp_path / "remote")}
    RemoteStore(store["remote"]).begin()
    trained.configure(site="test", store=store)
    output = trained.snakemake("--profile", "profiles/slurm", *QUICK, "results/short/sft/pushed.json")
    pushing = re.search(r"rule push:(?:\n    .+)+", output)[0]
    assert "nodes=1," in pushing and "gres" not in pushing and "rule train:" not in output
    (tmp_path / "other").mkdir()
    other = on_cluster(tmp_path / "other", slurm)
    other.configure(site="test", store=store)
    output = other.snakemake("--profile", "profiles/slurm", *QUICK, "results/short/sft/hf/record.json")
    train = re.search(r"rule train:(?:\n    .+)+", output)[0]
    assert "nodes=1," in train and "gres" not in train
    assert other.content("sft") == trained.content("sft")
    assert TrainingFolder(other.results / "sft/run").attempts == TrainingFolder(trained.results / "sft/run").attempts
    trained.configure(site="test")

    push(RemoteStore(store["remote"]), TrainingFolder((trained.results / "rlvr1/run").resolve()), "rlvr1", 2)
    output = other.snakemake("--profile", "profiles/slurm", *QUICK, "results/short/rlvr1/ckpt")
    assert re.findall(r"rule train:(?:\n    .+)+?nodes=(\d)", output) == ["1", "2"], "all nodes only after the fetch"
    assert other.content("rlvr1") == trained.content("rlvr1")
    attempts = TrainingFolder(other.results / "rlvr1/run").attempts[-2:]
    assert [(each["from"], each["to"], each["outcome"]) for each in attempts] == [
        (2, 2, "waited"),
        (2, 3, "finished"),
    ]


@pytest.mark.slow
def test_variants_of_a_sweep_train_on_nodes_and_the_choice_is_made_beside_snakemake(trained):
    rlhf = "blend: rlhf, loss_fn: {reference_policy_kl_penalty: 0.01}"
    trained.edit(rlhf, rlhf + ", sweep: {policy.optimizer.lr: [2.0e-3, 4.0e-3]}, best: held_out_mean")
    output = trained.snakemake(
        "--profile", "profiles/slurm", *QUICK, "results/short/rlhf.best-held_out_mean/choice.json"
    )
    for variant in ("rlhf.lr-0.002", "rlhf.lr-0.004"):
        attempts = TrainingFolder(trained.results / variant / "run").attempts
        assert [(attempt["from"], attempt["to"]) for attempt in attempts] == [(0, 3)]
        assert all(attempt["host"].startswith("node") for attempt in attempts)
    assert len(re.findall(r"localcheckpoint choose:", output)) == 1


@pytest.mark.parametrize(
    ("slurm_settings", "said"),
    [
        ({"partition": "batsch"}, "slurm.partition: no partition is named batsch; did you mean batch?"),
        ({"gpus_per_node": 4}, "slurm.gpus_per_node is 4, but the nodes of batch have 8"),
        ({"max_nodes": 1}, "stage rlvr1 asks for 2 nodes, but can get 1 at most"),
        ({"budget_gpu_hours": 1}, "--config over_budget=true"),
        ({"arguments": {"licenses": "matlab"}}, "rlvr1: Slurm refuses it: allocation failure: Invalid license"),
        ({"light": {"mem_mb": "1T"}}, "check, evaluate, export, fill: Slurm refuses it: "),
    ],
)
def test_what_the_cluster_has_not_is_refused_before_anything_is_submitted(slurm, tmp_path, slurm_settings, said):
    workflow = on_cluster(tmp_path, slurm)
    site = SITE | {"slurm": SITE["slurm"] | slurm_settings}
    (tmp_path / "config/sites/test.yaml").write_text(yaml.safe_dump(site))
    output = workflow.snakemake("--profile", "profiles/slurm", "results/short/rlvr1/ckpt", check=False)
    assert said in output
    assert "has been submitted" not in output


def test_nobody_trains_on_a_login_node_by_mistake(slurm, tmp_path):
    workflow = on_cluster(tmp_path, slurm)
    assert "trains through Slurm: snakemake --profile slurm" in workflow.snakemake(check=False)
    workflow.configure()
    output = workflow.snakemake("--profile", "profiles/slurm", check=False)
    assert "config/sites/laptop.yaml has no slurm section" in output


@pytest.mark.slow
def test_shards_are_sampled_side_by_side_and_one_that_is_preempted_goes_on(trained, slurm):
    source = "kind: generated, by: sft, prompts: rlvr1, samples: 48, max_new_tokens: 12, shards: 2"
    trained.edit(
        "  rlhf:\n    rows: 60", f"  own: {{source: {{{source}}}, select: {{pass_rate: {{}}}}}}\n  rlhf:\n    rows: 60"
    )
    judged, samples = trained.results / "data/own/generated/judged.parquet", trained.root / "results/samples"
    command = ("snakemake", "--profile", "profiles/slurm", *QUICK, str(judged.relative_to(trained.root)))
    with trained.begin(*command) as process:
        until(lambda: len([*samples.rglob("*.jsonl")]) == 2, 120, "both shards sample")
        jobs = slurm.run("squeue", "--states=RUNNING", "--noheader", "--format=%i|%k").splitlines()
        sampling = [line.split("|")[0] for line in jobs if "rule_sample" in line]
        assert len(sampling) == 2, "the shards run side by side"
        slurm.run("scontrol", "requeue", sampling[0])
        assert process.wait(400) == 0, trained.said()
    rows = pq.read_table(judged).select(["line", "sample"]).to_pylist()
    assert len({(row["line"], row["sample"]) for row in rows}) == len(rows) == 60 * 48
    folder = max(samples.iterdir(), key=lambda path: sum(1 for _ in path.rglob("*.jsonl")))
    kept = [
        place for path in folder.glob("*.jsonl") for line in path.read_text().splitlines() for place in json.loads(line)
    ]
    assert len([*folder.glob("*.jsonl")]) == 3 and len({*kept}) == len(kept), "nothing was sampled twice"
