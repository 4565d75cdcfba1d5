"""States of the jobs submitted from this folder, in a small file for each call of Snakemake, and orphans among them.

The executor (scripts.slurm.executor) writes the file at every submission and question to Slurm, so readers need not ask
Slurm.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from scripts.errors import UserError
from scripts.files import write_json
from scripts.slurm.client import ENDED_STATES, ask

FOLDER = Path(".snakemake/stagecoach/slurm")
FORMAT = "%i|%T|%r|%D|%N|%V|%S|%e|%k"
SLURM_LOGS = Path("results/slurm-logs")
STAGE_RULES = ("train", "merge")
"""The rules that make a stage's checkpoint; the stage is the wildcard."""
STAGE_COMMENT = re.compile(rf"rule_({'|'.join(STAGE_RULES)})_wildcards_(.*)")
"""The Slurm plugin's note of such a job."""
ORPHANS = "STAGECOACH_ORPHANS"
"""The environment variable with the training jobs that outlived the Snakemake that submitted them, by stage."""
TIME = "%Y-%m-%dT%H:%M:%S"
WRITING = threading.Lock()


@dataclass(frozen=True)
class JobRecord:
    """A job: times local in ISO format, `reason` of waiting or failure, `comment` by us, `results` the run's folder."""

    id: str
    state: str
    reason: str
    node_count: int
    nodes: str
    submitted: str
    start: str
    end: str
    comment: str
    results: str

    @property
    def stage(self) -> str | None:
        """The stage that the job trains or merges, or None."""
        found = STAGE_COMMENT.fullmatch(self.comment)
        return found[2] if found else None

    @property
    def log(self) -> Path:
        """Slurm's log of a stage's job."""
        found = STAGE_COMMENT.fullmatch(self.comment)
        rule, stage = found.groups() if found else ("", "")
        return SLURM_LOGS / f"rule_{rule}" / stage / f"{self.id}.log"


@dataclass(frozen=True)
class LatestJob:
    """A stage's newest job, and the time of the last question about it in seconds since the epoch."""

    job: JobRecord
    at: float


def parse_squeue(text: str, results: str) -> dict[str, JobRecord]:
    """Parse squeue's output in FORMAT into jobs by id; a heterogeneous job has the nodes of all its components."""
    records: dict[str, JobRecord] = {}
    for line in text.splitlines():
        fields = line.split("|", FORMAT.count("|"))
        if len(fields) == FORMAT.count("|") + 1:
            fields[3:4] = [int(fields[3]) if fields[3].isdecimal() else 0]
            fields[0], _, component = fields[0].partition("+")
            record = JobRecord(*fields, results=results)
            if (other := records.get(record.id)) is not None:
                first, second = (record, other) if component == "0" else (other, record)
                nodes = ",".join(filter(None, [first.nodes, second.nodes]))
                record = replace(first, node_count=first.node_count + second.node_count, nodes=nodes)
            records[record.id] = record
    return records


def read_call(name: str) -> dict[str, JobRecord]:
    """Return the jobs of a call of Snakemake by id; none without a file."""
    path = FOLDER / f"{name}.json"
    try:
        return {job.id: job for job in msgspec.json.decode(path.read_bytes(), type=list[JobRecord])}
    except (OSError, RecursionError, msgspec.MsgspecError):
        return {}


def write_call(name: str, records: dict[str, JobRecord], is_answer: bool = True) -> None:
    """Write jobs of a call of Snakemake; the file's time stands for the last answer of Slurm.

    Comments stay as noted at the submission: the site's argument `comment` may stand in Slurm's place.
    """
    with WRITING:  # submissions are noted in another thread than answers
        path, known = FOLDER / f"{name}.json", read_call(name)
        if is_answer:
            records = {key: replace(job, comment=known.get(key, job).comment) for key, job in records.items()}
        heard = time.time() if is_answer or not known else path.stat().st_mtime
        write_json(path, [asdict(record) for record in (known | records).values()])
        os.utime(path, times=(heard, heard))


def note_submission(name: str, job_id: str, comment: str, results: str) -> None:
    """Note a job's submission, before the first question to Slurm."""
    record = JobRecord(job_id, "PENDING", "Submitted", 0, "", time.strftime(TIME), "", "", comment, results)
    write_call(name, {job_id: record}, is_answer=False)


def note_success(name: str, job_id: str) -> None:
    """Note a job's success without a question to Slurm."""
    if record := read_call(name).get(job_id):
        write_call(name, {job_id: replace(record, state="COMPLETED", end=time.strftime(TIME))}, is_answer=False)


def stage_jobs(results: Path) -> Iterator[tuple[str, JobRecord]]:
    """Yield the training jobs of a results folder with the submitting call, oldest first."""
    found = [(path.stem, job) for path in FOLDER.glob("*.json") for job in read_call(path.stem).values() if job.stage]
    wanted = os.path.normpath(results)
    yield from sorted(
        ((call, job) for call, job in found if os.path.normpath(job.results) == wanted),
        key=lambda entry: (entry[1].submitted, int(entry[1].id.split("_")[0])),
    )


def latest_jobs(results: Path) -> dict[str, LatestJob]:
    """Return each stage's newest training job."""
    latest = {job.stage: (call, job) for call, job in stage_jobs(results)}
    return {stage: LatestJob(job, (FOLDER / f"{call}.json").stat().st_mtime) for stage, (call, job) in latest.items()}


def find_orphans(results: Path) -> dict[str, str]:
    """Return the stages whose training job of an earlier call is queued or running, with the job's id.

    UserError without an answer from Slurm: a second job, submitted blindly, could waste its nodes.
    """
    known = {record.id: record.stage for _, record in stage_jobs(results) if record.state not in ENDED_STATES}
    if not known:
        return {}
    lines = ask("squeue", "--me", "--noheader", "--format=%i|%T").splitlines()
    alive = {job.split("+")[0] for job, state in (line.split("|") for line in lines) if state not in ENDED_STATES}
    return {stage: job for job, stage in known.items() if job in alive and stage}


def export_orphans(results: Path) -> None:
    """Tell the jobs of this process, which read the workflow anew, by an environment variable."""
    try:
        orphans = find_orphans(results)
    except UserError as error:
        print(f"Slurm does not say whether earlier jobs still run: {error}", file=sys.stderr)
    else:
        os.environ[ORPHANS] = ",".join(f"{stage}={job}" for stage, job in orphans.items())


def orphan_of(stage: str) -> int:
    """Return the Slurm job of an earlier call that still trains the stage, by `export_orphans`; 0 for none."""
    pairs = os.environ.get(ORPHANS, "").split(",")
    return int(dict(pair.split("=", 1) for pair in pairs if pair).get(stage, 0))
