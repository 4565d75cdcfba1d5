"""Adapters are laid over layers that are there, and over the parent's merged export alone."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from scripts.backends.trl.algorithm import Lora
from scripts.errors import UserError
from tests.pretrained import save_pretrained

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="envs/trl.txt is not installed")


def test_a_recipe_that_goes_on_with_adapters_is_told_to_train_new_ones():
    assert Lora(from_parent=False).model_dump()["from_parent"] is False  # as in every stored config
    with pytest.raises(
        ValidationError, match=r"from_parent\n.*is gone: an export has its adapters merged; leave the key"
    ):
        Lora(from_parent=True)


@pytest.mark.slow
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
