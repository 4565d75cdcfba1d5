"""A program's command line is the signature of its function."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest

from scripts.program import arguments_of


def main(
    recipe: Annotated[Path, "the recipe"],
    splits: list[Path],
    holdout: Annotated[float, "rows, or a share", json.loads],
    after_job: int = 0,
    kind: Literal["prompts", "preferences"] = "prompts",
    allow: list[str] = (),
    store: Path | None = None,
    wait: bool = False,
) -> None:
    """Bear an option of each kind."""


REQUIRED = ["--recipe", "r.yaml", "--splits", "a", "b", "--holdout", "2"]


def test_words_become_arguments_of_the_parameters_types():
    options = ["--after-job", "7", "--kind", "preferences", "--allow", "k1", "k2", "--store", "s", "--wait"]
    told = arguments_of(main, [*REQUIRED, *options])
    assert told == {
        "recipe": Path("r.yaml"),
        "splits": [Path("a"), Path("b")],
        "holdout": 2,
        "after_job": 7,
        "kind": "preferences",
        "allow": ["k1", "k2"],
        "store": Path("s"),
        "wait": True,
    }
    assert isinstance(told["holdout"], int)


def test_options_without_a_word_have_the_parameters_defaults():
    defaults = {"after_job": 0, "kind": "prompts", "allow": (), "store": None, "wait": False}
    assert arguments_of(main, REQUIRED).items() >= defaults.items()
    assert arguments_of(main, [*REQUIRED, "--store", "--allow"]).items() >= (defaults | {"allow": []}).items()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (REQUIRED[:2], "the following arguments are required: --splits, --holdout"),
        ([*REQUIRED, "--kind", "rows"], "argument --kind: invalid choice: 'rows'"),
        ([*REQUIRED, "--after-job", "x"], "argument --after-job: invalid int value: 'x'"),
        ([*REQUIRED, "--help"], "--recipe RECIPE       the recipe"),
    ],
)
def test_mistakes_and_help_name_the_option(words, says, capsys):
    with pytest.raises(SystemExit):
        arguments_of(main, words)
    said = capsys.readouterr()
    assert says in said.out + said.err and "usage: python -m tests.unit.test_program " in said.out + said.err
