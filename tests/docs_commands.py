"""The commands of a page of the docs, run in order as a reader would, in a copy of the repository.

Every ``sh`` block is run by bash with ``set -e``; its folder and exported variables are those of the next one. A ``text``
block right behind it shows lines of its output, in this order; … stands for what differs. A comment before a block, which
readers do not see, says that it is not run as it stands:

    <!-- slow -->              in the benchmark alone
    <!-- slurm -->             in the benchmark, where there is a Slurm
    <!-- skip: why -->         never
    <!-- instead: command -->  this is run in its place
    <!-- interrupt: FILE -->   Ctrl-C is pressed as soon as this file is there
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["docs/tutorial.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/howto/*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>slow|slurm|skip|instead|interrupt)(?:: (?P<value>[^>]*?))? -->\n\n?)?"
    r"^```sh\n(?P<command>.*?)^```\n(?:\n(?P<between>[^`\n]*\n)?\n?```text\n(?P<shown>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
NOT_COPIED = (".git", ".venv*", ".cache", ".snakemake", ".pytest_cache", "results", "build", "__pycache__")


@dataclass
class Block:
    """Commands that stand together on a page."""

    page: str
    line: int
    command: str
    shown: list[str]
    marker: str
    value: str

    def check(self, output: str) -> None:
        """The lines that the page shows are among those of the output, in this order."""
        lines = iter(output.splitlines())
        for line in self.shown:
            parts = (r"\s+".join(map(re.escape, part.split())) for part in line.split("…"))
            pattern = re.compile(r"\s*" + r".*".join(parts) + r"\s*")
            found = any(pattern.fullmatch(printed) for printed in lines)
            assert found, f"{self.page}:{self.line} shows {line!r}, but it printed\n{output}"


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in its order."""
    text = re.sub(r"^    ", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)  # those in lists
    blocks = []
    for match in BLOCK.finditer(text):
        shown = [line for line in (match["shown"] or "").splitlines() if line.strip("… ")]
        line = text.count("\n", 0, match.start("command")) + 1
        blocks.append(Block(page, line, match["command"], shown, match["marker"] or "", match["value"] or ""))
    return blocks


def run_page(page: str, folder: Path, model: Path, slow: bool = False) -> Iterator[tuple[Block, float]]:
    """Run a page's blocks in an empty folder, with a model at hand; each that was run, with its seconds.

    AssertionError: one failed, or did not print what the page shows.
    """
    never = {"skip"} if slow and shutil.which("sinfo") and os.environ.get("SLURM_CONF") else {"skip", "slurm"}
    never |= set() if slow else {"slow", "interrupt"}
    clone, state = folder / "stagecoach", folder / "state.sh"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    state.write_text(f"cd '{clone}'\nexport MODEL='{model}' PATH='{Path(sys.executable).parent}':\"$PATH\"\n")
    for block in blocks_of(page):
        if block.marker in never:
            continue
        command = block.value if block.marker == "instead" else block.command
        script = f"source '{state}'\nset -eo pipefail\n{command}\n{{ export -p; echo cd \"'$PWD'\"; }} > '{state}'\n"
        started = time.monotonic()
        status, output = run_script(script, clone / block.value if block.marker == "interrupt" else None)
        assert bool(status) == (block.marker == "interrupt"), f"{page}:{block.line} ended with {status}\n{output}"
        block.check(output)
        yield block, time.monotonic() - started


def run_script(script: str, until: Path | None) -> tuple[int, str]:
    """Exit status and output of a script, which gets Ctrl-C when the file `until` is there."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["bash", "-c", script], text=True, start_new_session=True, **streams)
    while until is not None and process.poll() is None:
        if until.exists():
            os.killpg(process.pid, signal.SIGINT)
            break
        time.sleep(0.2)
    output, _ = process.communicate()
    return process.returncode, output
