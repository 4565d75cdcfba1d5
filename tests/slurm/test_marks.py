"""How the end of a Slurm job is noticed: by its mark within seconds, by Slurm's word where there is none."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.slurm.marks import FOLDER
from tests.conftest import Workflow
from tests.programs import until
from tests.slurm.cluster import Cluster

SNAKEFILE = """\
import sys
from pathlib import Path
sys.path.insert(0, workflow.basedir)
from scripts.slurm.executor import use_executor
use_executor(Path("results"))

rule second:
    input: "first"
    output: "second"
    resources: slurm_partition="batch", mem_mb=500, runtime=20
    shell: "touch {output}"

rule first:
    output: "first"
    resources: slurm_partition="batch", mem_mb=500, runtime=20
    retries: 0
    shell: "%s; touch {output}"
"""
SELDOM = 600
SOON = 120.0


class Call:
    """A call of Snakemake that asks Slurm every so many seconds, for two jobs, the first of which does `shell`."""

    def __init__(self, root: Path, cluster: Cluster, shell: str, every: int) -> None:
        self.cluster, self.tree = cluster, Workflow(root)
        (root / "Snakefile").write_text(SNAKEFILE % shell)
        self.tree.environment, self.said = cluster.environment, self.tree.said
        options = ("--slurm-init-seconds-before-status-checks", "--seconds-between-status-checks")
        asking = [word for option in options for word in (option, str(every))]
        self.process = self.tree.begin("snakemake", "--profile", "profiles/slurm", *asking)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        until(condition, SOON, self.said)

    def end(self) -> int:
        """Snakemake's exit status, which comes long before it would ask Slurm for the first or second time."""
        return self.process.wait(SOON)

    def job(self) -> str:
        """The id of the first job, once it is submitted."""
        self.until(lambda: "submitted with SLURM jobid" in self.said())
        return re.search(r"submitted with SLURM jobid (\d+)", self.said())[1]

    def marks(self) -> list[Path]:
        """The marks that lie there."""
        return list((self.tree.root / FOLDER).glob("*"))

    def kill(self, words: str) -> None:
        """Kill the processes with these words in their command line, once there are any."""
        self.until(lambda: any(self.cluster.kill_processes(host, words) for host in self.cluster.hosts))


@pytest.fixture
def call(slurm, tmp_path):
    """Start a call, which does not outlive the test, nor do its jobs."""
    calls = []

    def start(shell: str, every: int = SELDOM) -> Call:
        calls.append(Call(tmp_path, slurm, shell, every))
        return calls[-1]

    yield start
    for one in calls:
        one.process.kill()
        one.process.wait()
        slurm.run("scancel", *re.findall(r"with SLURM jobid (\d+)", one.said()), check=False)
    for host in slurm.hosts:
        slurm.kill_processes(host, "sleep 100")  # of which a shell was killed before it had begun them


def test_jobs_that_end_well_are_noticed_at_once_and_leave_nothing(call):
    chain = call("sleep 1")
    assert chain.end() == 0 and (chain.tree.root / "second").exists(), chain.said()
    assert chain.marks() == [] and list((chain.tree.root / "results/slurm-logs").rglob("*.log")) == []


def test_of_a_step_that_was_killed_slurm_is_asked_at_once(call):
    chain = call("sleep 1001")
    chain.kill("sleep 1001")
    assert chain.end() == 1 and "SLURM status is: 'FAILED'" in chain.said()


def test_a_job_that_was_killed_without_a_last_act_is_noticed_by_slurms_word(call):
    chain = call("sleep 1003", every=3)
    job = chain.job()
    chain.until(lambda: [mark.read_text() for mark in chain.marks()] == [f"{job} 0\n"])
    chain.kill(f"-m scripts.slurm.marks {chain.tree.root}")
    assert chain.end() == 1 and "SLURM status is: 'FAILED'" in chain.said()


def test_a_requeued_job_is_not_taken_for_ended_and_its_next_allocation_is_noticed_at_once(call, slurm):
    chain = call("if mkdir begun; then sleep 1004; fi; echo again > again")
    chain.until((chain.tree.root / "begun").is_dir)
    job = chain.job()
    slurm.run("scontrol", "requeue", job)
    chain.until(lambda: "PENDING" in slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T"))
    assert chain.end() == 0 and (chain.tree.root / "again").exists(), chain.said()
    assert chain.said().count("Finished jobid") == 2 and "Error" not in chain.said()
