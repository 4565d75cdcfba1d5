"""Export a published checkpoint in Hugging Face format, for the next stage to start from."""

import argparse
from pathlib import Path

from scripts.errors import run_program
from scripts.stage.publish import export_checkpoint


def main() -> None:
    """Command line of the exporter."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.export", description=__doc__)
    parser.add_argument("--ckpt", type=Path, required=True, help="published checkpoint directory")
    parser.add_argument("--hf", type=Path, required=True, help="export directory to publish")
    arguments = parser.parse_args()
    export_checkpoint(arguments.ckpt, arguments.hf)


if __name__ == "__main__":
    run_program(main)
