"""Signals and clocks: a stopped call ends in seconds, the next goes on to equal results, and no time stamp is in the way.

STAGECOACH_ALL_STRIKES=1 stops a chain in each way at each moment; else the ways take turns at the moments.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest

from benchmarks.striking.chain import Chain
from benchmarks.striking.kinds import ROOT, Kind, light_recipe
from scripts.stage.training_folder import TrainingFolder
from tests.programs import until

LIGHT = Kind("a training without torch", light_recipe(1))
RESULTS = Path("results/struck")
SECONDS = 40
"""Within which everything ends on a machine that does other work too; alone it takes two."""
SAID = ("Config file", "Building DAG", "Select jobs")
MOMENTS = [
    *SAID,
    *("demo.synthesize", "scripts.data.fill", "scripts.data.check", "scripts.train.preflight", "scripts.train.run"),
    *("scripts.train.export", "scripts.stage.tables", "scripts.evaluate.gate", "scripts.report.stage_page", "--report"),
]
"""Words that Snakemake prints, or in the command of a program that it started, in the order of a chain."""
WAYS = ["Ctrl-C twice", "the terminal is closed", "SIGTERM to all", "Ctrl-C", "SIGHUP to all", "SIGTERM to Snakemake"]


class Terminal:
    """A terminal with Snakemake in its foreground."""

    def __init__(self, chain: Chain, *options: str, ignores: int | None = None) -> None:
        self.root, self.said = chain.root, ""
        self.keyboard, screen = os.openpty()

        def settle() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGHUP):  # which whoever started the tests may ignore
                signal.signal(number, signal.SIG_IGN if number == ignores else signal.SIG_DFL)

        self.snakemake = subprocess.Popen(
            ["snakemake", *options, "--", *chain.targets],
            cwd=chain.root,
            env=chain.environment,
            **dict.fromkeys(("stdin", "stdout", "stderr"), screen),
            start_new_session=True,
            preexec_fn=settle,  # noqa: PLW1509 (no thread runs)
        )
        os.close(screen)

    def read(self) -> str:
        """What was printed so far."""
        with suppress(OSError):
            while self.keyboard is not None and select.select([self.keyboard], [], [], 0)[0]:
                self.said += os.read(self.keyboard, 1 << 16).decode(errors="replace")
        return self.said

    def hang_up(self) -> None:
        """Close the terminal."""
        if self.keyboard is not None:
            os.close(self.keyboard)
        self.keyboard = None

    def programs(self) -> list[str]:
        """The commands of all processes in the tree."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found

    def is_over(self) -> bool:
        self.read()
        return self.snakemake.poll() is not None

    def wait(self, seconds: float = 120) -> int:
        """The exit status, once no process is left."""
        until(
            lambda: self.is_over() and not self.programs(), seconds, lambda: f"{self.programs()} {self.read()[-2000:]}"
        )
        self.hang_up()
        return self.snakemake.returncode

    def reached(self, moments: list[str]) -> str:
        """The first of these moments that comes, or an empty word where Snakemake ends before."""

        def moment() -> str | None:
            commands = "\n".join(self.programs())
            here = (each for each in moments if each in (self.read() if each in SAID else commands))
            return next(here, "the end" if self.is_over() else None)

        return until(moment, 120, self.read)

    def strike(self, way: str) -> None:
        """Stop Snakemake in a way."""
        with suppress(ProcessLookupError):
            if way == "the terminal is closed":
                self.hang_up()
            elif way.startswith("Ctrl-C"):
                for _ in range(1 + ("twice" in way)):
                    os.write(self.keyboard, b"\x03")
                    time.sleep(0.2)
            elif way == "SIGTERM to Snakemake":
                self.snakemake.terminate()
            else:
                os.killpg(self.snakemake.pid, signal.Signals[way.split(maxsplit=1)[0]])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    chain = Chain(LIGHT, tmp_path_factory.mktemp("signals") / "undisturbed", os.environ)
    chain.run_quietly()
    return chain


@pytest.fixture
def copied(undisturbed, tmp_path):
    shutil.copytree(undisturbed.root, tmp_path / "copied", symlinks=True)
    return Chain(LIGHT, tmp_path / "copied", os.environ)


@pytest.mark.parametrize("first", range(len(WAYS) if "STAGECOACH_ALL_STRIKES" in os.environ else 1))
def test_a_stopped_call_ends_in_seconds_and_the_next_goes_on(undisturbed, tmp_path, first):
    chain = Chain(LIGHT, tmp_path / "struck", os.environ, undisturbed.root)
    left, struck = list(zip(MOMENTS, islice(cycle(WAYS), first, None), strict=False)), []
    while left:
        terminal = Terminal(chain)
        moment = terminal.reached([moment for moment, _ in left])
        for way in [way for known, way in left if known == moment]:
            terminal.strike(way)
            began = time.monotonic()
            terminal.wait(SECONDS)
            struck.append(moment)
            print(f"| {moment} | {way} | {time.monotonic() - began:.1f} s |")
        left = left[len(left) if moment not in MOMENTS else [known for known, _ in left].index(moment) + 1 :]
        terminal.hang_up()
    assert len(struck) >= len(MOMENTS) - 4, "after SIGTERM to Snakemake alone the running jobs go on"
    assert Terminal(chain).wait() == 0
    chain.check(undisturbed, [])
    assert not chain.faults


