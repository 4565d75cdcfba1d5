"""What a stage may say of vLLM, what that makes of its config, and how sampler and trainer are compared."""

import math
import sys

import pytest
import yaml

from scripts.backends.trl.algorithm import PACKAGES
from scripts.backends.trl.versions import check_versions, difference_of
from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.yaml_file import pinned_versions
from tests.cases import cases
from tests.conftest import ROOT

RECIPE = ROOT / "tests/vllm.yaml"


@pytest.fixture
def recipe_with(tmp_path):
    """The recipe whose GRPO stage and model are changed."""

    def load(model=(), **stage):
        data = yaml.safe_load(RECIPE.read_text())
        data["model"] |= dict(model)
        for section, settings in stage.items():
            data["stages"]["rlvr1"][section] = settings
        path = tmp_path / "vllm.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_recipe(path)

    return load


def policy(backend: str, **generation: object) -> dict:
    return {
        "max_total_sequence_length": 64,
        "optimizer": {"lr": 1.0e-2},
        "generation": {"backend": backend, "max_new_tokens": 12} | generation,
    }


def test_the_sampler_and_its_versions_are_in_the_config_of_the_stage_that_it_samples_for_alone(recipe_with):
    by_vllm, by_trainer = (recipe_with(policy=policy(name)) for name in ("vllm", "transformers"))
    assert resolve_stage(by_vllm, "sft") == resolve_stage(by_trainer, "sft")
    config, without = (resolve_stage(recipe, "rlvr1").values() for recipe in (by_vllm, by_trainer))
    assert config["release"] == pinned_versions("vllm", (*PACKAGES, "vllm"))
    assert without["release"] == pinned_versions("trl", PACKAGES)
    assert config["release"]["vllm"] == "0.32.0" and config["release"]["torch"] == "2.13.0"
    assert config["policy"]["generation"].pop("backend") == "vllm"
    assert config["policy"] == without["policy"]
    assert not {"use_importance_sampling_correction", "truncated_importance_sampling_ratio"} & without["loss_fn"].keys()


@cases("vllm.refused", "changes", "says")
def test_what_vllm_cannot_sample_for_is_refused_by_the_recipe(recipe_with, changes, says):
    with pytest.raises(UserError, match=says):
        recipe_with(**changes)


def test_vllm_is_refused_for_a_model_that_sees(recipe_with):
    vision = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    with pytest.raises(UserError, match=r"rlvr1.policy.generation.backend: .*models without vision only"):
        recipe_with(model={"vision": vision})


def test_what_places_vllm_is_no_part_of_the_config_and_what_samples_is_where_it_is_said(recipe_with):
    def generation(**changes: object) -> dict:
        vllm = policy("vllm")
        vllm["generation"] |= changes
        return resolve_stage(recipe_with(policy=vllm), "rlvr1").values()["policy"]["generation"]

    placed = generation(vllm_cfg={"gpu_memory_utilization": 0.5, "enable_sleep_mode": True})
    assert placed == generation() == generation(top_k=None, stop_token_ids=[])
    sampled = {"top_k": 20, "min_p": 0.1, "stop_token_ids": [7]}
    assert generation(**sampled) == generation() | sampled


def test_another_python_is_asked_for_its_versions():
    assert difference_of(sys.executable, {"pydantic": "0.0"}) == _said({"pydantic": "0.0"})
    assert difference_of(sys.executable, {"no-such-package": "1", "vllm": "0.0"}) == _said(
        {"no-such-package": "1", "vllm": "0.0"}
    )
    assert "no no-such-package (pinned: 1)" in _said({"no-such-package": "1", "vllm": "0.0"})
    assert "name its Python in the site's vllm_python" in _said({"vllm": "0.0"})
    assert difference_of("/no/such/python", {"vllm": "0.0"}).startswith("/no/such/python: No such file or directory; ")


def _said(release: dict[str, str]) -> str:
    with pytest.raises(UserError) as error:
        check_versions(release)
    return str(error.value)


def test_equal_probabilities_are_no_mismatch_and_tokens_that_do_not_count_are_left_out():
    torch = pytest.importorskip("torch")
    from scripts.backends.trl.measuring import mismatch

    sampler = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -9.0, -9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    equal = mismatch(sampler.nan_to_num(-3.0), sampler, mask)
    assert equal == {"token_mult_prob_error": 1.0, "gen_kl_error": 0.0, "sampling_importance_ratio": 1.0}
    trainer = sampler + torch.tensor([[math.log(2), -math.log(2), 0], [0, 5, 5]])
    ratios = (2, 0.5, 1)
    assert mismatch(trainer, sampler, mask) == pytest.approx(
        {
            "token_mult_prob_error": (2 + 2 + 1) / 3,
            "gen_kl_error": sum(ratio - math.log(ratio) - 1 for ratio in ratios) / 3,
            "sampling_importance_ratio": sum(ratios) / 3,
        }
    )
    assert mismatch(trainer, sampler, mask * 0) == {}
