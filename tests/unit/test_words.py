"""Docstrings, messages and pages name the noun: their share of pro-words stays within the limit of CONTRIBUTING.md."""

import pytest

from tests.words import LIMIT, ROOT, docstrings, messages, modules, pages, prose, share


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_stays_within_the_limit(page):
    assert share([prose(page)]) <= LIMIT


@pytest.mark.parametrize("texts", [docstrings, messages])
def test_the_code_stays_within_the_limit(texts):
    assert share([text for module in modules() for text in texts(module)]) <= LIMIT


def test_pro_words_are_counted_in_prose_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Name `that one` [in full](which/it.md), not it.\n<!-- those -->\n```\nwhat each\n```\n")
    assert share([prose(page)]) == pytest.approx(100 / 5)
    module = tmp_path / "module.py"
    module.write_text('"""It counts."""\n\nraise UserError(f"{path}: which one?")\n')
    assert list(docstrings(module)) == ["It counts."]
    assert [text.split() for text in messages(module)] == [[":", "which", "one?"]]


def test_a_page_above_the_limit_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("The stage is what it is by those that it starts from, each by its own.")
    assert share([prose(page)]) > LIMIT
