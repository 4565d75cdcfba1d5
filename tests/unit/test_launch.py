"""What is asked of Slurm and kept of its answers."""

import subprocess
from pathlib import Path

from scripts.launch import jobs
from scripts.snakemake import sbatch


def test_a_job_is_known_from_its_submission_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_RESULTS", "results/short")
    options = ["--parsable", "--job-name", "call-1", "-p", "batch", "--comment", "rule_train_wildcards_rlvr1"]
    for answer in ("7\n", "8;cluster\n"):
        sbatch.note(answer, options)
    sbatch.note("Submitted batch job 9\n", ["script.sh"])
    found = [job for _, job in jobs.stage_jobs(Path("results/short"))]
    assert [(job.id, job.stage, job.state) for job in found] == [("7", "rlvr1", "PENDING"), ("8", "rlvr1", "PENDING")]


def test_nothing_is_submitted_for_a_snakemake_that_is_gone(tmp_path, monkeypatch):
    away = tmp_path / "sbatch"
    away.write_text("#!/bin/sh\necho tried >> tried; echo 'Unable to contact slurm controller' >&2; exit 1\n")
    away.chmod(0o755)
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("STAGECOACH_SNAKEMAKE", str(ended.pid))
    monkeypatch.setattr(sbatch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sbatch.sys, "argv", ["sbatch", "script.sh"])
    assert sbatch.main() == 1
    assert (tmp_path / "tried").read_text() == "tried\n"
