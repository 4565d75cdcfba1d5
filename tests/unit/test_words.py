"""Docstrings, messages and pages name the noun: their share of pro-words stays within the limit of CONTRIBUTING.md."""

import pytest

from tests.words import LIMIT, ROOT, docstrings, long_sentences, messages, modules, pages, prose, share


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_stays_within_the_limit(page):
    assert share([prose(page)]) <= LIMIT
    assert long_sentences(page) == []


def test_sentences_items_and_cells_are_counted_by_themselves(tmp_path):
    page, short = tmp_path / "page.md", "A sentence of five words. "
    page.write_text(
        f"# Head\n\n{short * 9}\n\n- {'item ' * 25}\n- {'item ' * 25}\n\n| {'cell ' * 20} | {'cell ' * 20} |\n"
    )
    assert long_sentences(page) == []
    page.write_text(f"{short}And one {'of very many words ' * 8} ends.")
    assert [sentence[:7] for sentence in long_sentences(page)] == ["And one"]


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
