"""Snakemake itself as a Slurm job (profiles/slurm/controller.sh): its next allocation goes on with the chain."""

import pytest

pytest.importorskip("torch")

from tests.slurm.chain import STAGE, Chain, make_base

pytestmark = pytest.mark.long

QUICK = (
    "--seconds-between-status-checks",
    "2",
    "--slurm-init-seconds-before-status-checks",
    "2",
    "--latency-wait",
    "5",
)


def test_the_next_allocation_of_the_controller_finds_the_training_and_goes_on(possible, slurm, tmp_path):
    with Chain(make_base(tmp_path / "base"), tmp_path / "tree", slurm, nodes=1) as chain:
        told = chain.root / "told.txt"
        with (chain.root / "config/config.yaml").open("a") as config:
            config.write(f"alerts: {{command: [tee, -a, {told}]}}\n")
        options = ("--parsable", f"--chdir={chain.root}", "--time=30", "--signal=B:USR1@60")
        script, gate = (
            chain.root / "profiles/slurm/controller.sh",
            chain.directory.relative_to(chain.root) / "gate.json",
        )
        number = slurm.run("sbatch", *options, script, gate, *QUICK).strip()

        def shown() -> str:
            return slurm.run("scontrol", "show", "job", number)

        log = chain.root / f"stagecoach-{number}.log"
        chain.until(lambda: max(chain.steps(), default=0) >= 20 or "JobState=FAILED" in shown())
        assert "JobState=RUNNING" in shown(), log.read_text()
        slurm.run("scancel", "--batch", "--signal=USR1", number)
        chain.until(
            lambda: ("Restarts=1" in shown() and "JobState=COMPLETED" in shown()) or "JobState=FAILED" in shown()
        )
        assert "JobState=COMPLETED" in shown(), log.read_text()
        assert chain.weights() and chain.faults_of_the_log() == [] and chain.lost_steps() == 0
        said = [line for line in told.read_text().splitlines() if not line.startswith("Stagecoach on ")]
        assert [line.partition(",")[0] for line in said] == [f"{STAGE}: trained and published", "Snakemake ends"]
