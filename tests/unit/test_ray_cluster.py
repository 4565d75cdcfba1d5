"""What can be told of a Ray cluster over an allocation without one; the rest is tested on a real Slurm."""

import subprocess
import sys
import time

import psutil
import pytest

from scripts.backends.trl.cluster import head_address, raise_outcome
from scripts.errors import CutOffError, UserError
from scripts.files import write_json
from scripts.processes import end_session
from scripts.recipe.site import Slurm
from scripts.slurm import client as slurm_module
from scripts.slurm.client import Job, client_environment, job_of, step_command
from tests.cases import cases

JOB = Job("7", "RUNNING", ("node1", "node2"), None, cpus_per_node=16, requeues=True, restarts=0)


def test_of_several_addresses_the_one_in_the_sites_network_is_taken():
    assert head_address("node1", Slurm(network="127.0.0.0/8")) == "127.0.0.1"
    with pytest.raises(
        UserError, match=r"node1: no address in the site's slurm.network 203.0.113.0/24; it has .*127.0.0.1"
    ):
        head_address("node1", Slurm(network="203.0.113.0/24"))


def test_a_driver_that_left_an_outcome_is_believed(tmp_path):
    write_json(tmp_path / "outcome.json", [None, False])
    raise_outcome(tmp_path, tmp_path)
    write_json(tmp_path / "outcome.json", ["rank 1 failed", False])
    with pytest.raises(UserError, match=r"^rank 1 failed$") as error:
        raise_outcome(tmp_path, tmp_path)
    assert not isinstance(error.value, CutOffError)


@cases("ray_cluster.logs", "logs", "says")
def test_a_step_that_ended_without_its_driver_is_explained_by_rays_logs_and_tried_again(tmp_path, logs, says):
    for node, text in logs.items():
        (tmp_path / f"ray-{node}.log").write_text(text)
    with pytest.raises(CutOffError, match=f"^{says}"):
        raise_outcome(tmp_path, tmp_path)


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
    command = step_command(JOB, JOB.nodes, "gpu:8", "/logs/ray-%N.log")
    assert {"--overlap", "--nodes=2", "--ntasks=2", "--gres=gpu:8", "--nodelist=node1,node2"} <= set(command)
    assert not any(word.startswith("--gres") for word in step_command(JOB, JOB.nodes, "", "x"))


def test_a_job_is_read_from_what_scontrol_says(monkeypatch):
    text = "JobId=7 JobState=RUNNING Requeue=1 Restarts=2 BatchFlag=1 NodeList=node[1-2] NumNodes=2 NumCPUs=32 EndTime=2026-01-01T10:00:00"
    answers = {"job": text, "hostnames": "node1\nnode2\n"}
    monkeypatch.setattr(slurm_module, "ask", lambda *command: answers[command[2]])
    job = job_of("7")
    assert (job.nodes, job.cpus_per_node, job.restarts, job.requeues) == (("node1", "node2"), 16, 2, True)
    assert time.strftime("%H:%M", time.localtime(job.end)) == "10:00"
