"""Write runs side by side on one page."""

import argparse

from scripts.drawing.chart import COLOURS
from scripts.errors import UserError
from scripts.report.compare import compare, trained_stages
from scripts.report.page import write_page


def run(arguments: argparse.Namespace) -> None:
    """Write the page of two runs or more."""
    names = [path.resolve().name for path in arguments.results]
    if len(set(names)) < len(names):
        names = [str(path) for path in arguments.results]
    if not 2 <= len(set(names)) == len(names) <= len(COLOURS):
        raise UserError(f"two to {len(COLOURS)} different folders can be compared, not {', '.join(names)}")
    runs = {name: trained_stages(path) for name, path in zip(names, arguments.results, strict=True)}
    write_page(arguments.output, "compare.html", runs=names, comparisons=compare(runs))
