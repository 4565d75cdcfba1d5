"""Adapters: what they lie over, whose they are that a stage goes on with, and what makes such a stage another."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

from scripts.backends.trl.lora import Lora
from scripts.errors import UserError
from scripts.files import write_json
from scripts.recipe.load import load_recipe
from scripts.stage.stage import Stage
from tests.conftest import SHORT
from tests.pretrained import save_pretrained

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")

LORA = {"sft": {"dim": 4, "alpha": 8}, "rlvr1": {"from_parent": True}, "rlhf": {"from_parent": True}}


@pytest.fixture
def recipe_of(tmp_path):
    """The short recipe from a pretrained folder, rlhf after rlvr1, with what is said of the stages' adapters."""

    def make(**lora):
        recipe = yaml.safe_load(SHORT.read_text()) | {"model": {"name": str(tmp_path / "model")}}
        recipe["stages"]["rlhf"]["parent"] = "rlvr1"
        for name, stage in recipe["stages"].items():
            stage["policy"] = stage.get("policy", {}) | {"lora": (LORA | lora)[name]}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        return load_recipe(tmp_path / "recipe.yaml")

    return make


def test_adapters_that_are_gone_on_with_have_the_shape_of_those_that_were_made(recipe_of):
    stages = recipe_of().stages
    assert [stages[name].policy.lora.dim for name in LORA] == [4, 4, 4]
    assert stages["rlhf"].policy.lora.alpha == 8 and stages["rlhf"].policy.lora.from_parent


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rlhf": {"from_parent": True, "dim": 8}},
            r"rlhf.policy.lora.dim: the adapters of rlvr1 have 4; leave it out",
        ),
        ({"rlvr1": None}, "rlhf.policy.lora.from_parent: the stage has no parent that trains adapters"),
        ({"sft": {"from_parent": True}}, "sft.policy.lora.from_parent: the stage has no parent that trains adapters"),
    ],
)
def test_adapters_that_the_parent_has_not_are_refused(recipe_of, lora, message):
    with pytest.raises(UserError, match=message):
        recipe_of(**lora)


def test_a_stage_that_goes_on_starts_from_what_the_adapters_lie_over_and_is_another_by_other_adapters(
    recipe_of, tmp_path
):
    results = tmp_path / "results"
    stage = Stage(recipe_of(), results, "rlvr1")
    split = {"sha256": "0", "rows": 9}
    write_json(stage.manifest, {"train": split, "validation": split})
    record = {"stage": "sft", "step": 4, "identity": "0", "content": "merged", "files": {}}
    adapter = {"content": "one", "base": {"stage": "model", "content": "first"}, "files": {}}
    write_json(stage.parent_export_record, record | {"adapter": adapter})
    assert stage.base_export == results / "model/exports/first" and stage.parent_adapter.parent.name == "exports"
    assert stage.parent_export == results / "sft/exports/merged"
    one = stage.identity
    write_json(stage.parent_export_record, record | {"adapter": adapter | {"content": "other"}})
    assert stage.reread().identity != one
    write_json(stage.parent_export_record, record)
    with pytest.raises(UserError, match="has no adapters to go on with; delete it, and Snakemake exports"):
        _ = stage.base_export


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"target_modules": ["query"]}, "Target modules {'query'} not found in the base model"),
        ({"target_parameters": ["mlp.experts.up"]}, "no `target_parameters` found"),
        ({"target_modules": ["lm_head", "q_proj"]}, "target_modules: TRL lays no adapters over lm_head; leave it out"),
    ],
)
def test_adapters_over_nothing_or_the_head_are_refused_before_the_model_is_loaded(tmp_path, says, message):
    from scripts.backends.trl.setup import adapters

    save_pretrained("mixtral", tmp_path)
    policy = SimpleNamespace(lora=Lora(**says))
    with pytest.raises(UserError, match=f"sft: policy.lora.*{message}"):
        adapters(SimpleNamespace(stage="sft", parent_model=tmp_path, config=SimpleNamespace(policy=policy)))
