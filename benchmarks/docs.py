"""Follow the tutorial and the how-tos from their first command to their last, as tests/docs_commands.py reads them.

    python benchmarks/docs.py [PAGE ...] > benchmarks/docs.md

Without pages: all of them. The commands for a cluster are run where SLURM_CONF names one, such as the tests' own:
``eval "$(python -m tests.slurm.cluster up)"``.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.docs_commands import PAGES, blocks_of, run_page
from tests.pretrained import save_pretrained


def main() -> None:
    """Print a row for each page."""
    print("# The docs, followed\n\n`python benchmarks/docs.py > benchmarks/docs.md`, on two shared cores;")
    print("the page for a cluster on the tests' Slurm of three hosts. The set-up (`make setup`) comes before. Blocks")
    print("that are not run say why in the page's source.\n")
    print("| page | blocks of commands | of them run | minutes | longest, s |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        save_pretrained("qwen3", model)
        for number, page in enumerate(sys.argv[1:] or PAGES):
            folder = Path(name, str(number))
            folder.mkdir()
            times = [seconds for _, seconds in run_page(page, folder, model, slow=True)]
            row = (page, len(blocks_of(page)), len(times), f"{sum(times) / 60:.1f}", f"{max(times):.0f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
