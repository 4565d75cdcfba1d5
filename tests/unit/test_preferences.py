"""Rows of preferences, which no environment rewards: split as they are, and refused where nothing is preferred."""

import json

import pytest
from scripts.data.split import split_blend

from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import resolve_stage
from scripts.train import preflight
from scripts.train.nemo_rl_checks import Finding
from tests.conftest import ROOT

RECIPE = load_recipe(ROOT / "config/recipes/steps-dpo.yaml")
SITE = load_site(ROOT / "config/sites/h100.yaml", RECIPE)
PAIR = {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}
RANKED = {
    "context": [{"role": "user", "content": "Say hello."}],
    "completions": [
        {"rank": 0, "completion": [{"role": "assistant", "content": "Hello!"}]},
        {"rank": 1, "completion": [{"role": "assistant", "content": "No."}]},
    ],
}
BETTER, WORSE = RANKED["completions"]
INCOMPLETE = "a preference needs a context and two completions, each with a rank and a completion"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the preflight of stage dpo on these rows; what it would find of the site is `found`."""

    def run(*rows, found=()):
        monkeypatch.setattr(preflight, "findings", lambda *_: list(found))
        folder = tmp_path / "results/data/dpo"
        folder.mkdir(parents=True)
        many = [*rows, *[PAIR] * (16_000 - len(rows))]
        for name, part in (("train-split.jsonl", many), ("val-split.jsonl", [PAIR])):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        write_json(folder / "manifest.json", {"train": {"rows": len(many)}})
        run_directory = tmp_path / "results/dpo/run"
        config = resolve_stage(RECIPE, "dpo")
        return preflight.check_stage(RECIPE, "dpo", config, folder / "manifest.json", run_directory, None, None, SITE)

    return run


def test_both_forms_of_a_preference_are_accepted(check):
    assert check(PAIR, RANKED) == {
        "stage": "dpo",
        "train_rows": 16_000,
        "rows_per_step": 32,
        "max_num_steps": 500,
        "epochs": 1,
    }


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "p", "chosen": "c"}, "rejected is missing or empty"),
        (PAIR | {"chosen": ""}, "chosen is missing or empty"),
        ({}, "prompt is missing or empty"),
        (RANKED | {"context": []}, INCOMPLETE),
        (RANKED | {"completions": [BETTER]}, INCOMPLETE),
        (RANKED | {"completions": [BETTER, WORSE, WORSE]}, INCOMPLETE),
        (RANKED | {"completions": ["yes", "no"]}, INCOMPLETE),
        (RANKED | {"completions": [BETTER, {"rank": 1}]}, INCOMPLETE),
        (
            RANKED | {"completions": [BETTER, WORSE | {"rank": 0}]},
            "the two completions need ranks that differ, not 0 and 0; the lower is the better",
        ),
        (
            RANKED | {"completions": [BETTER, WORSE | {"rank": None}]},
            "the two completions need ranks that differ, not 0 and None; the lower is the better",
        ),
    ],
)
def test_a_row_in_which_nothing_is_preferred_is_named(check, row, why):
    with pytest.raises(UserError) as error:
        check(PAIR, row)
    assert str(error.value).endswith(f"train-split.jsonl:2: {why}")


def test_what_would_stop_the_stage_stops_its_preflight_and_a_warning_is_printed(check, capsys):
    found = [Finding("dpo", 18, "no checkout"), Finding("dpo", 37, "a slow image", stops=False)]
    with pytest.raises(UserError, match=r"stage dpo is not ready to train:\n  no checkout$"):
        check(found=found)
    assert capsys.readouterr().err == "warning: dpo: a slow image (trap 37)\n"


def test_a_message_that_is_none_is_no_demonstration():
    assert preflight._check_demonstration({"messages": ["q", "a"]}) is not None
    assert preflight._check_demonstration({"messages": [{"role": "user"}, {"role": "assistant"}]}) is None


def test_rows_without_an_environment_are_split_where_nothing_rewards_them(tmp_path):
    filled, places = tmp_path / "filled.jsonl", (tmp_path / "train.jsonl", tmp_path / "val.jsonl")
    filled.write_text((json.dumps(PAIR) + "\n") * 5)
    described = split_blend(filled, 2, *places, is_rewarded=False)
    assert {name: (it["rows"], it["environments"]) for name, it in described.items()} == {
        "train": (3, {}),
        "validation": (2, {}),
    }
    with pytest.raises(UserError, match=r"filled.jsonl:1: no agent_ref.name"):
        split_blend(filled, 2, *places)
