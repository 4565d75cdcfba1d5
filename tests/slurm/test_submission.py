"""What Slurm gets to hear of a site's words: arguments, GRES, memory, partitions; and what it says before a submission."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from snakemake.iocontainers import ResourceList

from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Resources
from scripts.slurm.executor import Trial, try_jobs
from scripts.slurm.resources import light_resources, training_resources
from tests.conftest import Workflow
from tests.slurm.cluster import Cluster

COMMENT = json.dumps({"Reaper": {"minutes": "60", "reason": 'it\'s $(touch harm) `touch harm` | {x} "-J" \\'}})
SNAKEFILE = """\
import sys
from pathlib import Path
sys.path.insert(0, workflow.basedir)
from scripts.controller.console import Console
from scripts.slurm.executor import use_executor
from scripts.slurm.resources import light_resources, training_resources
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe import stage_settings
Console(workflow).install()
use_executor(Path("results"))
site = load_site(Path("site.yaml"), load_recipe(Path("config/recipes/short.yaml")))
STAGES = {"rlvr1": stage_settings.Resources(nodes=2, mem_mb=0), "rlhf": stage_settings.Resources(mem_mb="2G")}

def of_training(name):
    return lambda wildcards: training_resources(site.for_stage(wildcards.stage), STAGES[wildcards.stage])[name]

rule all:
    input: "rlvr1", "rlhf", "light"

rule train:
    output: "{stage}"
    wildcard_constraints: stage="rl.*"
    resources: **{name: of_training(name) for name in training_resources(site, stage_settings.Resources())}
    shell: "scontrol show job --oneliner $SLURM_JOB_ID > {output}"

rule light:
    output: "light"
    resources: **light_resources(site)
    shell: "scontrol show job --oneliner $SLURM_JOB_ID > {output}"
"""


@pytest.fixture(scope="module")
def typed(possible, tmp_path_factory):
    """Two hosts, each of four H100 GPUs and two nics."""
    with Cluster(tmp_path_factory.mktemp("typed"), hosts=2, gpus=4, typed=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(possible, tmp_path_factory):
    """Two hosts whose Slurm has no GRES."""
    with Cluster(tmp_path_factory.mktemp("plain"), hosts=2, gpus=0) as cluster:
        yield cluster


def submitted(root: Path, cluster: Cluster, slurm: dict, stages: dict | None = None) -> dict[str, str]:
    """What Slurm shows of the jobs that a site's trainings and light job became, by output, and Snakemake's words."""
    root.mkdir(exist_ok=True)
    tree = Workflow(root)
    tree.environment = cluster.environment
    (root / "Snakefile").write_text(SNAKEFILE)
    (root / "site.yaml").write_text(yaml.safe_dump({"name": "x", "threads": 1, "slurm": slurm, "stages": stages or {}}))
    said = tree.snakemake("--profile", "profiles/slurm", "--seconds-between-status-checks", "2")
    return {name: (root / name).read_text() for name in ("rlvr1", "rlhf", "light")} | {"said": said}


def test_arguments_reach_slurm_to_the_letter_and_stages_partitions_and_light_jobs_have_their_own(typed, tmp_path):
    slurm = {
        "partition": "batch",
        "gpus_per_node": 4,
        "gres": "gpu:h100:4",
        "arguments": {"comment": COMMENT, "exclude": "node2", "contiguous": True},
        "light": {"partition": "urgent", "mem_mb": "1G", "arguments": {"comment": "light; touch harm"}},
    }
    stages = {"rlvr1": {"arguments": {"exclude": False}}, "rlhf": {"partition": "urgent", "arguments": {"nice": 7}}}
    jobs = submitted(tmp_path, typed, slurm, stages)
    assert f"Comment={COMMENT} " in jobs["rlvr1"] and f"Comment={COMMENT} " in jobs["rlhf"]
    assert "Comment=light; touch harm " in jobs["light"] and not (tmp_path / "harm").exists()
    assert "NodeList=node[1-2] " in jobs["rlvr1"] and "ExcNodeList=node2 " in jobs["rlhf"]
    assert "Partition=batch " in jobs["rlvr1"] and "Partition=urgent " in jobs["rlhf"]
    assert "Nice=7 " in jobs["rlhf"] and "Contiguous=1 " in jobs["rlhf"] and "Contiguous=0 " in jobs["light"]
    assert "gres:gpu:h100:4" in jobs["rlhf"] and "TresPerNode" not in jobs["light"]
    assert "mem=128G" in jobs["rlvr1"], "mem_mb: 0 is all memory of two whole nodes"
    assert "MinMemoryNode=2G " in jobs["rlhf"] and "MinMemoryNode=1G " in jobs["light"]
    assert "Partition=urgent " in jobs["light"] and "No job memory" not in jobs["said"]
    (noted,) = (tmp_path / ".snakemake/stagecoach/slurm").glob("*.json")
    comments = {job["comment"] for job in json.loads(noted.read_text())}
    assert comments == {"rule_train_wildcards_rlvr1", "rule_train_wildcards_rlhf", "rule_light_wildcards_"}


def test_several_gres_and_none_at_all_reach_slurm(typed, plain, tmp_path):
    jobs = submitted(tmp_path / "typed", typed, {"gpus_per_node": 4, "gres": "gpu:4,nic:2"})
    assert "TresPerNode=gres:gpu:4,gres:nic:2 " in jobs["rlvr1"] and "NumNodes=2 " in jobs["rlvr1"]
    jobs = submitted(tmp_path / "plain", plain, {"gpus_per_node": 4, "gres": "none"})
    assert "TresPerNode" not in jobs["rlvr1"] and "NumNodes=2 NumCPUs=32 " in jobs["rlvr1"], "two whole nodes"


def tried(monkeypatch, cluster: Cluster, resources: dict) -> Trial:
    """Slurm's answer to a training of these resources."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    rule = SimpleNamespace(name="train")
    given = ResourceList(fromdict={name: value for name, value in resources.items() if value is not None})
    (answer,) = try_jobs(
        [SimpleNamespace(rule=rule, wildcards=SimpleNamespace(stage="rlvr1"), threads=1, resources=given)] * 2, None
    )
    return answer


