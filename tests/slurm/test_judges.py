"""Judges beside a training: a heterogeneous job, its pool killed once; and what is refused before a step is trained."""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.backends.nemo_rl.command import TOOLS
from tests.production import CHECKOUTS, PYTHON, needs_nemo_rl
from tests.slurm.cluster import Cluster
from tests.slurm.judged import NL2BASH, JudgedChain
from tests.slurm.nemo_rl_chain import STEPS

pytestmark = pytest.mark.long

STRUCK_AFTER, REQUEUED_AFTER = 2, 4


@pytest.fixture(scope="module")
def chain(possible, tmp_path_factory):
    """A tree in which rlvr1 is trained; a replica of its judge was killed, then the job was requeued."""
    with Cluster(tmp_path_factory.mktemp("judges"), hosts=4, pyxis=True) as cluster:
        chain = JudgedChain(tmp_path_factory.mktemp("judged"), cluster)
        try:
            chain.dry_run = chain.snakemake("--profile", "profiles/slurm", "--dry-run", "results/double/rlvr1/ckpt")
            with ThreadPoolExecutor() as pool:
                call = pool.submit(chain.train, "results/double/rlvr1/ckpt", check=False)
                chain.wait_for(STRUCK_AFTER, call.done)
                chain.kill_replica()
                chain.wait_for(REQUEUED_AFTER, call.done)
                (job, _), _ = (line.split("+") for line in cluster.run("squeue", "--noheader", "--format=%i").split())
                cluster.run("scontrol", "requeue", job)
                chain.output = call.result()
            yield chain
        finally:
            chain.elsewhere.stop()


def test_a_killed_replica_is_an_outage_and_the_next_attempt_goes_on_from_the_checkpoint(chain):
    assert len(chain.attempts("rlvr1")) == 3, chain.output
    first, second, third = chain.attempts("rlvr1")
    assert (first["outcome"], first["from"], third["outcome"], third["to"]) == ("lost", 0, "finished", STEPS)
    assert second["from"] == first["to"] >= STRUCK_AFTER and third["from"] >= REQUEUED_AFTER
    assert first["slurm_job"] != second["slurm_job"] == third["slurm_job"], "the second job was requeued"
    assert [line["step"] for line in chain.steps("rlvr1")] == list(range(1, STEPS + 1))
    log = chain.log("rlvr1")
    assert re.search(
        r"after the checkpoint of step \d: a judge ended beside the training; \S+ray-sub-\d+\.log says:", log
    )
    assert re.search(r"\[FATAL\] genrm replica \d exited unexpectedly|-judge_genrm-\d\] ERROR: vLLM exited", log)
    assert f"[INFO] genrm replica 0: {chain.struck}\n" in log
    assert re.search(r"external_judge_genrm/vllm_\d\.log: POST /v1/chat/completions", log)
    assert first["blamed"] == [chain.struck]


def test_both_components_have_their_nodes_and_end_together(chain):
    for attempt in chain.attempts("rlvr1"):
        assert (attempt["nodes"], attempt["hosts"]) == (4, chain.cluster.hosts)
        assert attempt["gpus"] == 4 * 8
    assert [(job["node_count"], job["state"]) for job in chain.jobs()][-1] == (4, "COMPLETED")
    assert chain.cluster.left_running() == []
    assert chain.cluster.run("squeue", "--noheader").strip() == ""
    replicas = [record for record in chain.containers() if record["node"] in chain.cluster.hosts[2:]]
    assert len(replicas) == 2 * 3 and {record["mounts"] for record in replicas} == {f"{chain.root}:{chain.root}"}
    heads = [record for record in chain.containers() if record["name"] in ("ray-head", "ray-worker")]
    assert {record["node"] for record in heads} == {*chain.cluster.hosts[:2]}


def test_the_driver_asks_each_judge_by_the_address_and_name_that_it_was_told(chain):
    head = chain.cluster.addresses["node1"]
    for log in chain.driver_logs():
        assert f"judged by model at http://{head}:1321/v1: [0.5, 0.5, 0.5, 0.5]" in log
        assert f"judged by {NL2BASH} at {chain.elsewhere.address}: [0.5, 0.5, 0.5, 0.5]" in log
    assert chain.elsewhere.log.read_text().count("POST /v1/chat/completions") >= STEPS * 4
    said = next((chain.results / "rlvr1/logs").glob("*-logs/external_judge_genrm/vllm_0.log")).read_text()
    assert said.startswith(
        f"serving {chain.root}/genrm as model, told --tensor-parallel-size 8 --distributed-executor-backend ray "
    )
    assert '--compilation-config {"a b": ["c"]}\n' in said


