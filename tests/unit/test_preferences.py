"""Rows of preferences, which no environment rewards, are trained on by a stage of DPO."""

import json

import pytest

from scripts.backends.nemo_rl.checks import Finding
from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import resolve_stage
from scripts.train import preflight
from tests.conftest import ROOT

RECIPE = load_recipe(ROOT / "config/recipes/steps-dpo.yaml")
SITE = load_site(ROOT / "config/sites/h100.yaml", RECIPE)
PAIR = {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the preflight of stage dpo; what it would find of the site is `found`."""

    def run(found=()):
        monkeypatch.setattr(preflight, "findings", lambda *_: list(found))
        folder = tmp_path / "results/data/dpo"
        folder.mkdir(parents=True)
        (folder / "train-split.jsonl").write_text((json.dumps(PAIR) + "\n") * 16_000)
        write_json(folder / "manifest.json", {"train": {"rows": 16_000}, "validation": {"rows": 1}})
        run_directory = tmp_path / "results/dpo/run"
        config = resolve_stage(RECIPE, "dpo")
        return preflight.check_stage(RECIPE, "dpo", config, folder / "manifest.json", run_directory, None, None, SITE)

    return run


def test_a_stage_of_preferences_is_ready(check):
    assert check() == {
        "stage": "dpo",
        "train_rows": 16_000,
        "rows_per_step": 32,
        "max_num_steps": 500,
        "epochs": 1,
        "tokens": None,
    }


def test_what_would_stop_the_stage_stops_its_preflight_and_a_warning_is_printed(check, capsys):
    found = [Finding("dpo", 18, "no checkout"), Finding("dpo", 37, "a slow image", stops=False)]
    with pytest.raises(UserError, match=r"stage dpo is not ready to train:\n  no checkout$"):
        check(found=found)
    assert capsys.readouterr().err == "warning: dpo: a slow image (trap 37)\n"
