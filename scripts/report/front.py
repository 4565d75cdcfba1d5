"""Let Snakemake's report open on the overview of the run instead of on the graph of the rules."""

import argparse
import sys
from pathlib import Path

from scripts.errors import run_program
from scripts.files import write_text

STARTED = "root.render(e(App));"
OPENED = """
class OnOverview extends App {
  constructor(props) {
    super(props);
    const path = Object.keys(results).find(name => name.endsWith("/overview.html"));
    if (path) Object.assign(this.state, {
      content: "html", contentPath: results[path].data_uri, resultPath: path, hideNavbar: innerWidth < 700
    });
  }
}
root.render(e(OnOverview));
"""


def open_on_overview(report: Path) -> None:
    """Give a report that Snakemake wrote another first view than the graph of its jobs, which takes seconds to draw.

    A report of another form stays as it is, which is said.
    """
    text = report.read_text(encoding="utf-8")
    if text.count(STARTED) != 1:
        print(f"warning: {report}: not as Snakemake's reports are known, so it opens on its rules", file=sys.stderr)
        return
    write_text(report, text.replace(STARTED, OPENED))


def main() -> None:
    """Command line: the report."""
    parser = argparse.ArgumentParser(prog="python -m scripts.report.front", description=__doc__)
    parser.add_argument("report", type=Path, help="report.html, to be changed")
    open_on_overview(parser.parse_args().report)


if __name__ == "__main__":
    run_program(main)
