"""A pretrained model becomes an export: whole, linked, known by its content, with a tokenizer that can hold a talk."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="envs/trl.txt is not installed")

from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.model import PretrainedModel
from scripts.train.pretrained import export_pretrained
from tests.pretrained import ARCHITECTURES, save_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_pretrained("qwen3", path)
    return path


def exported(folder: Path, results: Path, **says) -> dict:
    """The record of the export of a folder."""
    export_pretrained(PretrainedModel(name=str(folder), **says), results / "model/hf")
    return read_json(results / "model/hf/record.json")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_of_any_architecture_becomes_an_export(tmp_path, architecture):
    save_pretrained(architecture, tmp_path / "model")
    record = exported(tmp_path / "model", tmp_path)
    model = tmp_path / "model/hf/model"
    assert model.resolve().name == record["content"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= record["files"].keys()
    assert (model / "model.safetensors").samefile(tmp_path / "model/model.safetensors")


def test_the_content_is_what_it_is_known_by_and_not_the_path(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "moved")
    first, moved = exported(folder, tmp_path / "a"), exported(tmp_path / "moved", tmp_path / "b")
    assert first["content"] == moved["content"]
    config = json.loads((tmp_path / "moved/config.json").read_text())
    (tmp_path / "moved/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert exported(tmp_path / "moved", tmp_path / "c")["content"] != first["content"]


def test_what_the_recipe_says_of_the_tokenizer_goes_into_the_export_and_not_into_the_folder(tmp_path, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    record = exported(folder, tmp_path, pad_token="<|reserved|>", chat_template=str(tmp_path / "template.jinja"))
    model = tmp_path / "model/hf/model"
    assert json.loads((model / "tokenizer_config.json").read_text())["pad_token"] == "<|reserved|>"  # noqa: S105
    assert json.loads((model / "generation_config.json").read_text())["pad_token_id"] is not None
    assert record["content"] != exported(folder, tmp_path / "plain")["content"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("damage", "says", "message"),
    [
        ({"chat_template": None}, {}, "no chat template; name a file with one as model.chat_template"),
        ({"pad_token": None}, {}, r"no pad token, .* \(such as <\|reserved\|>\) as model.pad_token"),
        ({"eos_token": "<|endoftext|>"}, {}, r"ends an answer with '<\|im_end\|>', .* as model.eos_token"),
        ({}, {"eos_token": "</s>"}, "model.eos_token: '</s>' is no token of"),
        ({}, {"chat_template": "nowhere.jinja"}, "model.chat_template: .*nowhere.jinja: cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused_with_the_key_that_helps(tmp_path, damage, says, message):
    save_pretrained("llama", tmp_path / "model", **damage)
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "model", tmp_path, **says)
    assert not (tmp_path / "model/hf").exists() and not list((tmp_path / "model/exports").iterdir())


def test_a_model_that_is_not_whole_or_not_there_is_refused(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="its header speaks of"):
        exported(tmp_path / "cut", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        exported(tmp_path / "nowhere", tmp_path)
    with pytest.raises(UserError, match="neither a folder"):
        export_pretrained(PretrainedModel(name="not a name"), tmp_path / "hf")
