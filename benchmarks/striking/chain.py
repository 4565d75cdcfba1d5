"""One chain under strikes: Snakemake is called again whenever it ended; then what was made is compared."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise, product
from pathlib import Path

import psutil

from benchmarks.striking.kinds import ROOT, RUN, SAVE_PERIOD, Kind
from benchmarks.striking.sitecustomize import program
from scripts.stage.removal import unlinked
from scripts.stage.training_folder import TrainingFolder

Strike = dict
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM")
# The calls of the kernel that strace strikes, the changes among which they are, and errors that they may end with.
CALLS = (
    ("write", "open", ()),
    ("fsync,fdatasync", "open", ("EIO", "ENOSPC")),
    ("/^rename", "rename", ("ENOSPC",)),
    ("/^link", "link", ("ENOSPC",)),
    ("/^symlink", "symlink", ("ENOSPC",)),
    ("/^unlink", "remove", ("EIO",)),
    ("/^mkdir", "mkdir", ("ENOSPC",)),
    ("ftruncate", "open", ("EIO",)),
)
MARK = "STRUCK_TREE"
MOST_CALLS = 400
# Of these an attempt, a job or a call of Snakemake may leave more, or fewer, than an undisturbed chain has.
VARYING = re.compile(
    r"results/(slurm-logs/|\w+/(logs|[^/]+/logs|data/\w+/measured)/|store/[0-9a-f]+/checkpoints/step_\d+)"
    r"|.*/\.snakemake_timestamp$"
)
"""Logs, checkpoints of more steps, and what was measured of splits, which is measured again where it is missing."""
LOCKS = ("locks", "incomplete")


class Chain:
    """A tree of its own in which a kind's chain is made."""

    def __init__(self, kind: Kind, root: Path, environment: Mapping[str, str], repository: Path = ROOT) -> None:
        if not root.exists():
            kind.prepare(root, repository)
        self.kind, self.root = kind, root
        self.plans, self.struck_file = root / "strikes/plans", root / "strikes/struck.jsonl"
        self.plans.mkdir(parents=True, exist_ok=True)
        python = Path(sys.executable).parent
        path = f"{python}{os.pathsep}{environment['PATH']}"
        self.environment = {**environment, "PATH": path, "PYTHONPATH": str(root), MARK: str(root)}
        self.targets = ("all", *(f"results/{RUN}/{stage}/hf" for stage in kind.stages))
        self.calls = 0
        self.faults: list[str] = []

    # An undisturbed chain, and what it made

    def run_quietly(self) -> dict[str, list[str]]:
        """Make everything without a strike, if it is not there; the changes of files by each program's longest run."""
        events, done = self.root / "strikes/events", self.root / "strikes/undisturbed"
        if not done.exists():
            events.mkdir()
            if sum(abs(each.wait()) for each in self.call()):
                raise SystemExit(self.output()[-5000:])
            done.touch()
        found: dict[str, list[str]] = {}
        for path in events.iterdir():
            changes = path.read_text().splitlines()
            if len(changes) > len(found.get(path.stem, ())):
                found[path.stem] = changes
        return found

    def weights(self) -> dict[str, str]:
        """The hash of every stage's published files, and that of its record."""
        found = {}
        for run, stage in product(self.kind.runs, self.kind.stages):
            folder = self.root / "results" / run / stage
            record, export = (json.loads((folder / name / "record.json").read_text()) for name in ("ckpt", "hf"))
            found[f"{run}/{stage}"] = f"{record['step']} {record['identity']} {export['content']}"
        return found

    def paths(self) -> set[str]:
        """The files and folders below the results, but for what may differ after strikes."""
        below = (str(path.relative_to(self.root)) for path in (self.root / "results").rglob("*"))
        return {path for path in below if not VARYING.match(path)}

    # Under strikes

    def begin_after_first(self, quiet: "Chain") -> None:
        """Take the data and the first stage from an undisturbed chain, so that only what follows is to be made.

        The second stage is half trained, in a run directory as earlier commits made it, which moves into the store.
        """
        for name in ("results", ".snakemake"):
            shutil.copytree(quiet.root / name, self.root / name, symlinks=True)
        results = self.root / "results" / RUN
        second = results / self.kind.stages[1]
        half_trained = (second / "run").resolve()
        for stage in self.kind.stages[1:]:
            shutil.rmtree(results / stage)
        for training in unlinked(self.root / "results"):
            if training.resolve() != half_trained:
                shutil.rmtree(training)
        second.mkdir()
        half_trained.rename(second / "run")
        shutil.rmtree(TrainingFolder(second / "run").checkpoints[-1].path)
        for page in (*results.glob("*.html"), *results.glob("*.csv")):
            page.unlink()

    def command(self, run: str, *options: str) -> list[str]:
        """The call of Snakemake for all of a run."""
        targets = (target.replace(f"/{RUN}/", f"/{run}/") for target in self.targets)
        return ["snakemake", *self.kind.arguments, *options, "--config", f"run={run}", "--", *targets]

    def call(self) -> list[subprocess.Popen]:
        """Call Snakemake for everything, a call for each run at once, in sessions of their own."""
        self.calls += 1
        with (self.root / "snakemake.txt").open("a") as log:
            return [
                subprocess.Popen(
                    self.command(run),
                    cwd=self.root,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for run in self.kind.runs
            ]

    def output(self) -> str:
        """What Snakemake printed."""
        return (self.root / "snakemake.txt").read_text(errors="replace")

    def struck(self) -> list[Strike]:
        """The strikes so far."""
        text = self.struck_file.read_text() if self.struck_file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def run_struck(self, events: dict[str, list[str]], rng: random.Random, most: int, until: float) -> list[Strike]:
        """Make everything under about so many strikes, none after `until`; the strikes, with what they cost."""
        while self.calls < MOST_CALLS:
            over = len(self.struck()) >= most or time.monotonic() > until
            by_time = not over and rng.random() < self.kind.at_random
            self.plan({} if over or by_time else events, rng)
            before, began = len(self.struck()), len(self.output()) if self.calls else 0
            calls = self.call()
            if by_time:
                self.strike_at_random(rng.choice(calls), rng, most, until)
            statuses = [each.wait() for each in calls]
            if not any(statuses):
                break
            time.sleep(1)  # strace tells of a strike after the program's end
            struck = self.struck()[before:]
            if not any(strike["program"] == "snakemake" for strike in struck):
                self.wait_for_programs(20)
            if not struck:
                self.faults.append(f"a call that nothing struck ended with {statuses}")
                print(self.output()[began:][-3000:], file=sys.stderr, flush=True)
                if len(self.faults) > 3:
                    break
        self.plan({}, rng)
        self.wait_for_programs()
        strikes = self.struck()
        self.count_lost_steps(strikes)
        return strikes

    def strike_at_random(self, snakemake: subprocess.Popen, rng: random.Random, most: int, until: float) -> None:
        """Strike at random times while Snakemake runs; mostly not before its first program does."""
        pause = rng.uniform(0, 5)
        while snakemake.poll() is None and len(self.struck()) < most and time.monotonic() < until:
            if rng.random() < 0.85:
                while snakemake.poll() is None and not self.working():
                    time.sleep(0.3)
            moment = time.monotonic() + pause
            while time.monotonic() < moment and snakemake.poll() is None:
                time.sleep(0.01)
            if snakemake.poll() is None:
                self.strike(snakemake, rng)
            pause = rng.uniform(*self.kind.seconds)

    def plan(self, events: dict[str, list[str]], rng: random.Random) -> None:
        """Say at which change of a file each program is to be struck, when it is started the next times."""
        for path in self.plans.iterdir():
            path.unlink()
        for name, changes in events.items():
            first = name.split()[0]
            aim = self.kind.aims.get(first, self.kind.aim)
            plan = []
            while rng.random() < aim and len(plan) < (self.kind.repeats if first == "train.run" else 1):
                if rng.random() < self.kind.by_call:
                    words = Counter(change.split()[0] for change in changes)
                    call, word, errors = rng.choice([each for each in CALLS if each[1] in words])
                    blow = rng.choice((*SIGNALS, *errors))
                    event = place_in(words[word], rng)
                    plan.append({"call": call, "event": event, "signal": blow, "target": "program"})
                    continue
                plan.append(
                    {
                        "event": place_in(len(changes), rng),
                        "after": None if rng.random() < 0.6 else rng.uniform(0, 0.004),
                        "signal": rng.choice(SIGNALS),
                        "target": "group" if rng.random() < 0.1 else "program",
                    }
                )
            if plan:
                (self.plans / f"{name}.json").write_text(json.dumps(plan))

    def programs(self) -> list[psutil.Process]:
        """The programs that work in this tree, on whatever host of the test cluster."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def working(self) -> list[tuple[int, str]]:
        """The process and name of each program that is no Snakemake."""
        found = []
        for process in self.programs():
            with suppress(psutil.Error):
                name = program(process.cmdline()) if "python" in process.name() else None
                if name and not name.startswith("snakemake"):
                    found.append((process.pid, name))
        return found

    def strike(self, snakemake: subprocess.Popen, rng: random.Random) -> None:
        """Strike a program, Snakemake, or Snakemake with all it started on this machine, at this moment."""
        working = self.working()
        target = rng.choice((*["program"] * 6, "snakemake", "group"))
        name = rng.choice(SIGNALS)
        what = {"event": "", "after": None, "signal": name, "target": "group" if target == "group" else "program"}
        with suppress(ProcessLookupError):
            logged = self.logged()
            if target == "program":
                if not working:
                    return
                pid, struck = rng.choice(working)
                os.kill(pid, signal.Signals[name])
            else:
                struck = "snakemake"
                send = os.killpg if target == "group" else os.kill
                send(snakemake.pid, signal.Signals[name])
            with self.struck_file.open("a") as file:
                strike = what | {"program": struck, "time": time.time(), "logged": logged}
                file.write(json.dumps(strike) + "\n")

    def wait_for_programs(self, seconds: float = 120) -> None:
        """Wait for what outlived its Snakemake."""
        deadline = time.monotonic() + seconds
        while left := self.programs():
            if time.monotonic() > deadline:
                self.faults.append(f"still runs: {left[0].cmdline()}")
                return
            time.sleep(0.2)

    # What came of it

    def steps(self, stage: str) -> list[int]:
        """The steps of a stage in the order in which they were logged."""
        log = self.root / "results" / RUN / stage / "run/metrics.jsonl"
        steps = []
        for line in log.read_text().splitlines() if log.exists() else ():
            with suppress(ValueError):
                steps.append(json.loads(line)["step"])
        return steps

    def logged(self) -> dict[str, int]:
        """How many steps each stage has logged."""
        return {stage: len(self.steps(stage)) for stage in self.kind.stages}

    def count_lost_steps(self, strikes: list[Strike]) -> None:
        """Charge each return to an earlier step to the first strike after the last step that was logged before it.

        Later strikes hit a training that had logged nothing since, so there was nothing more to lose. One at the log
        itself may have let a line more be written.
        """

        def order(strike: Strike) -> tuple[int, bool]:
            is_at_log = strike["program"].endswith(f" {stage}") and "metrics.jsonl" in strike["event"]
            return strike["logged"].get(stage, 0) + is_at_log, strike["signal"] == "SIGKILL"

        for strike in strikes:
            strike["lost"] = 0
        for stage in self.kind.stages:
            for place, (before, after) in enumerate(pairwise(self.steps(stage)), start=1):
                if after <= before:
                    earlier = [strike for strike in strikes if strike["logged"].get(stage, 0) <= place]
                    guilty = max(earlier, key=order)
                    guilty["lost"] += before - after + 1

    def check(self, quiet: "Chain", strikes: list[Strike]) -> None:
        """Compare with the undisturbed chain, and look for what strikes may have left; what is wrong is in `faults`."""
        if not (self.root / f"results/{RUN}/report.html").exists():
            self.faults.append("not everything was made")
            return
        if self.weights() != quiet.weights():
            self.faults.append(f"other weights: {self.weights()} instead of {quiet.weights()}")
        if left := self.paths() - quiet.paths():
            self.faults.append(f"left behind: {', '.join(sorted(left)[:5])}")
        if missing := quiet.paths() - self.paths():
            self.faults.append(f"missing: {', '.join(sorted(missing)[:5])}")
        for folder in LOCKS:
            if left := list((self.root / ".snakemake" / folder).glob("*")):
                self.faults.append(f"left behind: .snakemake/{folder}/{left[0].name}")
        for strike in strikes:
            if strike["lost"] > (1 if strike["signal"] == "SIGTERM" else SAVE_PERIOD):
                self.faults.append(f"{strike['lost']} steps lost to a {strike['signal']} at {strike['program']}")
        for run in self.kind.runs:
            if "Nothing to be done" not in (said := self.say(*self.command(run, "-n"))):
                self.faults.append(f"something is to be done: {said[-300:]}")
        for run, stage in product(self.kind.runs, self.kind.stages):
            told = self.say(sys.executable, "-m", "scripts.commands", "lineage", f"results/{run}/{stage}/ckpt")
            if "files are as recorded" not in told:
                self.faults.append(f"lineage of {stage}: {told[-300:]}")

    def say(self, *command: str) -> str:
        """What a command prints in the tree."""
        return subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        ).stdout


def place_in(count: int, rng: random.Random) -> int:
    """A number from 1 to `count`; half of them lie early, since a program that is called again has less to do."""
    return rng.randint(1, count) if rng.random() < 0.5 else math.ceil(count ** rng.random())
