"""The site of docs/, as `make docs` builds it, opens from a folder without a network, and its search answers there."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from tests.conftest import ROOT
from tests.programs import until

SITE = ROOT / "build/site"
SEARCH = "const host = [...document.querySelectorAll('div')].find(each => each.shadowRoot); return host && "
ASKED = "return [...document.querySelectorAll('[src], link[href]')].map(each => each.src || each.href)"


@pytest.fixture
def opened(browser):
    """A page of the site by its name, once its script has run."""
    if not SITE.is_dir():
        pytest.skip("no site is built: make docs")

    def page(name: str) -> None:
        browser.get((SITE / name).as_uri())
        until(lambda: "js" in browser.execute_script("return document.documentElement.className"))

    return page


@pytest.mark.parametrize("page", ["index.html", "howto/data.html", "reference/recipe.html"])
def test_a_page_asks_no_other_host_and_reports_no_error(browser, opened, page):
    opened(page)
    assert {url.partition(":")[0] for url in browser.execute_script(ASKED)} <= {"file", "data"}
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("wish", ["reward model", "GGUF", "rejection sampling", "Kubernetes"])
def test_a_wish_is_found_from_a_folder(browser, opened, wish):
    opened("howto/data.html")
    browser.find_element("css selector", ".md-search__button").click()
    until(lambda: "Filters" in (browser.execute_script(f"{SEARCH} host.shadowRoot.textContent") or ""))
    ActionChains(browser).send_keys(wish).perform()
    until(lambda: "I want to" in browser.execute_script(f"{SEARCH} host.shadowRoot.textContent"))
