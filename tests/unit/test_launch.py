"""What is asked of Slurm and kept of its answers."""

from pathlib import Path

from scripts.launch import jobs, sbatch


def test_a_job_is_known_from_its_submission_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGECOACH_RESULTS", "results/short")
    options = ["--parsable", "--job-name", "call-1", "-p", "batch", "--comment", "rule_train_wildcards_rlvr1"]
    for answer in ("7\n", "8;cluster\n"):
        sbatch.note(answer, options)
    sbatch.note("Submitted batch job 9\n", ["script.sh"])
    found = [job for _, job in jobs.stage_jobs(Path("results/short"))]
    assert [(job.id, job.stage, job.state) for job in found] == [("7", "rlvr1", "PENDING"), ("8", "rlvr1", "PENDING")]
