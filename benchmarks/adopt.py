"""From an empty folder to three results, by the commands of the README and the docs alone: minutes, and commands typed.

    python benchmarks/adopt.py > benchmarks/adopt.md

The clone is of this checkout's last commit; packages come from the index, or from pip's cache.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import docs_commands

SET_UP = ("git clone {root} stagecoach", "cd stagecoach", "make setup", "source .venv/bin/activate")


def main() -> None:
    """Print a row for each of what people come for."""
    print(
        "# From an empty folder\n\n`python benchmarks/adopt.py > benchmarks/adopt.md`, on two cores. Commands are lines"
    )
    print(f"that are typed; the first {len(SET_UP)} set Stagecoach up. Packages came from pip's cache.\n")
    print("| to | page | commands | minutes of set-up | minutes after it |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "stagecoach")
        started = time.monotonic()
        run(["git", "clone", "--quiet", str(docs_commands.ROOT), str(clone)], Path(name))
        run(["make", "setup"], clone)
        set_up = (time.monotonic() - started) / 60
        docs_commands.ROOT, python = clone, clone / ".venv/bin/python"
        sys.executable = str(python)  # the pages' commands are the clone's
        for result, page in (
            ("a dry run of Super's chain", "docs/howto/super.md"),
            ("a trained environment of one's own", "docs/howto/environment.md"),
        ):
            folder = Path(name, Path(page).stem)
            folder.mkdir()
            ran = list(docs_commands.run_page(page, folder, Path(name, "no model"), slow=True))
            commands = len(SET_UP) + sum(commands_in(block.command) for block, _ in ran)
            row(result, page, commands, set_up, sum(seconds for _, seconds in ran) / 60)
            shutil.rmtree(folder)
        started = time.monotonic()
        run(["make", "demo"], clone)
        (clone / "results/report.html").stat()
        row("the demo's report", "README.md", len(SET_UP), set_up, (time.monotonic() - started) / 60)


def run(command: list[str], folder: Path) -> None:
    """Run a command; its output is shown when it fails."""
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def commands_in(block: str) -> int:
    """The commands of a block; what a here-document holds is one with its command."""
    count, end = 0, None
    for line in filter(str.strip, block.splitlines()):
        if end is not None:
            end = None if line == end else end
        else:
            count += 1
            end = line.partition("<<")[2].strip("' ") or None
    return count


def row(result: str, page: str, commands: int, set_up: float, minutes: float) -> None:
    """Print one row."""
    print(f"| {result} | {page} | {commands} | {set_up:.1f} | {minutes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
