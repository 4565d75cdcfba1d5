"""The cluster that other tests rely on is several hosts, breaks as told, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs import until
from tests.slurm import processes
from tests.slurm.cluster import Cluster, ClusterError

COMMAND = (sys.executable, "-m", "tests.slurm.cluster")


def submit(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a job whose output goes to a file named by its id; the id."""
    output = f"--output={cluster.directory}/%j.out"
    return cluster.run("sbatch", "--parsable", "--open-mode=append", output, *options, f"--wrap={script}").strip()


def job(cluster: Cluster, number: str) -> list[str]:
    """State, restarts and hosts of a job."""
    return cluster.run("squeue", "--noheader", f"--jobs={number}", "--Format=State,RestartCnt,NodeList").split()


def traces(directory: Path) -> list[str]:
    """What the machine has of a cluster: interfaces, mounts, processes."""
    interfaces = [path.name for path in Path("/sys/class/net").iterdir() if path.name == Cluster(directory).link]
    commands = [" ".join(line) for _, line in processes.command_lines()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return interfaces + [line for line in (*commands, *mounts) if str(directory) in line]


def test_a_step_sees_three_hosts_with_names_addresses_and_gpus_of_their_own(slurm):
    assert set(slurm.states().values()) == {"idle"}
    script = (
        'echo $(hostname) $(getent hosts $(hostname)) $CUDA_VISIBLE_DEVICES $(ls /tmp/ray /dev/shm | grep -c "^mine-")'
    )
    touched = "touch /tmp/ray/mine-$(hostname) /dev/shm/mine-$(hostname); sleep 0.3;"
    lines = slurm.run("srun", "--nodes=3", "--gres=gpu:8", "bash", "-c", f"{touched} {script}").splitlines()
    assert sorted(lines) == [f"{host} {slurm.addresses[host]} {host} 0,1,2,3,4,5,6,7 2" for host in slurm.hosts]


def test_a_step_inside_a_step_reaches_every_host(slurm):
    inner = (
        'list=$(squeue -h -j $SLURM_JOB_ID -o %N); unset $(compgen -e | grep -E "^S(LURM|RUN|BATCH)_" | grep -v JOB_ID);'
        "srun --overlap --jobid=$SLURM_JOB_ID --nodes=3 --ntasks=3 --ntasks-per-node=1 -w $list --gres=gpu:8 --mem=0"
        " python -c 'import socket, sys; print(socket.gethostname(), sys.prefix)'"
    )
    script = slurm.directory / "inner.sh"
    script.write_text(inner)
    options = ("--nodes=3", "--gres=gpu:8", "--mem=1000", "--wait")
    number = submit(slurm, f"srun --nodes=1 --ntasks=1 bash {script}", *options)
    lines = (slurm.directory / f"{number}.out").read_text().splitlines()
    assert {f"{host} {sys.prefix}" for host in slurm.hosts} <= set(lines), lines


def test_a_daemon_outlives_its_job_and_is_seen(slurm):
    slurm.run("srun", "--nodelist=node2", "bash", "-c", "setsid sleep 4321 > /dev/null 2>&1 &")
    slurm.wait_idle()
    assert {host: slurm.processes(host) for host in slurm.hosts} == {"node1": [], "node2": ["sleep 4321"], "node3": []}
    slurm.run("pkill", "-f", "sleep 4321", host="node2")
    until(lambda: not slurm.processes("node2"))


def test_a_job_runs_on_while_slurmctld_is_away(slurm):
    number = submit(slurm, "sleep 1.5; echo finished", "--nodes=3")
    until(lambda: job(slurm, number)[0] == "RUNNING")
    slurm.stop_controller()
    with pytest.raises(ClusterError, match="ended with 1"):
        slurm.run("squeue")
    slurm.start_controller()
    slurm.wait_idle()
    assert (slurm.directory / f"{number}.out").read_text() == "finished\n"


def test_an_urgent_job_takes_the_hosts_of_another_which_waits_to_run_again(slurm):
    number = submit(slurm, "sleep 1000", "--nodes=3", "--exclusive")
    until(lambda: job(slurm, number)[0] == "RUNNING")
    slurm.run("srun", "--partition=urgent", "--nodes=3", "true")
    assert job(slurm, number)[:2] == ["PENDING", "1"]
    slurm.run("scancel", number)
    slurm.wait_idle()


def test_slurm_can_be_told_of_a_dead_host(slurm):
    number = submit(slurm, "sleep 1000", "--nodes=3", "--no-requeue")
    until(lambda: job(slurm, number)[0] == "RUNNING")
    slurm.kill_host("node3", told=True)
    assert slurm.states()["node3"].startswith("down")
    slurm.start_host("node3")
    until(lambda: "JobState=NODE_FAIL" in slurm.run("scontrol", "show", "job", number))
    slurm.wait_idle()


def test_another_cluster_does_not_meet_the_first_gets_hosts_back_that_died_or_lost_the_network_and_leaves_nothing(
    possible, slurm, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("lossy")
    with Cluster(directory, gpus=1, slurmd_timeout=3, requeue_delay=5) as cluster:
        assert len(traces(directory)) > 10
        assert cluster.addresses["node1"] != slurm.addresses["node1"]
        assert cluster.run("srun", "hostname", "--ip-address").strip() == cluster.addresses["node1"]
        number = submit(cluster, "sleep 30", "--gres=gpu:1")
        until(lambda: job(cluster, number) == ["RUNNING", "0", "node1"])
        cluster.kill_host("node1")
        cluster.disconnect("node2")
        with pytest.raises(ClusterError, match="node1 is not running"):
            cluster.processes("node1")
        until(lambda: cluster.states() == {"node1": "down*", "node2": "down*", "node3": "idle"})
        until(lambda: job(cluster, number) == ["RUNNING", "1", "node3"])
        cluster.start_host("node1")
        cluster.reconnect("node2")
        cluster.run("scancel", number)
        cluster.wait_idle(40)
        submit(cluster, "sleep 1000")
        until(lambda: any("sleep" in line for line in cluster.processes("node1")))
    assert not traces(directory)
    assert set(slurm.states().values()) == {"idle"}


def test_by_hand_after_a_killed_start(possible, tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    half = subprocess.Popen([*COMMAND, "up", f"--directory={directory}"], cwd=ROOT, stderr=subprocess.DEVNULL)
    until((directory / "slurmctld.log").exists)
    half.kill()
    half.wait()
    again = subprocess.check_output([*COMMAND, "up", f"--directory={directory}"], cwd=ROOT, text=True)
    assert again == f"export SLURM_CONF={directory}/etc/slurm.conf\n"
    subprocess.run([*COMMAND, "down", f"--directory={directory}"], cwd=ROOT, check=True)
    assert not traces(directory)


def test_it_goes_down_when_its_owner_is_killed(possible, tmp_path_factory):
    directory = tmp_path_factory.mktemp("owned")
    program = f"import os; from tests.slurm.cluster import Cluster; Cluster({str(directory)!r}).__enter__(); os.kill(os.getpid(), 9)"
    owner = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert owner.returncode == -signal.SIGKILL
    until(lambda: not traces(directory))


def test_a_directory_of_other_files_is_left_alone(possible):
    with tempfile.TemporaryDirectory() as directory:  # its name is short enough for sockets
        mine = Path(directory, "mine")
        mine.touch()
        with pytest.raises(ClusterError, match="holds other files"):
            Cluster(directory).up()
        assert list(Path(directory).iterdir()) == [mine]


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(processes, "PATH", "")
    assert "apt-get install slurm-wlm munge iproute2 util-linux gcc" in processes.reason_missing()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in processes.reason_missing()
