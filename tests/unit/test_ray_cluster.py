"""What can be told of a Ray cluster over an allocation without one; the rest is tested on a real Slurm."""

import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from scripts.errors import UserError
from scripts.recipe.site import Slurm
from scripts.slurm import client as slurm_module
from scripts.slurm.client import Job, client_environment, job_of, step_command
from scripts.slurm.ray_cluster import _step_failure, end_session, head_address
from scripts.slurm.ray_node import check_port_is_free, route_to, watch

JOB = Job("7", "RUNNING", ("node1", "node2"), None, cpus_per_node=16, requeues=True, restarts=0)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_taken_is_named_with_the_key_to_change(listener):
    with pytest.raises(UserError, match=rf"port {listener} of 127.0.0.1 cannot be used .*slurm.ports.gcs"):
        check_port_is_free("127.0.0.1", listener)


def test_a_nodes_address_is_the_one_that_leads_to_the_head(listener):
    assert route_to("127.0.0.1", listener, timeout=5) == "127.0.0.1"


def test_a_head_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=rf"no answer from Ray's head at 127.0.0.1:{port} within 0 s"):
        route_to("127.0.0.1", port, timeout=0)


def test_of_several_addresses_the_one_in_the_sites_network_is_taken():
    assert head_address("node1", Slurm(network="127.0.0.0/8")) == "127.0.0.1"
    with pytest.raises(
        UserError, match=r"node1: no address in the site's slurm.network 203.0.113.0/24; it has .*127.0.0.1"
    ):
        head_address("node1", Slurm(network="203.0.113.0/24"))


def test_the_node_whose_ray_ended_first_is_named_with_its_log(tmp_path):
    (tmp_path / "node2.ended").write_text("100.5 Ray ended with exit status 1")
    (tmp_path / "node1.ended").write_text("101.5 Ray ended with exit status 1")
    said = _step_failure(JOB, tmp_path)
    assert said == f"node2: Ray ended with exit status 1; see {tmp_path}/ray-node2.log"


def test_a_step_that_slurm_refused_or_ended_is_explained_by_what_srun_said(tmp_path):
    (tmp_path / "step.log").write_text("srun: job 7 waits\nsrun: error: Node failure on node2\nsrun: got SIGCONT\n")
    said = _step_failure(JOB, tmp_path)
    assert said == f"Ray's job step over node1, node2 ended: Node failure on node2; see {tmp_path}"


def test_ray_that_slurm_ended_is_not_why_the_cluster_ended(tmp_path):
    program = "import os, signal, time; time.sleep(0.5); os.kill(os.getppid(), signal.SIGTERM)"
    plain = signal.getsignal(signal.SIGTERM)
    try:
        assert watch(subprocess.Popen([sys.executable, "-c", program]), tmp_path) is None
        assert watch(subprocess.Popen(["false"]), tmp_path) == "Ray ended with exit status 1"
    finally:
        signal.signal(signal.SIGTERM, plain)


def test_a_process_is_ended_with_what_it_started():
    program = "import subprocess, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    (child,) = psutil.Process(process.pid).children()
    end_session(process, grace=2)
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert process.returncode is not None


def test_nested_steps_inherit_nothing_of_the_step_around_them(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "SBATCH_X", "HF_HOME"):
        monkeypatch.setenv(name, "1")
    kept = client_environment().keys()
    assert {"SLURM_JOB_ID", "SLURM_CONF", "HF_HOME"} <= kept
    assert not {"SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "SBATCH_X"} & kept


def test_a_step_takes_one_task_with_all_gpus_of_each_node_beside_other_steps():
    command = step_command(JOB, JOB.nodes, 8, "/logs/ray-%N.log")
    assert {"--overlap", "--nodes=2", "--ntasks=2", "--gres=gpu:8", "--nodelist=node1,node2"} <= set(command)
    assert not any(word.startswith("--gres") for word in step_command(JOB, JOB.nodes, 0, "x"))


def test_a_job_is_read_from_what_scontrol_says(monkeypatch):
    text = "JobId=7 JobState=RUNNING Requeue=1 Restarts=2 BatchFlag=1 NodeList=node[1-2] NumNodes=2 NumCPUs=32 EndTime=2026-01-01T10:00:00"
    answers = {"job": text, "hostnames": "node1\nnode2\n"}
    monkeypatch.setattr(slurm_module, "ask", lambda *command: answers[command[2]])
    job = job_of("7")
    assert (job.nodes, job.cpus_per_node, job.restarts, job.requeues) == (("node1", "node2"), 16, 2, True)
    assert time.strftime("%H:%M", time.localtime(job.end)) == "10:00"
