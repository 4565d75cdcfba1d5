"""The report and its pages open in a real browser, offline, and show what they should."""

import csv
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from scripts.files import read_json
from scripts.report.compare import write_comparison
from scripts.report.overview import Lineage, write_overview
from scripts.report.pages import write_environments_page, write_sweep_page
from scripts.report.stage_page import main as write_stage_page
from tests.programs import until
from tests.report_files import rollout, write_manifest, write_rollouts, write_stage

PAGES = ("overview.html", "environments.html", "rlvr1/stage.html", "swept/sweep.html", "compare.html")


def visit(browser, *texts: str) -> None:
    """Click through the menu entries that bear these texts."""
    for text in texts:
        entry = (By.XPATH, f"//*[normalize-space(text())='{text}' and not(self::script)]")
        shown = WebDriverWait(browser, 10).until(
            lambda driver, entry=entry: next((e for e in driver.find_elements(*entry) if e.is_displayed()), None)
        )
        shown.click()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of a run of 100 stages, a chain with a branch, made of files written by hand."""
    results = tmp_path_factory.mktemp("pages")
    names = [f"rlvr{number}" for number in range(1, 100)]
    parents = {"sft": "", **dict(zip(names, ["sft", *names[:-1]], strict=True)), "rlvr50": "rlvr20"}
    for name, parent in parents.items():
        write_stage(results, name, parent or None)
    evil = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    rows = [rollout(line, prompt=f"prompt {line}", response_after=f"={line}+1") for line in range(3)]
    rows.append(rollout(3, before=1.0, after=0.0, prompt=evil, response_before=evil))
    pq.write_table(pa.Table.from_pylist(rows), results / "rlvr1/rollouts.parquet")
    write_stage_page(results / "rlvr1", write_manifest(results), results / "rlvr1/stage.html")
    variants = {f"swept.lr-{rate}.seed-{seed}": {"lr": rate, "seed": seed} for rate in range(1, 26) for seed in (1, 2)}
    for name in variants:
        write_stage(results, name, "sft")
    write_sweep_page(results, "swept", variants, [], results / "swept/sweep.html")
    write_stage(results.with_name("other"), "rlvr1", lr=0.5, kl=evil)
    write_comparison([results, results.with_name("other")], results / "compare.html")
    write_overview(results, Lineage(parents), results / "overview.html")
    write_environments_page(
        [read_json(results / name / "eval.json") for name in parents], results / "environments.html"
    )
    return results


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The overview of three stages, with the page of the second."""
    results = tmp_path_factory.mktemp("few")
    for name, parent in (("sft", None), ("rlvr1", "sft"), ("rlhf", "rlvr1")):
        rows = [rollout(line, after=float(line % 3 > 0), prompt=f"{line} + {line}?") for line in range(40)]
        write_rollouts(write_stage(results, name, parent), rows)
    write_stage_page(results / "rlvr1", write_manifest(results), results / "rlvr1/stage.html")
    write_overview(results, Lineage({"sft": "", "rlvr1": "sft", "rlhf": "rlvr1"}), results / "overview.html")
    return results / "overview.html"


