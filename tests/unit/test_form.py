"""A model's files keep the form in which they came: keys are set in place, in the form that they have there."""

import json

from scripts.files import read_json, write_json
from scripts.model.form import config_with_head, set_generation, set_special_tokens

OLD = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "additional_special_tokens": ["<a>"]}


def test_special_tokens_are_set_as_the_files_have_them(tmp_path):
    described = {"content": "</s>", "lstrip": True, "__type": "AddedToken"}
    write_json(tmp_path / "tokenizer_config.json", OLD | {"pad_token": None})
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": described})
    set_special_tokens(tmp_path, {"eos_token": "<e>", "pad_token": "<p>"})
    assert read_json(tmp_path / "tokenizer_config.json") == OLD | {"pad_token": "<p>", "eos_token": "<e>"}
    assert read_json(tmp_path / "special_tokens_map.json") == {
        "eos_token": described | {"content": "<e>"},
        "pad_token": "<p>",
    }
    assert [*read_json(tmp_path / "tokenizer_config.json")] == [*OLD, "pad_token"], "the order of keys, too"


def test_a_tokenizer_without_settings_gets_those_of_the_recipe_alone(tmp_path):
    set_special_tokens(tmp_path, {"pad_token": "<p>"})
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer_config.json"]
    assert read_json(tmp_path / "tokenizer_config.json") == {"pad_token": "<p>"}


def test_generation_settings_keep_what_they_have(tmp_path):
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "eos_token_id": [1, 2]})
    set_generation(tmp_path, {"pad_token_id": 0})
    settings = {"temperature": 0.6, "eos_token_id": [1, 2], "pad_token_id": 0}
    assert read_json(tmp_path / "generation_config.json") == settings


def test_a_reward_models_config_is_its_parents_with_a_head():
    parent = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5.0, "torch_dtype": "bfloat16", "vocab_size": 9}
    head = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "pad_token_id": 3}
    saved = head | {"rope_parameters": {"rope_theta": 5.0}, "dtype": "float32", "vocab_size": 9, "use_cache": False}
    made = config_with_head(parent, saved)
    assert made == parent | head | {"torch_dtype": "float32"}
    newer = {**saved, "architectures": ["LlamaForCausalLM"]}
    same = config_with_head(
        {key: value for key, value in newer.items() if key not in ("id2label", "pad_token_id")}, saved
    )
    assert json.dumps(same) == json.dumps(saved), "the bytes of earlier versions, where nothing else differs"
