"""From one stage's last step to the next stage's first: through Snakemake, and the same programs chained by sbatch.

    python benchmarks/handover.py > benchmarks/handover.md

Needs root (see CONTRIBUTING.md). Three stages of the short recipe of the tests, one after the other, are trained on
the test cluster in two ways, in turn: by Snakemake with the profile as it ships, and by `sbatch
--dependency=afterok`, one script for each job that Snakemake submits, with the same resources and the shell commands
that a dry run prints. What Snakemake runs beside Slurm stands in the script of the job that
follows (gate and preflight at the training job's start), in the background where that job does not need it; what
Snakemake groups stands in one script. Each stage has one node, to measure without Ray's bootstrap, which is the same
either way. `--smoke` prints the scripts that would be submitted.

A step ends when its line is appended to run/metrics.jsonl (the time stamp of the file), and began as many seconds
before as the line says. A wait lasts from slurmctld's line that a job is done to Snakemake's that it is finished; it is
negative where the job's mark was seen first.
"""

import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, configure, head, row
from benchmarks.watching import Call, SlurmTimes, Watch
from tests.conftest import Workflow
from tests.slurm.cluster import Cluster

STAGES = ("sft", "rlvr1", "rlhf")
SITE = """\
name: test
threads: 1
slurm:
  partition: batch
  gpus_per_node: 8
  max_runtime: 60
  margin: 15
  object_store_mb: 100
  light: {cpus: 1, mem_mb: 2000, runtime: 10}
"""
TARGET = f"results/short/{STAGES[-1]}/ckpt"
WAYS = {"snakemake": "Snakemake, as shipped", "sbatch": "sbatch --dependency=afterok"}
PARTS = ("the training job's end", "export and evaluation", "gate, preflight, submitting", "the training job's start")
BOUND = 15.0
OPTIONS = {"slurm_partition": "partition", "nodes": "nodes", "runtime": "time", "mem_mb": "mem", "gres": "gres"}


@dataclass
class Program:
    """A job of Snakemake's as a dry run tells it."""

    rule: str
    inputs: set[str]
    outputs: set[str]
    log: str
    resources: dict[str, str]
    command: str
    group: str

    @property
    def is_submitted(self) -> bool:
        """Whether Snakemake submits it, by itself or in a group."""
        return "slurm_partition" in self.resources


@dataclass
class Handover:
    """Seconds from a stage's last step to the next one's first: noticing that jobs ended, and in each of PARTS."""

    waits: float
    parts: tuple[float, ...]

    @property
    def own(self) -> float:
        """Seconds apart from that."""
        return sum(self.parts)


def handover(begin: float, end: float, slurm: SlurmTimes, finished: dict[int, float]) -> Handover:
    """What happened between two steps; `finished`: when Snakemake noticed the end of a job."""
    ended = sorted((when, job) for job, when in slurm.ended.items() if begin < when < end)
    waits = [finished[job] - when for when, job in ended if job in finished]
    last_start = max(when for when in slurm.started.values() if when < end)
    light = sum(when - slurm.started[job] for when, job in ended[1:])
    parts = [ended[0][0] - begin, light, 0.0, end - last_start]
    parts[2] = end - begin - sum(waits) - sum(parts)
    return Handover(sum(waits), tuple(parts))


def prepare(root: Path) -> Workflow:
    """A tree whose data are ready and whose chain is configured for the test cluster."""
    root.mkdir()
    tree = Workflow(root)
    tree.edit("rlhf: {algorithm: grpo, parent: sft", "rlhf: {algorithm: grpo, parent: rlvr1")
    tree.edit("sft: {max_num_steps: 30}", "sft: {max_num_steps: 5}")
    tree.snakemake(*(f"results/short/data/{blend}/manifest.json" for blend in STAGES))
    (root / "config/sites/test.yaml").write_text(SITE)
    configure(root, "short", "short", "test")
    return tree


def programs(tree: Workflow) -> list[Program]:
    """What a dry run would run, in an order in which it can be run."""
    found: dict[str, Program] = {}
    group, needs, makers = "", {}, {}
    for block in tree.snakemake("--dry-run", "--printshellcmds", TARGET).split("\n\n"):
        if opened := re.search(r"Group job (\w+) ", block):
            group = opened[1]
        if rule := re.search(r"^( *)(?:local)?rule (\w+):$", block, re.MULTILINE):
            fields = dict(re.findall(r"^ +(\w+): (.+)$", block, re.MULTILINE))
            program = Program(
                rule[2],
                set(fields.get("input", "").split(", ")),
                set(fields["output"].split(", ")),
                fields["log"],
                dict(it.partition("=")[::2] for it in fields.get("resources", "").split(", ")),
                re.search(r"^Shell command: (.+)$", block, re.MULTILINE)[1],
                group if rule[1] else "",
            )
            found[fields["jobid"]] = program
            makers |= dict.fromkeys(program.outputs, fields["jobid"])
    for job, program in found.items():
        needs[job] = {makers[path] for path in program.inputs if path in makers}
    return [found[job] for job in TopologicalSorter(needs).static_order()]


