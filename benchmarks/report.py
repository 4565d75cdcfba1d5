"""What the report costs: seconds to make, megabytes, and seconds to its first figure in Chromium.

    python benchmarks/report.py > benchmarks/report.md

Takes the finished tiny chain (`make demo`), and a chain of 100 stages and a sweep of 50 variants made of copies of its
files. The pages and the report are made anew by Snakemake on all cores; then headless Chromium, with its network cut
off, opens the report up to its sections, and a stage's page or the sweep's. Needs chromium and
chromedriver (Debian: chromium chromium-driver).
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, configure, end_for_lack_of, finished_tree, head, row, seconds_of
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from tests.conftest import Workflow

RESULTS = Path("results/measured")
RULES = ("stage_page", "pages")
SWEPT = "swept"
WANTED = (
    *("config.yaml", "preflight.json", "metrics.parquet", "eval.json", "rollouts.parquet"),
    *("gate.json", "criteria.json", "ckpt/record.json", "run/attempts.jsonl"),
)


def plant(root: Path, recipe: Path, results: Path, count: int | None, variants: int = 0) -> list[str]:
    """Fill a working tree with the chain's published files; the names of its stages, parents first.

    With a `count` the chain has so many stages: the first, and after it copies of the last, one after the other; with
    `variants` so many copies of the last, as a sweep from the first.
    """
    Workflow(root)
    configure(root, "measured", "measured")
    described, order = yaml.safe_load(recipe.read_text(encoding="utf-8")), load_recipe(recipe).graph.stage_names
    first, last = order[0], order[-1]
    kept, copied = described["stages"][first], described["stages"][last]
    if variants:
        rates = [float(f"{1e-5 * 1.2**number:.3g}") for number in range(variants // 2)]
        sweep = {"policy.optimizer.lr": rates, "seed": [1, 2]}
        described["stages"] = {first: kept, SWEPT: copied | {"parent": first, "sweep": sweep}}
    elif count is not None:
        names = [first, *(f"stage{number:03d}" for number in range(1, count))]
        parents = dict(zip(names[1:], names, strict=False))
        described["stages"] = {first: kept} | {name: copied | {"parent": parents[name]} for name in names[1:]}
    written = root / "config/recipes/measured.yaml"
    written.write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
    stages = load_recipe(written).stages
    for name, stage in stages.items():
        source = name if name in order else last
        for file in WANTED:
            _copy(results / source / file, root / RESULTS / name / file)
        if name != source:
            _rename(root / RESULTS / name, name, stage.parent)
    for path in results.glob("data/*/manifest.json"):
        _copy(path, root / RESULTS / path.relative_to(results))
    return list(stages)


def _rename(directory: Path, name: str, parent: str) -> None:
    """Let a copied stage's records speak of itself."""
    for file in ("ckpt/record.json", "eval.json", "gate.json", "criteria.json"):
        write_json(directory / file, read_json(directory / file) | {"stage": name})
    record = read_json(directory / "ckpt/record.json")
    write_json(directory / "ckpt/record.json", record | {"parents": [record["parents"][0] | {"stage": parent}]})


def _copy(source: Path, target: Path) -> None:
    if not source.exists():
        sys.exit(f"{source} is not there; run the chain first: make demo")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def make_report(root: Path, stages: list[str], swept: bool) -> tuple[float, float]:
    """Seconds that the pages took, and those that Snakemake's report over them took."""
    pages = [f"{RESULTS}/{stage}/stage.html" for stage in stages]
    pages += [f"{RESULTS}/{name}" for name in ("overview.html", "environments.html", "summary.csv")]
    pages += [f"{RESULTS}/{SWEPT}/sweep.html"] if swept else []
    common = ["snakemake", "--quiet", "all", "--cores", str(os.cpu_count()), "--allowed-rules", *RULES]
    made = seconds_of(*common, "--", *pages, cwd=root)
    return made, seconds_of(*common, "--report", "report.html", "--", *pages, cwd=root)


def open_report(report: Path, section: str) -> list[float]:
    """Return the seconds from opening the report to its sections, and from a click to a page's first figure."""
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
    chrome = webdriver.ChromeOptions()
    chrome.binary_location = shutil.which("chromium")
    for flag in flags:
        chrome.add_argument(flag)
    browser = webdriver.Chrome(options=chrome, service=Service(shutil.which("chromedriver")))

    def until(found: Callable[[webdriver.Chrome], Any]) -> Any:
        early = (ElementClickInterceptedException, StaleElementReferenceException)
        return WebDriverWait(browser, 60, 0.02, early).until(found)

    def displayed(by: str, what: str) -> list[WebElement]:
        return [found for found in browser.find_elements(by, what) if found.is_displayed()]

    def is_clicked(by: str, what: str, place: int) -> bool:
        found = displayed(by, what)
        if found:
            found[place].click()
        return bool(found)

    try:
        name = f"//*[normalize-space(text())='{section}' and not(self::script)]"
        start = time.monotonic()
        browser.get(report.as_uri())
        until(lambda _: displayed(By.XPATH, name))
        opened = time.monotonic() - start
        until(lambda _: is_clicked(By.XPATH, name, 0))
        until(lambda _: is_clicked(By.CSS_SELECTOR, "a[iconname=eye]", -1))
        start = time.monotonic()
        browser.switch_to.frame(until(lambda _: displayed(By.TAG_NAME, "iframe"))[-1])
        until(lambda _: displayed(By.CSS_SELECTOR, "svg.chart"))
        return [opened, time.monotonic() - start]
    finally:
        browser.quit()


def main() -> None:
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "config/recipes/tiny.yaml")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="of the finished chain")
    parser.add_argument("--stages", type=int, default=100, help="of the chain made of copies (default 100)")
    parser.add_argument("--variants", type=int, default=50, help="of the sweep made of copies (default 50)")
    arguments = parser.parse_args()
    if arguments.smoke:
        if not (shutil.which("chromium") and shutil.which("chromedriver")):
            end_for_lack_of("chromium and chromedriver (Debian: chromium chromium-driver)")
        with tempfile.TemporaryDirectory() as directory:
            tree = finished_tree(Path(directory))
            measure(tree.root / "config/recipes/recorded.yaml", tree.results, None, 0)
        return
    print("What the report costs. Made by `python benchmarks/report.py`, 2 CPU cores.\n")
    print(head("chain", "pages", "report", "size", "sections shown", "a stage's, or the sweep's page shown"))
    for count, variants in ((None, 0), (arguments.stages, 0), (None, arguments.variants)):
        measure(arguments.recipe, arguments.results, count, variants)


def measure(recipe: Path, results: Path, count: int | None, variants: int) -> None:
    """Print the row of a chain, of so many copies of a stage, or of a sweep of so many variants."""
    with tempfile.TemporaryDirectory(prefix="report-") as directory:
        root = Path(directory)
        stages = plant(root, recipe, results, count, variants)
        made = [f"{seconds:.1f} s" for seconds in make_report(root, stages, bool(variants))]
        size = f"{(root / 'report.html').stat().st_size / 1e6:.1f} MB"
        shown = [
            f"{seconds:.2f} s" for seconds in open_report(root / "report.html", "Sweeps" if variants else "Stages")
        ]
    what = f"sweep of {variants} variants" if variants else f"{len(stages)} stages"
    print(row(what, *made, size, *shown), flush=True)


if __name__ == "__main__":
    main()
