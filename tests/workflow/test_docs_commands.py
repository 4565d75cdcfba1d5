"""What the tutorial and the how-tos tell a reader to type works; what takes minutes is in benchmarks/docs.md."""

import pytest

from tests.docs_commands import PAGES, run_page
from tests.pretrained import save_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model that a reader of the pages has."""
    folder = tmp_path_factory.mktemp("model")
    save_pretrained("qwen3", folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_run_and_print_what_it_shows(page, tmp_path, model):
    assert [block.line for block, _ in run_page(page, tmp_path, model)]