def test_a_dry_run_shows_the_second_component_and_counts_its_nodes(chain):
    shown = re.search(r"second_component=(.*)", chain.dry_run)[1]
    for option in (
        "--nodes=2",
        "--ntasks=2",
        "--gres=gpu:8",
        "--exclusive",
        "--partition=batch",
        "--mem=0",
        "--time=60",
    ):
        assert option in shown
    assert re.search(r"^rlvr1 +trains +6 of 6 +4 +32 ", chain.dry_run, re.MULTILINE)
    assert re.search(r"rlvr1: would start at ", chain.dry_run)


def test_a_job_without_a_second_component_is_refused(chain):
    output = chain.train_at_once("alone", **chain.changes)
    assert "judges need 2 nodes in a second component of the Slurm job, and job" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("name", "model", "address", "says"),
    [
        ("misnamed", "judges/other", None, rf"serves {NL2BASH}, not judges/other; mend model"),
        ("away", NL2BASH, "http://127.0.0.1:9/v1", r"http://127.0.0.1:9/v1/models does not answer as vLLM does"),
    ],
)
def test_an_address_without_its_judge_is_refused_before_ray_starts(chain, name, model, address, says):
    judge = chain.judges["nl2bash"] | {"model": model, "address": address or chain.elsewhere.address}
    output = chain.train_at_once(name, **chain.changes | {"judges": {"nl2bash": judge}})
    assert re.search(rf"rlvr1: judges\.nl2bash\.address: \S* ?{says}", output)
    assert "ray.sub on" not in output and "Traceback" not in output


@needs_nemo_rl
def test_nvidias_own_script_takes_our_variables_and_ends_as_the_stand_in_does(possible, tmp_path_factory):
    """Real are run_in_allocation.sh, its registry, its load balancer and Ray; the containers and vLLM are not."""
    state, python = Path("/tmp/external-vllm-state-judge_genrm"), Path(PYTHON).absolute()  # noqa: S108 - the script's
    with Cluster(tmp_path_factory.mktemp("real"), hosts=3, pyxis=True) as cluster:
        chain = JudgedChain(tmp_path_factory.mktemp("chain"), cluster, 1, Path(CHECKOUTS, "main"), str(python))
        mount_tools(chain)
        try:
            with ThreadPoolExecutor() as pool:
                call = pool.submit(chain.train, "results/double/rlvr1/ckpt", check=False)
                for number in (1, 2):  # what pyxis would mount for each job's load balancer
                    mount_state(chain, state, number, call.done)
                    if number == 1:
                        chain.wait_for(STRUCK_AFTER, call.done)
                        chain.kill_replica()
                output = call.result()
            attempts = [(it["outcome"], it["hosts"]) for it in chain.attempts("rlvr1")]
            assert attempts == [("lost", cluster.hosts), ("finished", cluster.hosts)], output
            log = chain.log("rlvr1")
            assert "a judge ended beside the training" in log and "[INFO] genrm replica 0: node3\n" in log
            url = f"http://{cluster.addresses['node1']}:1321/v1"
            assert all(f"judged by model at {url}: [0.5, 0.5, 0.5, 0.5]" in text for text in chain.driver_logs())
            assert cluster.left_running() == []
        finally:
            chain.elsewhere.stop()
            state.rmdir()


def mount_tools(chain: JudgedChain) -> None:
    """Show node1 the script's tools where it mounts them into the load balancer's container."""
    tools = "/opt/external-vllm-tools"
    command = f"mount -t tmpfs tmpfs /opt && mkdir {tools} && mount --bind {chain.checkout / TOOLS} {tools}"
    chain.cluster.run("bash", "-c", command, host="node1")


def mount_state(chain: JudgedChain, state: Path, number: int, is_over: Callable[[], bool]) -> None:
    """Show node1 the registry of the job's pool, of the stage's first or second job, where its balancer looks."""
    state.mkdir(exist_ok=True)
    logs = chain.results / "rlvr1/logs"
    while (
        len(found := sorted(logs.glob("*-logs/external_judge_genrm/state"), key=lambda it: it.stat().st_ctime)) < number
    ):
        if is_over():
            return
        time.sleep(0.2)
    chain.cluster.run("mount", "--bind", found[-1].resolve(), state, host="node1")