STRUCK = """
import logging
import os
import signal
from snakemake_interface_logger_plugins.common import LogEvent

include: "Snakefile"

class Strike(logging.Filter):
    is_struck = False

    def filter(self, record):
        if getattr(record, "event", None) == LogEvent.JOB_FINISHED and not self.is_struck:
            self.is_struck = True
            os.kill(os.getpid(), signal.SIGTERM)  # Snakemake holds the scheduler's lock while it says so
        return True

logging.getLogger("snakemake.logging").addFilter(Strike())
"""


def test_sigterm_while_snakemake_holds_its_lock_ends_the_call(copied):
    for gone in ("child1/gate.json", "report.html"):
        (copied.root / RESULTS / gone).unlink()
    (copied.root / "struck.smk").write_text(STRUCK)
    terminal = Terminal(copied, "--snakefile", "struck.smk")
    assert terminal.wait() == 1
    assert "Will exit after finishing currently running jobs" in terminal.said
    assert (copied.root / RESULTS / "child1/gate.json").exists()
    assert not (copied.root / RESULTS / "report.html").exists()
    assert Terminal(copied).wait() == 0 and (copied.root / RESULTS / "report.html").exists()


def test_sigterm_to_snakemake_alone_saves_the_step_of_the_training_and_ends_the_call(copied):
    recipe, run = copied.root / "config/recipes/struck.yaml", copied.root / RESULTS / "base/run"
    recipe.write_text(recipe.read_text().replace("steps: 30", "steps: 1000000"))
    before = run.resolve()
    terminal = Terminal(copied)
    until(lambda: run.resolve() != before and (run / "metrics.jsonl").exists(), 120, terminal.read)
    terminal.strike("SIGTERM to Snakemake")
    assert terminal.wait(SECONDS) == 1
    logged = copied.steps("base")
    assert 0 < TrainingFolder(run).newest_step == logged[-1] < 1_000_000, "the step at work is saved"
    assert "SIGTERM: saving at the end of the step" in terminal.said
    assert "train base: stopped; the next call goes on with it" in terminal.said
    assert "trying again" not in terminal.said and "Trying to restart" not in terminal.said


def test_a_call_that_ignores_the_end_of_its_terminal_goes_on_without(copied):
    for gone in ("child1/gate.json", "report.html"):
        (copied.root / RESULTS / gone).unlink()
    terminal = Terminal(copied, ignores=signal.SIGHUP)
    terminal.reached(["scripts.evaluate.gate"])
    terminal.hang_up()
    assert terminal.wait() == 0
    assert (copied.root / RESULTS / "child1/gate.json").exists() and (copied.root / RESULTS / "report.html").exists()


def test_results_from_the_future_hide_no_edit_and_fail_no_job(copied):
    files = [path for path in (copied.root / RESULTS).rglob("*") if path.is_file() and not path.is_symlink()]
    ahead, mine = time.time() + 86_400, copied.root / "mine.jsonl"
    source = copied.root / RESULTS / "data/source/first.jsonl"
    os.link(source, mine)
    for file in files:
        os.utime(file, (ahead, ahead))
    (copied.root / RESULTS / "report.html").unlink()
    terminal = Terminal(copied)
    assert terminal.wait() == 0
    assert "in the future; they are dated now" in terminal.said
    assert (copied.root / RESULTS / "report.html").exists()
    assert mine.stat().st_mtime == ahead, "a hard link may be the user's own file"
    for file in files:
        os.utime(file, (ahead, ahead))
    recipe = copied.root / "config/recipes/struck.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 30", "steps: 33"))
    terminal = Terminal(copied, "--dry-run")
    assert terminal.wait() == 0 and terminal.said.count("rule train: stage=") == 2


MADE = """
from scripts.controller.stale import let_inputs_pass

let_inputs_pass()

rule made:
    input: "mine.txt"
    output: "made.txt"
    shell: "cp {input} {output}"
"""


def test_a_users_file_from_the_future_stays_and_fails_no_job(tmp_path):
    (tmp_path / "Snakefile").write_text(MADE)
    mine, ahead = tmp_path / "mine.txt", time.time() + 7200
    for text, planned in (("one", True), ("one", False), ("two", True)):
        mine.write_text(text)
        os.utime(mine, (ahead, ahead))
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-triggers", "mtime", "input"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert (tmp_path / "made.txt").read_text() == text and mine.stat().st_mtime == ahead
        assert ("mine.txt: lies 1 h 59 min in the future" in done.stderr) == planned, done.stderr
