"""A folder is a whole model in Hugging Face's format, or it is told what is wrong with it."""

import json
import re
import struct
from functools import partial

import pytest

from scripts.model.hugging_face import INDEX, check_model, tensors_of
from tests.conftest import refusal

SHARDS = {
    "model-00001-of-00002.safetensors": {"model.embed.weight": (16, 8), "model.layers.0.weight": (8, 8)},
    "model-00002-of-00002.safetensors": {"model.layers.1.weight": (8, 8), "lm_head.weight": (16, 8)},
}
FIRST, SECOND = SHARDS


def write(folder, shards=SHARDS, placed=None, tokenizer="tokenizer.json", config=None):
    """A model of such shards; `placed` is what the index says, if not the truth."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / tokenizer).write_text("{}")
    for shard, shapes in shards.items():
        save_file({name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}, folder / shard)
    truth = {name: shard for shard, shapes in shards.items() for name in shapes}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed or truth}))
    return folder


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model")


refused = partial(refusal, check_model)


def test_a_whole_model_is_accepted_beside_itself_and_alone(model, tmp_path):
    check_model(model)
    check_model(model, like=model)
    check_model(model, like=tmp_path / "nowhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text("{}")
    check_model(model, like=tmp_path / "elsewhere")
    assert tensors_of(model)["lm_head.weight"] == ("BF16", [16, 8])


def test_an_output_layer_may_be_left_out_on_either_side_only_where_it_is_the_inputs(tmp_path):
    shards = {FIRST: SHARDS[FIRST], SECOND: {"model.layers.1.weight": (8, 8)}}
    tied, untied = ({"tie_word_embeddings": ties} for ties in (True, False))
    whole, without = write(tmp_path / "a", config=tied), write(tmp_path / "b", shards, config=tied)
    check_model(without, like=whole)
    check_model(whole, like=without)
    whole, without = write(tmp_path / "c", config=untied), write(tmp_path / "d", shards, config=untied)
    assert "has no lm_head.weight (1 missing, 0 more)" in refused(without, like=whole)


@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "vocab.json"])
def test_one_file_without_an_index_and_another_tokenizer_will_do(tmp_path, tokenizer):
    folder = write(tmp_path / "one", {"model.safetensors": SHARDS[FIRST]}, tokenizer=tokenizer)
    (folder / INDEX).unlink()
    check_model(folder)


def test_a_cut_shard_is_told_by_its_size(model):
    path = model / SECOND
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-10])
    assert refused(model) == f"{path}: has {size - 10} bytes, but the header says {size}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        struct.pack("<Q", 100) + b'{"a": ',
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
        struct.pack("<Q", 1 << 62) + b"{}",
    ],
    ids=["empty", "no length", "cut", "a list", "no offsets", "absurd length"],
)
def test_a_header_that_is_none_is_named(model, content):
    (model / FIRST).write_bytes(content)
    assert refused(model).startswith(f"{model / FIRST}: no readable safetensors header")


def test_an_index_that_places_a_tensor_wrongly_is_named(tmp_path):
    truth = {name: shard for shard, shapes in SHARDS.items() for name in shapes}
    swapped = write(tmp_path / "swapped", placed=truth | {"lm_head.weight": FIRST})
    assert refused(swapped) == f"{swapped / INDEX}: does not list lm_head.weight, a tensor in {SECOND}"
    more = write(tmp_path / "more", placed=truth | {"model.layers.2.weight": SECOND})
    assert refused(more).endswith(f"places model.layers.2.weight in {SECOND}, a file without the tensor (1 in all)")


def test_a_lost_or_renamed_layer_or_another_shape_is_told_beside_the_model_before(model, tmp_path):
    fewer = write(tmp_path / "fewer", {FIRST: SHARDS[FIRST], SECOND: {"lm_head.weight": (16, 8)}})
    assert refused(fewer, like=model) == (
        f"{fewer}: differs from {model}: has no model.layers.1.weight (1 missing, 0 more); the conversion lost or "
        "renamed layers"
    )
    assert "has model.layers.1.weight, which is not one of its tensors (0 missing, 1 more)" in refused(model, fewer)
    wider = write(tmp_path / "wider", {FIRST: SHARDS[FIRST], SECOND: SHARDS[SECOND] | {"lm_head.weight": (32, 8)}})
    assert refused(wider, like=model) == (
        f"{wider}: lm_head.weight has the shape [32, 8], but [16, 8] in {model} (BF16)"
    )


NEMOTRON = {
    "backbone.embeddings.weight": (16, 8),
    "backbone.layers.0.mixer.experts.0.up_proj.weight": (8, 8),
    "backbone.layers.0.mixer.experts.1.up_proj.weight": (8, 8),
    "backbone.norm_f.weight": (8,),
    "lm_head.weight": (16, 8),
    "mtp.layers.0.final_layernorm.weight": (8,),
}


@pytest.mark.parametrize("lost", ["experts.1.up_proj.weight", "norm_f.weight", "final_layernorm.weight"])
def test_a_converter_that_drops_an_expert_or_a_final_norm_is_caught(tmp_path, lost):
    whole = write(tmp_path / "whole", {"model.safetensors": NEMOTRON})
    kept = {name: shape for name, shape in NEMOTRON.items() if not name.endswith(lost)}
    said = refused(write(tmp_path / "lost", {"model.safetensors": kept}), like=whole)
    assert lost in said and "(1 missing, 0 more); the conversion lost or renamed layers" in said


@pytest.mark.parametrize("config", [{"vocab_size": 12}, {"llm_config": {"vocab_size": 12}}])
@pytest.mark.parametrize("padded", ["backbone.embeddings.weight", "lm_head.weight"])
def test_rows_by_which_training_padded_the_vocabulary_are_caught_without_another_model(tmp_path, config, padded):
    shapes = NEMOTRON | {"backbone.embeddings.weight": (12, 8), "lm_head.weight": (12, 8)}
    check_model(write(tmp_path / "right", {"model.safetensors": shapes}, config=config))
    folder = write(tmp_path / "padded", {"model.safetensors": shapes | {padded: (16, 8)}}, config=config)
    assert refused(folder) == (
        f"{folder}: {padded} has 16 rows, but config.json's vocab_size is 12; the conversion left training's padding "
        "rows of the vocabulary, or cut the vocabulary"
    )


def test_a_model_without_its_own_code_is_told_since_nothing_would_load_it(tmp_path):
    named = {"AutoConfig": "configuration_own.Own", "AutoTokenizer": ["tokenization_own.Own", None], "A": "x/y--m.Own"}
    folder = write(tmp_path / "own", config={"auto_map": named})
    (folder / "tokenization_own.py").touch()
    assert refused(folder) == f"{folder}: has no configuration_own.py, the model's code by config.json (auto_map)"
    (folder / "configuration_own.py").touch()
    check_model(folder)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (SECOND, None, "is in the index, but not there"),
        (INDEX, "{", "cannot be read.*"),
        ("config.json", None, "cannot be read.*"),
        ("tokenizer.json", None, "has none of tokenizer.json, .*"),
    ],
)
def test_a_file_that_is_missing_or_cannot_be_read_is_named(model, file, content, says):
    (model / file).write_text(content) if content else (model / file).unlink()
    place = model if file == "tokenizer.json" else model / file
    assert re.fullmatch(f"{re.escape(str(place))}: {says}", refused(model))


def test_a_folder_without_weights_is_none(tmp_path):
    empty = write(tmp_path / "empty", {})
    assert refused(empty) == f"{empty}: no *.safetensors"
