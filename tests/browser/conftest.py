"""A real browser for the tests of pages."""

import os
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
REQUIRED = bool(os.environ.get("STAGECOACH_REQUIRE_BROWSER"))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    """Where the browser saves files."""
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads):
    """Headless Chromium without a network."""
    if not (CHROMIUM and DRIVER):
        reason = "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if REQUIRED else pytest.skip)(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--window-size=1400,900", "--host-resolver-rules=MAP * ~NOTFOUND"),
    ):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()
