"""Write a page with runs side by side."""

import argparse

from scripts.report.compare import write_comparison


def run(arguments: argparse.Namespace) -> None:
    """Write the page."""
    write_comparison(arguments.results, arguments.output)
