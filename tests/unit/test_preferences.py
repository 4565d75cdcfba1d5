"""Rows of preferences, which no environment rewards, are trained on by a stage of DPO."""

import pytest

from scripts.backends.nemo_rl import backend as backend_module
from scripts.backends.nemo_rl.checks.context import StageContext
from scripts.backends.nemo_rl.checks.sums import check_preferences
from scripts.backends.nemo_rl.runtime import runtime_of
from scripts.errors import UserError
from scripts.finding import Finding
from scripts.recipe.load import load_recipe, load_site
from scripts.train.preflight import check_stage
from tests.conftest import ROOT
from tests.stages import ready_stage

RECIPE = load_recipe(ROOT / "config/recipes/steps-dpo.yaml")
SITE = load_site(ROOT / "config/sites/h100.yaml", RECIPE)
PAIR = {"prompt": "Say hello.", "chosen": "Hello!", "rejected": "No."}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the preflight of stage dpo; what it would find of the site is `found`."""

    def run(found=()):
        monkeypatch.setattr(backend_module, "check_traps", lambda _: found)
        return check_stage(ready_stage(RECIPE, tmp_path, "dpo", [PAIR] * 16_000), SITE)

    return run


def test_a_stage_of_preferences_is_ready(check):
    assert check() == {
        "stage": "dpo",
        "train_rows": 16_000,
        "rows_per_step": 32,
        "max_num_steps": 500,
        "epochs": 1,
        "tokens": None,
        "rows_not_shown": "NeMo-RL tokenizes the pairs of dpo by itself",
    }


def test_what_would_stop_the_stage_stops_its_preflight_and_a_warning_is_printed(check, capsys):
    found = [Finding("no checkout", "dpo", trap=18), Finding("a slow image", "dpo", stops=False, trap=37)]
    with pytest.raises(UserError, match=r"stage dpo is not ready to train:\n  no checkout$"):
        check(found=found)
    assert capsys.readouterr().err == "warning: dpo: a slow image (docs/traps.md, trap 37)\n"


SAID = [[{"role": "assistant", "content": text}] for text in "ab"]
LISTS = {"prompt": "q", "chosen": SAID[0], "rejected": SAID[1]}
RANKED = {
    "context": [{"role": "user", "content": "q"}],
    "completions": [{"rank": rank, "completion": answer} for rank, answer in enumerate(SAID)],
}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (PAIR, None),
        (PAIR | {"prompt": RANKED["context"]}, None),
        (RANKED, "are a context with ranked completions, but data.train.dataset_name BinaryPreferenceDataset reads"),
        (LISTS, "write the rows as context and completions"),
    ],
)
def test_nemo_rl_reads_pairs_of_texts_or_ranked_completions_as_the_stage_says(row, says, tmp_path):
    stage = ready_stage(RECIPE, tmp_path, "dpo", [row] * 2)
    found = list(check_preferences(StageContext(**vars(runtime_of(RECIPE, "dpo", SITE)), stage=stage)))
    assert len(found) == (says is not None)
    assert all(says in finding.message for finding in found)
