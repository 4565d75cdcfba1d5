"""Make a recorded chain of a finished one: ``python -m tests.recorded.record TREE``, where results/recorded is in TREE.

What no record speaks of by its hash is left out or replaced, and what a resume alone needs is replaced but in KEPT.
"""

import shutil
import sys
from pathlib import Path

from scripts.files import describe_files, read_json, write_json
from tests.recorded.pack import hide_hosts, notes_of

HERE = Path(__file__).parent
RUN = "results/recorded"
KEPT = "rlvr/run/checkpoints/step_1"
TRAINING_STATE = ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin")
PLACEHOLDER = "a placeholder\n"


def record(tree: Path) -> None:
    """Write what is kept of a finished tree beside this file."""
    shutil.rmtree(HERE / "results", ignore_errors=True)
    ignored = shutil.ignore_patterns("logs", ".snakemake_timestamp")
    target = Path(shutil.copytree(tree / RUN, HERE / RUN, symlinks=True, ignore=ignored))
    for page in target.rglob("*.html"):
        page.write_text(PLACEHOLDER)
    hide_hosts(target)
    for checkpoint in target.glob("*/run/checkpoints/*"):
        if not checkpoint.match(KEPT):
            _replace_training_state(checkpoint)
    for published in target.glob("*/ckpt/record.json"):
        files = read_json(published.parent / "weights/files.json")
        write_json(published, read_json(published) | {"files": files})
    write_json(HERE / "snakemake.json", notes_of(tree, "rule", "input", "params", "record_format_version"))


def _replace_training_state(checkpoint: Path) -> None:
    for name in TRAINING_STATE:
        (checkpoint / name).write_text(PLACEHOLDER)
    (checkpoint / "files.json").unlink()
    write_json(checkpoint / "files.json", describe_files(checkpoint))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
