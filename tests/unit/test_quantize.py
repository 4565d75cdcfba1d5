"""Quantised exports: the format of compressed-tensors, weights to the nearest, loaded again by transformers."""

import shutil
from importlib.util import find_spec

import pytest

from scripts.errors import UserError
from scripts.files import describe_files
from scripts.recipe.stage_settings import Quantize
from scripts.stage.publish import settle_export
from tests.pretrained import save_pretrained
from tests.trials import break_weight

pytestmark = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="envs/trl.txt is not installed")


def weights(folder):
    """The weights as transformers has them after a forward pass, by which compressed ones are unpacked."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    return {name: tensor.double() for name, tensor in model.state_dict().items() if name.endswith("weight")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize") / "model"
    save_pretrained("qwen3", folder)
    return folder


def bound(format, weight):
    """The largest error of a weight: half a step of int4 (a group's largest over 7.5), half of fp8's last bit, and
    half of the widest gap of E2M1, from 4 to 6, beside the rounding of the scale to E4M3 (arXiv:2509.25149)."""
    size = {"int4": 32, "fp8": weight.shape[-1], "nvfp4": 16}[format]
    most = weight.unflatten(-1, (-1, size)).abs().amax(-1, keepdim=True).expand(-1, -1, size).flatten(-2)
    return {
        "int4": most / 15,
        "fp8": weight.abs() / 16 + most / 448 / 2**9,
        "nvfp4": most * (1 / 6 + 1 / 16) + weight.abs() / 2**7,
    }[format]


@pytest.mark.parametrize("format", ["fp8", "int4", "nvfp4"])
def test_a_quantised_export_is_loaded_with_weights_near_the_models(model, tmp_path, format):
    from scripts.backends.quantize import quantise

    quantise(model, Quantize(format=format, group_size=32), tmp_path)
    exact, found = weights(model), weights(tmp_path)
    linear = [name for name in exact if "proj" in name]
    assert len(linear) == 14
    for name in linear:
        apart = (found[name] - exact[name]).abs()
        assert (apart <= bound(format, exact[name]) * 1.01 + 1e-9).all(), name
        assert apart.any(), f"{name} was not quantised"
    for name in exact.keys() - {*linear}:
        assert (found[name] == (exact[name].bfloat16() if format == "nvfp4" else exact[name])).all(), name
    assert {path.name for path in model.iterdir()} <= {path.name for path in tmp_path.iterdir()}
    sizes = [sum(path.stat().st_size for path in folder.glob("*.safetensors")) for folder in (model, tmp_path)]
    assert sizes[1] < 0.8 * sizes[0]


def test_groups_that_do_not_divide_a_layer_are_refused(model, tmp_path):
    from scripts.backends.quantize import quantise

    with pytest.raises(
        UserError, match=r"layers.0.*has rows of 32 weights, not a multiple of group_size 128; lower it"
    ):
        quantise(model, Quantize(format="int4"), tmp_path)


@pytest.mark.parametrize("format", ["fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_makes_scales_that_are_refused(model, tmp_path, format, value):
    from scripts.backends.quantize import NOT_QUANTISED, quantise

    broken, fresh = shutil.copytree(model, tmp_path / "broken"), tmp_path / "fresh"
    fresh.mkdir()
    break_weight(broken / "model.safetensors", "model.layers.0.mlp.up_proj.weight", value)
    quantise(broken, Quantize(format=format, group_size=32), fresh)
    with pytest.raises(
        UserError, match=r"^s: quantize: weights are no numbers: model.layers.0.mlp.up_proj.weight"
    ) as error:
        settle_export(fresh, tmp_path / "exports", describe_files(fresh), "s: quantize", NOT_QUANTISED)
    assert "scale" in str(error.value) or format == "fp8"
    assert not (tmp_path / "exports").exists()