def on(resources: Resources, **slurm: object) -> dict:
    site = Site.model_validate({"name": "x", "threads": 1, "slurm": {"gpus_per_node": 4} | slurm})
    return training_resources(site, resources)


def test_slurm_says_when_a_job_would_start_and_what_it_refuses_in_a_line(typed, monkeypatch):
    two = Resources(nodes=2)
    assert tried(monkeypatch, typed, on(two, arguments={"exclude": "node2"})).is_refused, "no other node is away"
    assert re.match(r"rlvr1: would start at 20\d\d-.+:\d\d, submitted now$", str(tried(monkeypatch, typed, on(two))))
    for slurm, said in (
        ({"arguments": {"licenses": "matlab"}}, "Invalid license specification"),
        (
            {"partition": "nope"},
            "invalid partition specified: nope; allocation failure: Invalid partition name specified",
        ),
        ({"gres": "gpu:a100:4"}, "Requested node configuration is not available"),
        ({"arguments": {"segmint": 2}}, "unrecognized option '--segmint=2'"),
    ):
        answer = tried(monkeypatch, typed, on(two, **slurm))
        assert str(answer).startswith("rlvr1: Slurm refuses it: ") and said in answer.message
        assert "\n" not in str(answer) and "sbatch" not in answer.message
    light = light_resources(Site.model_validate({"name": "x", "threads": 1, "slurm": {"light": {"mem_mb": "100G"}}}))
    assert tried(monkeypatch, typed, light).is_refused


def test_nodes_that_are_away_for_a_while_are_no_refusal(typed, monkeypatch):
    typed.run("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    try:
        answer = tried(monkeypatch, typed, on(Resources(nodes=2)))
        assert not answer.is_refused and not answer.start and "expects no start yet" in str(answer)
        assert tried(monkeypatch, typed, on(Resources(nodes=2), gres="gpu:a100:4")).is_refused
        typed.run("scontrol", "update", "nodename=node1", "state=drain", "reason=test")
        assert not tried(monkeypatch, typed, on(Resources())).is_refused, "a cluster in maintenance"
    finally:
        typed.run("scontrol", "update", "nodename=node[1-2]", "state=resume")