def severe(browser) -> list[str]:
    """What went wrong on the pages since the last call, by the browser's own log."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def saved(downloads: Path, name: str) -> list[list[str]]:
    """The rows of a CSV file once the browser has saved it."""
    until((downloads / name).exists, 10)
    with (downloads / name).open(newline="") as file:
        return list(csv.reader(file))


def open_page(browser, report: str, section: str, place: int, count: int, name: str) -> None:
    """Open one of the `count` pages of a section of the report, once all are listed; a click may come too early."""

    def is_opened(driver) -> bool:
        icons = [e for e in driver.find_elements(By.CSS_SELECTOR, "a[iconname=eye]") if e.is_displayed()]
        if len(icons) == count:
            icons[place].click()
        frames = driver.find_elements(By.TAG_NAME, "iframe")
        return len(icons) == count and any(f"filename={name}" in frame.get_attribute("src")[:200] for frame in frames)

    browser.switch_to.default_content()
    browser.get(report)
    visit(browser, section)
    early = [ElementClickInterceptedException, StaleElementReferenceException]
    wait = WebDriverWait(browser, 60, poll_frequency=2, ignored_exceptions=early)
    wait.until(is_opened)


def shown_frame(browser, name: str):
    """Enter the frame that shows an embedded page, once its script has run."""
    browser.switch_to.default_content()
    found = WebDriverWait(browser, 20).until(
        lambda driver: [
            frame for frame in driver.find_elements(By.TAG_NAME, "iframe") if name in frame.get_attribute("src")[:200]
        ]
    )
    browser.switch_to.frame(found[0])
    WebDriverWait(browser, 20).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "html.embedded main"))


def test_every_section_opens_with_its_pages_and_without_script_errors(browser, finished):
    report = (finished.results / "report.html").as_uri()
    browser.get(report)  # which opens on the graph of the rules
    visit(browser, "Statistics")
    visit(browser, "Workflow")
    visit(browser, "Stages")
    text = browser.find_element(By.TAG_NAME, "body").text
    places = [text.index(stage) for stage in ("sft", "rlvr1", "rlhf")]
    assert places == sorted(places)
    for section, shown in (("Stages", ["stage.html"] * 3), ("Chain", ["environments.html", "overview.html"])):
        for place, name in enumerate(shown):
            open_page(browser, report, section, place, len(shown), name)
            shown_frame(browser, f"filename={name}")
            figures = browser.find_elements(By.CSS_SELECTOR, "svg.chart, svg.trend, .heat tbody td")
            assert figures and all(figure.size["width"] > 30 for figure in figures), (
                f"{section}: {name} shows no figure"
            )
    assert severe(browser) == []


def test_an_embedded_page_says_whether_the_model_got_better_follows_its_own_links_and_saves_csv(
    browser, finished, downloads
):
    open_page(browser, (finished.results / "report.html").as_uri(), "Chain", 1, 2, "overview.html")
    shown_frame(browser, "filename=overview.html")
    assert browser.find_element(By.CSS_SELECTOR, ".verdict").text in ("Better", "Worse", "No clear change")
    browser.find_element(By.CSS_SELECTOR, ".chain a[href='#stage-rlhf']").click()
    assert browser.execute_script("return document.querySelector(':target').id") == "stage-rlhf"
    assert "number 3" in browser.find_element(By.CSS_SELECTOR, "#stage-rlhf .embedded-only").text
    assert not browser.find_element(By.CSS_SELECTOR, "#stage-rlhf a.apart").is_displayed()
    browser.find_element(By.CSS_SELECTOR, "#summary button").click()
    assert [row[0] for row in saved(downloads, "summary.csv")] == ["stage", "sft", "rlvr1", "rlhf"]
    browser.switch_to.default_content()
    assert severe(browser) == []


def test_the_keyboard_reaches_a_stage_and_chooses_rollouts(browser, pages):
    def press(*keys: str) -> None:
        ActionChains(browser).send_keys(*keys).perform()

    browser.get((pages / "overview.html").as_uri())
    press(Keys.TAB, Keys.ENTER, Keys.TAB)  # past the skip link to the page's first link
    assert browser.execute_script("return document.activeElement.textContent") == "sft"  # whose gate warns
    for _ in range(30):
        press(Keys.TAB)
        if browser.execute_script("return document.activeElement.getAttribute('href')") == "#stage-rlvr1":
            break
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    press(Keys.ENTER)
    assert browser.execute_script("return document.querySelector(':target').id") == "stage-rlvr1"
    press(Keys.TAB, Keys.ENTER)  # the stage's part has the focus now; its next link leads to its page
    assert browser.title == "Stage rlvr1"
    browser.execute_script("document.querySelector('#rollouts input').focus()")
    press("prompt 2", Keys.TAB)
    shown = [item.text for item in browser.find_elements(By.CSS_SELECTOR, ".rollout") if item.is_displayed()]
    assert len(shown) == 1 and "prompt 2" in shown[0] and "=2+1" in shown[0]
    press(Keys.TAB, "reward fell")  # the list of kinds
    assert browser.find_element(By.CSS_SELECTOR, "#rollouts output").text.startswith("0 of ")
    assert severe(browser) == []


def test_what_a_response_says_is_shown_and_never_run_and_a_filter_hides_what_lacks_a_word(browser, pages):
    browser.get((pages / "rlvr1/stage.html").as_uri())
    assert browser.title == "Stage rlvr1"
    assert "<script>document.title" in browser.find_element(By.ID, "rollouts").text
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert severe(browser) == []
    browser.find_element(By.CSS_SELECTOR, "#curves input").send_keys("truncated")
    shown = [
        figure.find_element(By.TAG_NAME, "h3").text
        for figure in browser.find_elements(By.TAG_NAME, "figure")
        if figure.is_displayed()
    ]
    assert shown == ["Truncated responses"]
    assert browser.find_element(By.CSS_SELECTOR, "#curves output").text.startswith("1 of ")


@pytest.mark.parametrize("width", [420, 1366])
@pytest.mark.parametrize("page", PAGES)
def test_a_window_of_a_phone_or_a_laptop_needs_no_sideways_scrolling(browser, pages, page, width):
    browser.set_window_size(width, 800)
    try:
        browser.get((pages / page).as_uri())
        assert browser.execute_script("return window.innerWidth") <= max(520, width)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        browser.set_window_size(1400, 900)
    assert severe(browser) == []


def test_the_first_screen_has_verdict_score_cost_stages_and_the_worst_and_the_best_example(browser, few):
    browser.set_window_size(1366, 900)
    try:
        browser.get(few.as_uri())
        script = "return [...document.querySelectorAll('.first h2')].map(h => [h.textContent, h.getBoundingClientRect().bottom])"
        found = dict(browser.execute_script(script))
        heads = ("Verdict", "Mean held-out", "Cost", "To look at next", "Stages", "Worst example", "Best example")
        for head in heads:
            assert [bottom for text, bottom in found.items() if text.startswith(head) and bottom < 768], head
        assert browser.find_element(By.CSS_SELECTOR, ".chain b").text == "+0.25 ▲"
    finally:
        browser.set_window_size(1400, 900)
    assert severe(browser) == []


def test_a_chart_shows_the_values_nearest_to_the_pointer(browser, pages):
    browser.get((pages / "rlvr1/stage.html").as_uri())
    chart = browser.find_element(By.CSS_SELECTOR, "svg.chart")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element_with_offset(chart, chart.size["width"] // 2 - 15, 0).perform()
    tip = browser.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.is_displayed() and tip.text.endswith("step 10: 1")
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h2")).perform()
    assert not tip.is_displayed()


def test_lines_are_brighter_on_a_dark_page(browser, pages):
    def look() -> tuple[str, str]:
        browser.get((pages / "rlvr1/stage.html").as_uri())
        script = "return ['body', 'polyline'].map(name => getComputedStyle(document.querySelector(name)))"
        return tuple(
            browser.execute_script(f"const [a, b] = (() => {{ {script} }})(); return [a.backgroundColor, b.stroke]")
        )

    light = look()
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        assert light == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
        assert look() == ("rgb(20, 23, 26)", "rgb(92, 184, 255)")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_filter_unfolds_the_rollouts_of_a_stage(browser, few):
    browser.get(few.with_name("rlvr1").joinpath("stage.html").as_uri())
    shown = lambda: sum(item.is_displayed() for item in browser.find_elements(By.CSS_SELECTOR, ".rollout"))  # noqa: E731
    assert shown() == 6
    browser.find_element(By.CSS_SELECTOR, "#rollouts input").send_keys("validation")
    assert shown() > 6


@pytest.mark.parametrize("page", [page for page in PAGES if page != "environments.html"])  # a column a stage, 100 here
def test_a_printed_page_loses_no_column(browser, pages, page):
    browser.get((pages / page).as_uri())
    width = (29.7 - 2 * 1.2) / 2.54 * 96
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": int(width), "height": 700, "deviceScaleFactor": 1, "mobile": False},
    )
    try:
        script = (
            "return [...document.querySelectorAll('table, svg, pre')].map(part => part.getBoundingClientRect().right)"
        )
        assert max(browser.execute_script(script)) <= width + 1
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_keyboard_scrolls_a_sweeps_table_with_the_variants_in_view(browser, pages):
    browser.set_window_size(420, 800)
    try:
        browser.get((pages / "swept/sweep.html").as_uri())
        region = browser.find_element(By.CSS_SELECTOR, "#variants .scroll")
        for _ in range(6):
            ActionChains(browser).send_keys(Keys.TAB).perform()
            if browser.switch_to.active_element == region:
                break
        ActionChains(browser).send_keys(*[Keys.ARROW_RIGHT] * 5).pause(0.5).perform()
        assert browser.execute_script("return arguments[0].scrollLeft", region) > 50
        first = browser.find_element(By.CSS_SELECTOR, "#variants tbody th")
        assert browser.execute_script("return arguments[0].getBoundingClientRect().left", first) >= 0
    finally:
        browser.set_window_size(1400, 900)


def test_a_hundred_stages_are_found_by_filter_and_link(browser, pages):
    start = time.monotonic()
    browser.get((pages / "overview.html").as_uri())
    assert len(browser.find_elements(By.CSS_SELECTOR, ".chain a")) == 100
    browser.find_element(By.CSS_SELECTOR, "#summary input").send_keys("rlvr77")
    rows = [row for row in browser.find_elements(By.CSS_SELECTOR, "#summary tbody tr") if row.is_displayed()]
    assert [row.find_element(By.TAG_NAME, "th").text for row in rows] == ["rlvr77", "rlvr78"]  # and its child
    rows[0].find_element(By.TAG_NAME, "a").click()
    assert browser.execute_script("return document.querySelector(':target').getBoundingClientRect().top") < 900
    assert time.monotonic() - start < 60
    assert severe(browser) == []


def test_every_figure_has_words_and_every_table_its_heads(browser, pages):
    for page in PAGES:
        browser.get((pages / page).as_uri())
        script = """
            const bare = [...document.querySelectorAll("svg")].filter(svg => !svg.getAttribute("aria-label"));
            const headless = [...document.querySelectorAll("table")].filter(table => !table.caption || !table.querySelector("th[scope]"));
            const mute = [...document.querySelectorAll("figure")].filter(figure => !figure.querySelector("figcaption"));
            return [bare.length, headless.length, mute.length];
        """
        assert browser.execute_script(script) == [0, 0, 0], page
