"""Times at which things happened on the test cluster, by one clock: lines that programs print, and jobs in Slurm."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.slurm.cluster import Cluster

SUBMITTED = re.compile(r"Job ([\w-]+) has been submitted with SLURM jobid (\d+)")
GROUPED = re.compile(r" {8}jobid: (\d+)")
FINISHED = re.compile(r"Finished jobid: (\d+) ")
FAILED = re.compile(r"SLURM-job '(\d+)' failed")
STARTED = re.compile(r"Started? JobId=(\d+) |JobId=(\d+) .*NodeList=")
ENDED = re.compile(r"_job_complete: JobId=(\d+) done")
EVERY = 0.05


class Watch:
    """Calls a function every moment until its `with` ends."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look, self._stop = look, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            self._look()


class SlurmTimes(Watch):
    """When the jobs of a cluster started and ended, by the lines of slurmctld's log."""

    def __init__(self, cluster: Cluster) -> None:
        self.started: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self._log = (cluster.directory / "slurmctld.log").open(encoding="utf-8", errors="replace")
        self._log.seek(0, os.SEEK_END)
        super().__init__(self._read)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._log.close()

    def _read(self) -> None:
        now = time.time()
        for line in self._log:
            if found := STARTED.search(line):
                self.started.setdefault(int(found[1] or found[2]), now)
            if found := ENDED.search(line):
                self.ended[int(found[1])] = now


class Call:
    """A call of Snakemake, and when it said that each of its Slurm jobs was submitted, and had finished or failed."""

    def __init__(self, root: Path, environment: dict[str, str], *arguments: str) -> None:
        self.submitted: dict[int, float] = {}
        self.finished: dict[int, float] = {}
        self.output: list[str] = []
        self._process = subprocess.Popen(
            ["snakemake", "--profile", "profiles/slurm", *arguments],
            cwd=root,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        slurm_job: dict[str, int] = {}
        grouped: list[str] = []
        for line in self._process.stdout:
            now = time.time()
            self.output.append(line)
            if found := GROUPED.match(line):
                grouped.append(found[1])
            elif found := SUBMITTED.match(line):
                jobs = [found[1]] if found[1].isdecimal() else grouped
                slurm_job.update(dict.fromkeys(jobs, int(found[2])))
                self.submitted[int(found[2])] = now
                grouped = []
            elif (found := FINISHED.search(line)) and found[1] in slurm_job:
                self.finished[slurm_job[found[1]]] = now
            elif found := FAILED.search(line):
                self.finished.setdefault(int(found[1]), now)

    def wait(self, fails: bool = False) -> None:
        """Return once it ended well, or as a call ends whose job `fails`."""
        status = self._process.wait()
        self._thread.join()
        if status != fails:
            raise SystemExit("".join(self.output[-80:]))