def scripts(chain: list[Program], place: Path) -> list[tuple[list[str], str]]:
    """The options and the text of each batch script."""
    made, local = [], []
    for number, program in enumerate(chain):
        later = {other.group for other in chain[number + 1 :]}
        if not program.is_submitted or (program.group and program.group in later):
            local.append(program)
            continue
        lines = ["#!/bin/bash", "set -euo pipefail", f"export PYTHONPATH={place}"]
        for each in local:
            needed = any(each.outputs & other.inputs for other in (*local, program))
            lines.append(f"bash -euo pipefail -c {shlex.quote(each.command)}{'' if needed else ' &'}")
        lines += [f"bash -euo pipefail -c {shlex.quote(program.command)}", "wait"]
        resources = program.resources
        options = [f"--{flag}={resources[name]}" for name, flag in OPTIONS.items() if resources.get(name)]
        if int(resources.get("cpus_per_task", -1)) > 0:  # the dry run leaves out what Slurm is not asked for
            options.append(f"--cpus-per-task={resources['cpus_per_task']}")
        made.append(([*options, *resources.get("slurm_extra", "").split()], "\n".join(lines) + "\n"))
        local = []
    return made


def submit_chain(tree: Workflow, cluster: Cluster) -> list[str]:
    """Submit the chain of batch scripts; the ids of the jobs."""
    chain = programs(tree)
    for program in chain:
        for path in (program.log, *program.outputs):
            (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
    before: list[str] = []
    for number, (options, text) in enumerate(scripts(chain, tree.root)):
        script = tree.root / f"script{number}.sh"
        script.write_text(text)
        after = [f"--dependency=afterok:{before[-1]}"] if before else []
        out = f"--output={tree.root}/script{number}.out"
        command = ("sbatch", "--parsable", f"--chdir={tree.root}", out, *after, *options, script)
        before.append(cluster.run(*command).strip())
    return before


def wait_for(cluster: Cluster, job: str) -> None:
    """Return when a job has ended well."""
    while True:
        text = cluster.run("scontrol", "show", "job", "--oneliner", job)
        state = re.search(r"JobState=(\w+)", text)[1]
        if state == "COMPLETED":
            return
        if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") or "DependencyNeverSatisfied" in text:
            raise SystemExit(f"job {job}: {text}")
        time.sleep(0.5)


class Steps:
    """When the stages' first steps began and their last steps ended."""

    def __init__(self, results: Path) -> None:
        self.first: dict[str, float] = {}
        self.results = results

    def look(self) -> None:
        """Note the stages whose first line has come."""
        for stage in STAGES:
            path = self.results / stage / "run/metrics.jsonl"
            if stage not in self.first and path.exists() and (lines := path.read_text().splitlines()):
                ended = path.stat().st_mtime - sum(json.loads(line)["seconds"] for line in lines[1:])
                self.first[stage] = ended - json.loads(lines[0])["seconds"]

    def last(self, stage: str) -> float:
        """When the stage's last step ended."""
        return (self.results / stage / "run/metrics.jsonl").stat().st_mtime


def run(way: str, template: Path, place: Path, cluster: Cluster) -> list[Handover]:
    """Train the chain in one way."""
    shutil.copytree(template, place, symlinks=True)
    tree = object.__new__(Workflow)
    tree.root, tree.results, tree.environment = place, place / "results/short", cluster.environment
    steps = Steps(tree.results)
    with SlurmTimes(cluster) as slurm, Watch(steps.look):
        finished = {}
        if way == "sbatch":
            wait_for(cluster, submit_chain(tree, cluster)[-1])
        else:
            call = Call(place, tree.environment, TARGET)
            call.wait()
            finished = call.finished
        time.sleep(0.5)
    done = [handover(steps.last(one), steps.first[next_one], slurm, finished) for one, next_one in pairwise(STAGES)]
    print(f"{way}: {done}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    shutil.rmtree(place)
    return done


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Print the tables; status 1 when the bound is broken."""
    parser = command_line(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    repetitions = arguments.repetitions
    if arguments.smoke:
        with tempfile.TemporaryDirectory(prefix="handover-") as directory:
            tree = prepare(Path(directory) / "template")
            for options, text in scripts(programs(tree), tree.root):
                print(f"sbatch {' '.join(options)}: {text.count('bash -euo')} programs")
        return
    measured: dict[str, list[list[Handover]]] = {way: [] for way in WAYS}
    loads = []
    with tempfile.TemporaryDirectory(prefix="handover-") as directory:
        place = Path(directory)
        prepare(place / "template")
        with Cluster(place / "slurm") as cluster:
            for number in range(repetitions):
                for way, runs in measured.items():
                    loads.append(os.getloadavg()[0])
                    runs.append(run(way, place / "template", place / f"{number}-{len(loads)}", cluster))
    print("From one stage's last step to the next stage's first. Made by `python benchmarks/handover.py`, 2 CPU cores")
    print(f"(load {min(loads):.1f} to {max(loads):.1f} before each), {2 * repetitions} handovers. Median and range.\n")
    print(head("chained by", "in all", "noticing that jobs ended", "apart from that"))
    all_of = {way: [it for done in runs for it in done] for way, runs in measured.items()}
    for way, name in WAYS.items():
        columns = (
            [it.waits + it.own for it in all_of[way]],
            [it.waits for it in all_of[way]],
            [it.own for it in all_of[way]],
        )
        print(row(name, *map(spread, columns)))
    print(f"\nOf that, median:\n\n{head('chained by', *PARTS)}")
    for way, name in WAYS.items():
        medians = (statistics.median(values) for values in zip(*(it.parts for it in all_of[way]), strict=True))
        print(row(name, *(f"{value:.1f} s" for value in medians)))
    more = [one.waits + one.own - other.own for one, other in zip(all_of["snakemake"], all_of["sbatch"], strict=True)]
    print(f"\nMore by Snakemake, in all, handover by handover of the same round: {spread(more)}. Bound: {BOUND:g} s.")
    sys.exit(1 if statistics.median(more) > BOUND else 0)


if __name__ == "__main__":
    main()
