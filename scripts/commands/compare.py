"""Write runs side by side on one page."""

import argparse

from scripts.report.compare import write_comparison


def run(arguments: argparse.Namespace) -> None:
    """Write the page of two runs or more."""
    write_comparison(arguments.results, arguments.output)
