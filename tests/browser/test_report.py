"""The report opens in a real browser, offline, and shows what it should."""

import os
import shutil
import time

import pytest

REQUIRED = bool(os.environ.get("STAGECOACH_REQUIRE_BROWSER"))
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium without a network."""
    if not (CHROMIUM and DRIVER):
        reason = "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if REQUIRED else pytest.skip)(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--window-size=1400,900", "--host-resolver-rules=MAP * ~NOTFOUND"),
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def visit(browser, *texts: str) -> None:
    """Click through the menu entries that bear these texts."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    for text in texts:
        entry = (By.XPATH, f"//*[normalize-space(text())='{text}' and not(self::script)]")
        shown = WebDriverWait(browser, 10).until(
            lambda driver, entry=entry: next((e for e in driver.find_elements(*entry) if e.is_displayed()), None)
        )
        shown.click()


def drawn(browser, name: str) -> int:
    """Width in pixels of the shown result that comes from a file; 0 when there is none after some seconds."""
    script = """
        const shown = [...document.querySelectorAll("img, iframe")].filter(e => e.src.includes("filename=" + arguments[0]));
        return shown.length && (shown[0].naturalWidth === undefined || shown[0].complete) ? shown[0].clientWidth : 0;
    """
    for _ in range(50):
        if width := browser.execute_script(script, name):
            return width
        time.sleep(0.1)
    return 0


def test_every_section_opens_with_its_figures_and_without_script_errors(browser, finished):
    from selenium.webdriver.common.by import By

    browser.get((finished.results / "report.html").as_uri())
    visit(browser, "Stages")
    text = browser.find_element(By.TAG_NAME, "body").text
    assert [text.index(stage) for stage in ("sft", "rlvr1", "rlhf")] == sorted(
        text.index(stage) for stage in ("sft", "rlvr1", "rlhf")
    )
    for section, shown in (("Stages", ["curves.svg"] * 3), ("Chain", ["environments.svg", "summary.html"])):
        browser.get((finished.results / "report.html").as_uri())
        visit(browser, section)
        for place, name in enumerate(shown):
            icons = [e for e in browser.find_elements(By.CSS_SELECTOR, "a[iconname=eye]") if e.is_displayed()]
            icons[place].click()
            assert drawn(browser, name) > 100, f"{section}: {name} is not shown"
    for icon in browser.find_elements(By.CSS_SELECTOR, "a[href]"):
        assert not icon.get_attribute("href").startswith("http://")
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


def test_the_figures_are_drawn(browser, finished):
    for figure, words in (("environments.svg", "held-out score"), ("rlvr1/curves.svg", "reward by environment")):
        browser.get((finished.results / figure).as_uri())
        assert words in browser.page_source
        box = browser.execute_script("const b = document.documentElement.getBBox(); return [b.width, b.height]")
        assert min(box) > 100
