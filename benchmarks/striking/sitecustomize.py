"""Strikes the program that imports it at the n-th change of a file or call of the kernel; kills.py puts it into a tree.

Python imports this file as it starts, since it lies where every program of the tree looks for modules first. A program
finds its strikes in ``strikes/plans/<program>.json``, one for each of its starts: before the call that changes a file,
or some milliseconds after it began, the signal goes to the program or to its whole process group. A strike with a
``call`` is strace's: the program starts again under it, and the first of its processes to make such a call for the n-th
time gets the signal instead, or an error. Where ``strikes/events`` is there, nothing is struck, but each change of a
file is noted.
"""

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
STRIKES = ROOT / "strikes"
# Events of Python that change a file: which of their arguments is its path, and which the directory it is relative to.
CHANGES = {
    "os.rename": (1, 3),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.mkdir": (0, 2),
    "os.truncate": (0, None),
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
VARYING = re.compile(r"\.[0-9a-f]{8}\.|[0-9a-f]{16,}|[\w-]+\.\d+\.json$|\d{4}-\d\d-\d\dT[\d.]+")


TRACED = "STRIKES_TRACED"
CALL = re.compile(r"(?:\d+ +)?(?:<\.\.\. )?(\w+)(.*)")
HIT = re.compile(r"= \?$|\(INJECTED\)$|si_code=SI_KERNEL")


def program(words: Sequence[str]) -> str | None:
    """The name of a program, with its stage where it has one; None: nothing of a chain."""
    if "-m" in words and (module := words[words.index("-m") + 1]).startswith(("scripts.", "demo.")):
        stage = words[words.index("--stage") + 1] if "--stage" in words else ""
        return f"{module.removeprefix('scripts.')} {Path(stage).name}".strip()
    if any(word.endswith("default_worker.py") for word in words):
        return "ray worker"
    if any(Path(word).name == "snakemake" for word in words[1:3]):
        if {"-n", "--dry-run"} & set(words):
            return None
        return "snakemake report" if "--report" in words else "snakemake job" if "--mode" in words else "snakemake"
    return None


def changed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """The file below the tree's results or Snakemake's folder that an event is about to change, or None."""
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & WRITES or isinstance(path, int):
            return None
        folder = -1
    else:
        place, at = CHANGES[event]
        path, folder = arguments[place], arguments[at] if at is not None else -1
    path = os.fsdecode(path)
    base = "." if folder == -1 else f"/proc/self/fd/{folder}"
    path = os.path.relpath(Path(base, path).absolute() if folder == -1 else Path(Path(base).readlink(), path), ROOT)
    if not path.startswith(("results/", ".snakemake/")) or "__pycache__" in path:
        return None
    return VARYING.sub("*", re.sub(r"\.[\w-]+\.\d+\.[0-9a-f]+\.tmp", ".tmp", path))


def logged() -> dict[str, int]:
    """How many steps each stage has logged."""
    logs = ROOT.glob("results/*/*/run/metrics.jsonl")
    return {log.parents[1].name: log.read_bytes().count(b"\n") for log in logs}


class Striker:
    """Counts a program's changes of files and strikes at the planned one; without a plan (None) it notes them."""

    def __init__(self, name: str, plan: list[dict[str, Any]] | None) -> None:
        self.name, self.plan, self.count, self.busy, self.process = name, plan, 0, False, os.getpid()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An event of Python, of any kind; those of this hook itself, and of forks, are passed over."""
        if self.busy or (event != "open" and event not in CHANGES) or os.getpid() != self.process:
            return
        self.busy = True
        try:
            path = changed(event, arguments)
            if path is not None:
                self.count += 1
                self.meet(f"{event.removeprefix('os.')} {path}")
        finally:
            self.busy = False

    def meet(self, event: str) -> None:
        """A change of a file."""
        if self.plan is None:
            append(STRIKES / "events" / f"{self.name}.{self.process}", event)
        elif self.count == self.plan[0]["event"]:
            if self.plan[0]["after"] is None:
                self.strike(event)
            else:
                threading.Timer(self.plan[0]["after"], self.strike, (event,)).start()

    def strike(self, event: str) -> None:
        """Leave the later strikes to the program's next starts, note this one, and send the signal."""
        self.busy = True
        planned, *later = self.plan
        (STRIKES / "plans" / f"{self.name}.json").write_text(json.dumps(later))
        what = {"program": self.name, "event": event, "time": time.time(), "logged": logged()}
        append(STRIKES / "struck.jsonl", json.dumps(planned | what))
        number = signal.Signals[planned["signal"]]
        if planned["target"] == "group":
            os.killpg(os.getpgrp(), number)
        else:
            os.kill(os.getpid(), number)
        self.busy = False


def trace(name: str, planned: dict[str, Any], *later: dict[str, Any]) -> None:
    """Start this program again under strace, which strikes it; of Snakemake only the thread that began."""
    (STRIKES / "plans" / f"{name}.json").write_text(json.dumps(later))
    call, blow = planned["call"], planned["signal"]
    how = f"{'signal' if blow.startswith('SIG') else 'error'}={blow}:when={planned['event']}"
    told = shlex.join(["exec", sys.executable, __file__, name, json.dumps(planned)])
    options = ["-D", "-y", "-qq", *([] if name.startswith("snakemake") else ["-f"]), "-o", f"|{told}"]
    os.environ[TRACED] = name
    command = ["strace", *options, "-e", f"trace={call}", "-e", f"inject={call}:{how}", sys.executable]
    os.execvp("strace", command + sys.orig_argv[1:])  # noqa: S606 (no shell is wanted)


def record(name: str, planned: dict[str, Any]) -> None:
    """Note the strikes that strace prints."""
    call = ""
    for line in map(str.rstrip, sys.stdin):
        call = call if "--- SIG" in line else line
        if HIT.search(line) and (made := CALL.match(call)):
            paths = re.findall(rf'(?:<|"){ROOT}/([^>"]+)|"((?:results|\.snakemake)/[^"]+)"', made[2])
            event = VARYING.sub("*", " ".join([f"{made[1]}()", *map("".join, paths[-1:])]))
            what = {"program": name, "event": event, "after": None, "time": time.time(), "logged": logged()}
            append(STRIKES / "struck.jsonl", json.dumps(planned | what))


def append(path: Path, line: str) -> None:
    """Add a line to a file."""
    with path.open("a") as file:
        file.write(line + "\n")


def begin() -> None:
    """Count the changes of files where this program is to be struck or watched."""
    name, plan, by = program(sys.orig_argv), None, os.environ.get(TRACED)
    if name in (None, by):
        return
    if not (STRIKES / "events").is_dir():
        with suppress(FileNotFoundError, ValueError):
            plan = json.loads((STRIKES / "plans" / f"{name}.json").read_text())
        if not plan:
            return
        if "call" in plan[0]:
            if by is None or by.startswith("snakemake"):
                trace(name, *plan)
            return
    sys.addaudithook(Striker(name, plan))


if __name__ == "sitecustomize":
    begin()
elif __name__ == "__main__":
    record(sys.argv[1], json.loads(sys.argv[2]))
