"""Weights that are no numbers are found in every type of safetensors, counted, and named; sound ones are noted once."""

import json

import pytest

from scripts.errors import UserError
from scripts.model import finite
from scripts.model.finite import look_at, refuse_export, refuse_not_numbers

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

NAN, INFINITE = float("nan"), float("inf")
TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
WITHOUT_INFINITY = ("float8_e4m3fn", "float8_e8m0fnu")
BROKEN = [(dtype, NAN) for dtype in TYPES]
BROKEN += [(dtype, value) for dtype in TYPES if dtype not in WITHOUT_INFINITY for value in (INFINITE, -INFINITE)]
PIECE = 1 << 10
LONG = 3 * PIECE + 5
"""Values of more than a piece, of every type, with a remainder."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Files are read in small pieces, so that small ones have several."""
    monkeypatch.setattr(finite, "PIECE", PIECE)


def saved(folder, name="model.safetensors", **tensors):
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


def some_values(dtype, count=LONG):
    return torch.rand(count, generator=torch.Generator().manual_seed(0)).add(0.5).to(getattr(torch, dtype))


@pytest.mark.parametrize(("dtype", "value"), BROKEN)
@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, LONG - 1])
def test_one_value_that_is_no_number_is_found_wherever_it_stands(tmp_path, dtype, value, place):
    values = some_values(dtype)
    values[place] = value
    (found,) = look_at(saved(tmp_path, sound=some_values(dtype, 7), broken=values)).broken
    by_torch = values.float()
    assert found.name == "broken" and found.dtype == TYPES[dtype]
    assert found.nans == by_torch.isnan().sum() and found.infinities == by_torch.isinf().sum()
    assert found.nans + found.infinities == 1


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype not in ("float32", "float64")])
def test_values_of_every_bit_pattern_are_judged_as_torch_judges_them(tmp_path, dtype):
    bits = {1: torch.uint8, 2: torch.int16}[getattr(torch, dtype).itemsize]
    patterns = torch.arange(2 ** (8 * bits.itemsize)).to(bits).view(getattr(torch, dtype))
    (found,) = look_at(saved(tmp_path, all=patterns)).broken
    assert found.nans == patterns.float().isnan().sum() and found.infinities == patterns.float().isinf().sum()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_and_smallest_numbers_are_numbers(tmp_path, dtype):
    limits = torch.finfo(getattr(torch, dtype))
    edges = torch.tensor([limits.max, limits.min, limits.tiny, -limits.tiny], dtype=torch.float64)
    assert look_at(saved(tmp_path, edges=edges.to(getattr(torch, dtype)))).broken == []


def test_whole_numbers_and_empty_tensors_are_numbers(tmp_path):
    ones = torch.full((9,), 255, dtype=torch.uint8)
    found = look_at(saved(tmp_path, packed=ones, mask=torch.ones(3, dtype=torch.bool), none=torch.empty(0)))
    assert found.broken == [] and found.size == (tmp_path / "model.safetensors").stat().st_size


def test_scales_of_mxfp4_are_looked_at_as_what_they_are(tmp_path):
    scales = torch.full((9,), 127, dtype=torch.uint8)
    scales[4] = 255
    folder = saved(tmp_path, experts_scales=scales, experts_blocks=torch.full((9,), 255, dtype=torch.uint8))
    assert look_at(folder).broken == []
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    assert [tensor.name for tensor in look_at(folder).broken] == ["experts_scales"]


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", "model-00002-of-00003.safetensors"])
def test_a_models_shards_and_adapters_are_refused_by_tensor_and_count(tmp_path, name):
    weight = torch.tensor([[1.0, NAN], [INFINITE, -INFINITE]])
    saved(tmp_path, name, **{"base_model.lora_A.weight": weight, "v_head.summary.bias": torch.tensor([NAN])})
    with pytest.raises(UserError) as error:
        refuse_not_numbers(tmp_path, "sft: step 3", "Train again")
    says = str(error.value)
    assert says.startswith("sft: step 3: weights are no numbers: ") and says.endswith(". Train again")
    assert f"base_model.lora_A.weight (F32, 2 x 2, in {name}) has 1 NaN and 2 infinite" in says
    assert "v_head.summary.bias (F32, 1, in" in says


def test_an_embedding_or_one_norm_of_zeros_is_a_warning(tmp_path, capsys):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(4, 2),
        "model.layers.0.input_layernorm.weight": torch.ones(2),
        "model.norm.weight": torch.zeros(2),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2),
        "model.layers.0.mlp.up_proj.lora_B.weight": torch.zeros(2, 2),
    }
    refuse_not_numbers(saved(tmp_path, **tensors), "mine", "")
    warned = capsys.readouterr().err
    assert "model.embed_tokens.weight, model.norm.weight (2 in all)" in warned and "lora_B" not in warned


def test_norms_that_all_begin_at_zero_are_a_familys_own(tmp_path, capsys):
    refuse_not_numbers(
        saved(tmp_path, **{"a_norm.weight": torch.zeros(2), "b_norm.weight": torch.zeros(2)}), "mine", ""
    )
    assert capsys.readouterr().err == ""


def test_an_export_is_read_once_by_its_content(tmp_path):
    export = tmp_path / "exports" / "0123456789abcdef"
    export.mkdir(parents=True)
    saved(export, weight=torch.ones(3))
    refuse_export(export, "sft", "")
    note = export.with_name("0123456789abcdef.finite.json")
    assert json.loads(note.read_text()) == {"bytes": (export / "model.safetensors").stat().st_size}
    saved(export, weight=torch.tensor([NAN]))
    refuse_export(export, "sft", "")  # held against its record by size and hash elsewhere
    note.unlink()
    with pytest.raises(UserError, match="sft: weights are no numbers"):
        refuse_export(export, "sft", "")
    assert not note.exists()


def test_a_file_that_was_cut_has_no_note(tmp_path):
    export = tmp_path / "exports" / "0123456789abcdef"
    export.mkdir(parents=True)
    path = saved(export, weight=torch.ones(300)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert look_at(export).unread == ["model.safetensors"]
    refuse_export(export, "sft", "")
    assert [*export.parent.iterdir()] == [export]
