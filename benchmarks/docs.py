"""Follow the tutorial and the how-tos from their first command to their last, as tests/docs_commands.py reads them.

    python benchmarks/docs.py [PAGE ...] > benchmarks/docs.md

Without pages: all of them. The commands for a cluster are run where SLURM_CONF names one, such as the tests' own:
``eval "$(python -m tests.slurm.cluster up)"``.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, head, row
from tests.docs_commands import PAGES, blocks_of, run_page
from tests.pretrained import save_pretrained

QUICKEST = "docs/howto/super.md"


def main() -> None:
    """Print a row for each page."""
    parser = command_line(__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES)
    arguments = parser.parse_args()
    print("# The docs, followed\n\n`python benchmarks/docs.py > benchmarks/docs.md`, on two shared cores;")
    print("the page for a cluster on the tests' Slurm of three hosts. The set-up (`make setup`) comes before. Blocks")
    print("that are not run say why in the page's source.\n")
    print(head("page", "blocks of commands", "of them run", "minutes", "longest, s"))
    with tempfile.TemporaryDirectory() as name:
        model = Path(name, "model")
        if not arguments.smoke:
            save_pretrained("qwen3", model)
        for number, page in enumerate([QUICKEST] if arguments.smoke else arguments.pages):
            folder = Path(name, str(number))
            folder.mkdir()
            times = [seconds for _, seconds in run_page(page, folder, model, slow=not arguments.smoke)]
            print(
                row(page, len(blocks_of(page)), len(times), f"{sum(times) / 60:.1f}", f"{max(times):.0f}"), flush=True
            )


if __name__ == "__main__":
    main()
