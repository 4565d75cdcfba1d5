"""From an empty folder to three results, by the commands of the README and the docs alone: minutes, and commands typed.

    python benchmarks/adopt.py > benchmarks/adopt.md

The clone is of this checkout's last commit; packages come from the index, or from pip's cache.
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head, row, seconds_of
from tests import docs_commands

SET_UP = ("git clone {root} stagecoach", "cd stagecoach", "make setup", "source .venv/bin/activate")
PAGES = (
    ("a dry run of Super's chain", "docs/howto/super.md"),
    ("a trained environment of one's own", "docs/howto/environment.md"),
)


def main() -> None:
    """Print a row for each of what people come for."""
    is_smoke = command_line(__doc__).parse_args().smoke
    print(
        "# From an empty folder\n\n`python benchmarks/adopt.py > benchmarks/adopt.md`, on two cores. Commands are lines"
    )
    print(f"that are typed; the first {len(SET_UP)} set Stagecoach up. Packages came from pip's cache.\n")
    print(head("to", "page", "commands", "minutes of set-up", "minutes after it"))
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "stagecoach")
        set_up = seconds_of("git", "clone", "--quiet", ROOT, clone)
        docs_commands.ROOT = clone
        if is_smoke:
            for result, page in PAGES:
                count = sum(commands_in(block.command) for block in docs_commands.blocks_of(page))
                print(row(result, page, len(SET_UP) + count, f"{set_up / 60:.1f}", "-"))
            return
        set_up += seconds_of("make", "setup", cwd=clone)
        sys.executable = str(clone / ".venv/bin/python")  # the pages' commands are the clone's
        for result, page in PAGES:
            folder = Path(name, Path(page).stem)
            folder.mkdir()
            ran = list(docs_commands.run_page(page, folder, Path(name, "no model"), slow=True))
            commands = len(SET_UP) + sum(commands_in(block.command) for block, _ in ran)
            print_row(result, page, commands, set_up, sum(seconds for _, seconds in ran))
            shutil.rmtree(folder)
        demo = seconds_of("make", "demo", cwd=clone)
        (clone / "results/report.html").stat()
        print_row("the demo's report", "README.md", len(SET_UP), set_up, demo)


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


def print_row(result: str, page: str, commands: int, set_up: float, after: float) -> None:
    """Print one row; times are in seconds."""
    print(row(result, page, commands, f"{set_up / 60:.1f}", f"{after / 60:.1f}"), flush=True)


if __name__ == "__main__":
    main()
