"""What sweeps, choices and checkpoints make of a recipe when it is read."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.load import check_stage_name, load_recipe, load_site
from scripts.recipe.resolve import resolve_stage, sync_configs
from scripts.stage.paths import StagePaths
from scripts.stage.stage import Stage
from tests.cases import cases
from tests.conftest import ROOT

SHORT = ROOT / "tests/short.yaml"
LR = "policy.optimizer.lr"


@pytest.fixture
def load(tmp_path):
    """A short recipe with settings of its stage rlvr1, and with further stages."""

    def load(rlvr1: dict | None = None, start: str | None = None, **stages):
        data = yaml.safe_load(SHORT.read_text())
        grpo = {key: value for key, value in data["stages"]["rlvr1"].items() if key != "parent"}
        period = {"checkpointing": {"save_period": 2}, "grpo": {"max_num_steps": 6}}
        data["stages"] = {"sft": data["stages"]["sft"], "rlvr1": grpo | {"parent": "sft"} | period | (rlvr1 or {})}
        data["stages"] |= {name: grpo | period | stage for name, stage in stages.items()}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return load_recipe(path, start=start)

    return load


def test_a_grid_makes_a_stage_of_each_point_which_is_what_somebody_would_have_written_by_hand(load):
    swept = load({"sweep": {LR: [1e-6, 3e-6], "seed": [1, 2]}})
    names = [f"rlvr1.lr-{rate}.seed-{seed}" for rate in ("1e-06", "3e-06") for seed in (1, 2)]
    assert swept.graph.stage_names == ["sft", *names] and list(swept.sweeps["rlvr1"]) == names
    by_hand = load({"seed": 2, "policy": {"optimizer": {"lr": 3e-6}}})
    assert resolve_stage(swept, names[-1]) == resolve_stage(by_hand, "rlvr1"), "so both have one identity"
    assert resolve_stage(swept, "sft") == resolve_stage(by_hand, "sft")


def test_points_may_be_listed_and_keys_that_end_alike_are_told_apart(load):
    recipe = load({"sweep": [{"policy.generation.max_new_tokens": 8}, {"seed": 3, "grpo.num_prompts_per_step": 4}]})
    assert recipe.graph.stage_names[1:] == ["rlvr1.max_new_tokens-8", "rlvr1.seed-3.num_prompts_per_step-4"]
    gates = load({"sweep": {"gate": [[], [{"metric": "max_kl", "max": 1}]]}}).graph.stage_names[1:]
    assert len({*gates}) == 2 and all(len(name) == len("rlvr1.gate-") + 6 for name in gates)


def test_children_start_from_one_variant_from_each_or_from_the_best(load):
    swept = {"sweep": {"seed": [1, 2]}}
    recipe = load(
        swept,
        one={"parent": "rlvr1.seed-1"},
        each={"parent": {"stage": "rlvr1", "each": True}},
        best={"parent": {"stage": "rlvr1", "best": "held_out_mean"}},
    )
    assert recipe.stages["one"].parent == "rlvr1.seed-1"
    assert [recipe.stages[f"each.seed-{seed}"].parent for seed in (1, 2)] == ["rlvr1.seed-1", "rlvr1.seed-2"]
    choice = recipe.stages["best"].parent
    assert choice == "rlvr1.best-held_out_mean" and recipe.choices[choice].among == ["rlvr1.seed-1", "rlvr1.seed-2"]
    order = recipe.graph.stage_names
    assert order.index("best") > order.index("rlvr1.seed-2"), "parents come first"
    assert recipe.graph[choice].settings == recipe.stages["rlvr1.seed-1"]


@pytest.mark.parametrize(
    ("checkpoint", "among"),
    [
        (2, ["rlvr1.step-2"]),
        ([2, 4], ["rlvr1.step-2", "rlvr1.step-4"]),
    ],
)
def test_a_child_starts_from_a_step_or_from_the_best_of_several(load, checkpoint, among):
    recipe = load(rlvr2={"parent": {"stage": "rlvr1", "checkpoint": checkpoint}})
    parent = recipe.stages["rlvr2"].parent
    assert (recipe.choices[parent].among if len(among) > 1 else [parent]) == among
    steps = [recipe.checkpoints[name].step for name in among if name in recipe.checkpoints]
    assert recipe.stages["rlvr1"].checkpointing.keep_steps == steps, "they are kept until they are scored"
    assert {recipe.graph[name].stage for name in among} == {"rlvr1"}


def test_a_swept_stage_may_be_the_start(load):
    recipe = load({"sweep": {"seed": [1, 2]}}, start="rlvr1", rlvr2={"parent": {"stage": "rlvr1", "each": True}})
    assert recipe.left_out == ("sft",)
    assert [stage.parent for stage in recipe.stages.values()] == [None, None, "rlvr1.seed-1", "rlvr1.seed-2"]


SWEPT = {"sweep": {"seed": [1, 2]}}


@cases("sweep.mistakes", "rlvr1", "child", "says")
def test_a_mistake_is_one_line_with_its_place(load, rlvr1, child, says):
    with pytest.raises(UserError) as caught:
        load(rlvr1, **({"child": {"parent": child}} if child else {}))
    path, line, message = str(caught.value).splitlines()[0].split(":", 2)
    assert says in message
    above = Path(path).read_text().splitlines()[: int(line)]
    stage = next(text.strip(" :") for text in reversed(above) if re.fullmatch(r"  \w+:", text))
    assert stage == ("child" if child and "child" in message else "rlvr1"), "the line stands within the stage"


def test_what_sweeps_make_is_not_for_users(load, tmp_path):
    path = tmp_path / "recipe.yaml"
    load()
    path.write_text(path.read_text() + "choices: {}\n")
    with pytest.raises(UserError, match="choices: is made of sweeps"):
        load_recipe(path)


def test_a_programs_word_for_a_swept_stage_lists_its_variants(load):
    recipe = load(SWEPT)
    with pytest.raises(UserError, match=r"rlvr1 has variants: rlvr1.seed-1, rlvr1.seed-2"):
        check_stage_name(recipe, "rlvr1")


def test_what_a_site_says_of_a_swept_stage_holds_for_its_variants_and_their_checkpoints(load, tmp_path):
    recipe = load(SWEPT, child={"parent": {"stage": "rlvr1", "checkpoint": 2, "best": "held_out_mean"}})
    site = tmp_path / "site.yaml"
    site.write_text("name: here\nthreads: 2\nstages: {rlvr1: {runtime: 7}, rlvr1.seed-2: {runtime: 8}}\n")
    stages = load_site(site, recipe).stages
    assert [stages[f"rlvr1.seed-{name}"].runtime for name in ("1", "1.step-2", "2", "2.step-2")] == [7, 7, 8, 8]


def test_a_stage_as_of_a_step_trains_in_the_run_directory_of_the_stage_under_its_identity(load, tmp_path):
    recipe = load(rlvr2={"parent": {"stage": "rlvr1", "checkpoint": 4}})
    sync_configs(recipe, tmp_path)
    whole, early = (Stage(recipe, tmp_path, name) for name in ("rlvr1", "rlvr1.step-4"))
    assert early.paths.run == whole.paths.run
    assert early.paths.config.read_bytes() == whole.paths.config.read_bytes()
    assert (early.planned, whole.planned) == (4, 6)
    assert Stage(recipe, tmp_path, "rlvr2").parent.paths == StagePaths(tmp_path / "rlvr1.step-4")
    write_json(whole.paths.run / "identity.json", {})
    assert (early.paths.directory / "run/identity.json").is_file()
