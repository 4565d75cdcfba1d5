"""What the report costs: seconds to make, megabytes, and seconds to its first figure in Chromium.

    python benchmarks/report.py > benchmarks/report.md

Takes the finished tiny chain (`make demo`), and a chain of 100 stages and a sweep of 50 variants made of copies of its
files. The pages and the report are made anew by Snakemake on all cores; then headless Chromium, with its network cut
off, opens the report and shows its first screen, the overview, and a stage's page or the sweep's. Needs chromium and
chromedriver (Debian: chromium chromium-driver).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.files import read_json, write_json  # noqa: E402
from scripts.recipe.load import load_recipe  # noqa: E402

RESULTS = Path("results/measured")
RULES = ("stage_page", "sweep_page", "environments", "overview", "summary")
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
    for part in ("Snakefile", "rules", "scripts", "config", "envs", "profiles", "docs"):
        subprocess.run(["cp", "-r", ROOT / part, root], check=True)
    (root / "config/config.yaml").write_text(
        "recipe: config/recipes/measured.yaml\nsite: config/sites/laptop.yaml\nrun: measured\n"
    )
    described, order = yaml.safe_load(recipe.read_text(encoding="utf-8")), load_recipe(recipe).stage_order()
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
    seconds = []
    for command in ([*common, "--", *pages], [*common, "--report", "report.html", "--", *pages]):
        start = time.monotonic()
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - start)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
    return seconds[0], seconds[1]


def open_report(report: Path, swept: bool) -> list[float]:
    """Seconds from opening the report to its first screen's stages, and from a click to a page's first curve."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        start = time.monotonic()
        browser.get(report.as_uri())
        seconds = [_shown(browser, "overview.html", ".chain a") - start]
        browser.switch_to.default_content()
        _click(browser, "Sweeps" if swept else "Stages")
        start = time.monotonic()
        icons = [it for it in browser.find_elements(By.CSS_SELECTOR, "a[iconname=eye]") if it.is_displayed()]
        icons[-1].click()
        return [*seconds, _shown(browser, "sweep.html" if swept else "stage.html", "svg.chart") - start]
    finally:
        browser.quit()


def _shown(browser: webdriver.Chrome, page: str, figure: str) -> float:
    """When an embedded page has drawn a figure."""

    def frames(driver: webdriver.Chrome) -> list:
        found = driver.find_elements(By.TAG_NAME, "iframe")
        return [frame for frame in found if f"filename={page}" in frame.get_attribute("src")[:200]]

    browser.switch_to.frame(WebDriverWait(browser, 60, 0.02).until(frames)[0])
    WebDriverWait(browser, 60, 0.02).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, figure))
    return time.monotonic()


def _click(browser: webdriver.Chrome, text: str) -> None:
    path = f"//*[normalize-space(text())='{text}' and not(self::script)]"
    shown = WebDriverWait(browser, 60, 0.02).until(
        lambda driver: next((it for it in driver.find_elements(By.XPATH, path) if it.is_displayed()), None)
    )
    shown.click()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "config/recipes/tiny.yaml")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="of the finished chain")
    parser.add_argument("--stages", type=int, default=100, help="of the chain made of copies (default 100)")
    parser.add_argument("--variants", type=int, default=50, help="of the sweep made of copies (default 50)")
    arguments = parser.parse_args()
    print("What the report costs. Made by `python benchmarks/report.py`, 2 CPU cores.\n")
    print("| chain | pages | report | size | first screen shown | a stage's, or the sweep's page shown |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count, variants in ((None, 0), (arguments.stages, 0), (None, arguments.variants)):
        with tempfile.TemporaryDirectory(prefix="report-") as directory:
            root = Path(directory)
            stages = plant(root, arguments.recipe, arguments.results, count, variants)
            made = [f"{seconds:.1f} s" for seconds in make_report(root, stages, bool(variants))]
            size = f"{(root / 'report.html').stat().st_size / 1e6:.1f} MB"
            shown = [f"{seconds:.2f} s" for seconds in open_report(root / "report.html", bool(variants))]
            what = f"sweep of {variants} variants" if variants else f"{len(stages)} stages"
            print(f"| {what} | {' | '.join([*made, size, *shown])} |", flush=True)


if __name__ == "__main__":
    main()
