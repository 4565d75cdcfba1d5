"""A pretrained model becomes an export: whole, linked, known by its content, with a tokenizer that can hold a talk."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from huggingface_hub import constants

from scripts.errors import UserError
from scripts.files import read_json
from scripts.model.model_source import check_source, sync_source
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.stage.state import States
from tests.cases import cases
from tests.conftest import ROOT
from tests.pretrained import ARCHITECTURES, save_pretrained
from tests.stages import ready_stage
from tests.trials import break_weight
from tests.unit.test_download import MINE, served  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="envs/trl.txt is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_pretrained("qwen3", path)
    return path


def export_pretrained(model: PretrainedModel, directory: Path) -> None:
    """The program, whose imports take seconds, in the process that needs it."""
    from scripts.train.export import export_pretrained

    export_pretrained(model, directory)


@pytest.fixture
def copied(tmp_path, folder):
    """A copy of the model with other settings in one of its files."""

    def copy(file: str = "config.json", **settings) -> Path:
        path = shutil.copytree(folder, tmp_path / "copy") / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | settings))
        return path.parent

    return copy


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
    assert all(path.stat().st_nlink == 1 for path in model.iterdir() if path.suffix != ".safetensors")


def test_the_content_is_what_it_is_known_by_and_not_the_path(tmp_path, folder, copied):
    shutil.copytree(folder, tmp_path / "moved")
    first, moved = exported(folder, tmp_path / "a"), exported(tmp_path / "moved", tmp_path / "b")
    assert first["content"] == moved["content"]
    assert exported(copied(rms_norm_eps=1e-5), tmp_path / "c")["content"] != first["content"]


def test_plan_and_status_know_that_a_link_leads_to_another_model_now(tmp_path, folder, copied):
    link, results = tmp_path / "link", tmp_path / "results"
    link.symlink_to(folder)
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml", model=str(link))
    ready_stage(recipe, results, "sft", [])

    def stands() -> tuple[str, str]:
        state = States(recipe, results).of("sft")
        return state.state, state.note

    assert stands() == ("waiting", "its model comes first")
    sync_source(recipe.model, results / "model")
    exported(link, results)
    assert stands() == ("new", "")
    link.unlink()
    link.symlink_to(copied(rms_norm_eps=1e-5))
    assert stands() == ("waiting", "its model is made anew first")
    sync_source(recipe.model, results / "model")
    assert stands() == ("waiting", "its model is made anew first"), "after a dry run too"
    exported(link, results)
    assert stands() == ("new", "")


def test_what_the_recipe_says_of_the_tokenizer_goes_into_the_export_and_not_into_the_folder(tmp_path, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")
    record = exported(folder, tmp_path, pad_token="<|reserved|>", chat_template=str(template))
    model = tmp_path / "model/hf/model"
    assert json.loads((model / "tokenizer_config.json").read_text())["pad_token"] == "<|reserved|>"  # noqa: S105
    assert json.loads((model / "generation_config.json").read_text())["pad_token_id"] is not None
    assert record["content"] != exported(folder, tmp_path / "plain")["content"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@cases("pretrained.tokenizers", "damage", "says", "message")
def test_a_tokenizer_that_cannot_serve_is_refused_with_the_key_that_helps(tmp_path, damage, says, message):
    save_pretrained("llama", tmp_path / "model", **damage)
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "model", tmp_path, **says)
    assert not (tmp_path / "model/hf").exists() and not list((tmp_path / "model/exports").iterdir())


def test_a_model_that_is_not_whole_or_not_there_is_refused(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="the header says"):
        exported(tmp_path / "cut", tmp_path)
    with pytest.raises(FileNotFoundError):  # which a program's end explains
        exported(tmp_path / "nowhere", tmp_path)
    with pytest.raises(UserError, match="check the repository's id"):
        export_pretrained(PretrainedModel(name="no--name"), tmp_path / "hf")


def test_end_tokens_on_which_tokenizer_and_generation_settings_disagree_are_refused_until_the_recipe_says_one(
    tmp_path, copied
):
    odd = copied("generation_config.json", eos_token_id=[0], pad_token_id=0)
    with pytest.raises(UserError, match=r"eos token is '<\|im_end\|>', but .* ends with \['<\|endoftext\|>'\]"):
        exported(odd, tmp_path)
    exported(odd, tmp_path, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    settled = json.loads((tmp_path / "model/hf/model/generation_config.json").read_text())
    assert settled["pad_token_id"] == 0 and settled["eos_token_id"] in (2, [2, 0])


def test_two_different_chat_templates_are_refused(tmp_path, copied):
    two = copied("tokenizer_config.json", chat_template="{{ messages }}")
    with pytest.raises(UserError, match=r"chat_template.jinja and tokenizer_config.json hold different chat templates"):
        exported(two, tmp_path)


@cases("pretrained.not_trained", "config", "message")
def test_what_is_not_trained_is_one_message(tmp_path, copied, config, message):
    with pytest.raises(UserError, match=f"model.name: .*: {message}"):
        exported(copied(**config), tmp_path)


@cases("pretrained.formats", "files", "message")
def test_files_of_another_format_are_one_message(tmp_path, files, message):
    (tmp_path / "other").mkdir()
    for name in files:
        (tmp_path / "other" / name).write_text("{}")
    with pytest.raises(UserError, match=message):
        exported(tmp_path / "other", tmp_path)


def test_a_file_that_git_lfs_has_not_fetched_is_called_that_in_the_plan(tmp_path, copied):
    model = copied()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (model / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match=r"model.safetensors: is a git-lfs pointer, .* run `git lfs pull` in"):
        check_source(PretrainedModel(name=str(model)), tmp_path / "results/model")


def test_weights_that_transformers_would_make_up_are_refused(tmp_path, folder):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "lacks")
    weights = load_file(tmp_path / "lacks/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "lacks/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its files lack model.layers.1.mlp.up_proj.weight \(1 missing\)"):
        exported(tmp_path / "lacks", tmp_path)


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "1 NaN"), (float("-inf"), "1 infinite")])
def test_weights_that_are_no_numbers_are_refused_and_sound_ones_are_read_once(
    tmp_path, folder, monkeypatch, value, says
):
    shutil.copytree(folder, tmp_path / "broken")
    break_weight(tmp_path / "broken/model.safetensors", "model.norm.weight", value)
    with pytest.raises(UserError, match=rf"broken: weights are no numbers: model.norm.weight \(.*\) has {says}. Take"):
        exported(tmp_path / "broken", tmp_path / "results")
    assert not (tmp_path / "results/model/hf").exists()
    content = exported(folder, tmp_path / "results")["content"]
    assert (tmp_path / f"results/model/exports/{content}.finite.json").is_file()
    monkeypatch.setattr("scripts.model.finite.look_at", None)
    assert exported(folder, tmp_path / "results")["content"] == content


# --- the hub ---


def of_hub(results: Path, **says) -> dict:
    export_pretrained(PretrainedModel(name="org/model", **says), results / "model/hf")
    return read_json(results / "model/hf/record.json")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A repository's files: a model in shards, and what else such repositories hold."""
    path = tmp_path_factory.mktemp("sharded")
    save_pretrained("llama", path, max_shard_size="40KB")
    others = ("README.md", "original/consolidated.00.pth", "model.gguf", "consolidated.safetensors")
    return {file.name: file.read_bytes() for file in path.iterdir()} | dict.fromkeys(others, b"x")


def test_of_a_repository_only_the_model_is_fetched_at_the_branchs_commit(served, files, tmp_path):  # noqa: F811
    commit = served.repositories["org/model"].commit(files)
    record = of_hub(tmp_path)
    assert record["source"] == {"name": "org/model", "revision": commit}
    assert len([name for name in record["files"] if name.endswith(".safetensors")]) > 1
    assert "model.safetensors.index.json" in record["files"]
    asked = {path.rpartition("/")[2] for path, _ in served.asked(f"/resolve/{commit}", "HEAD")}
    assert asked == record["files"].keys()
    (tmp_path / "folder").mkdir()
    for name in record["files"]:
        (tmp_path / "folder" / name).write_bytes(files[name])
    assert exported(tmp_path / "folder", tmp_path / "other")["content"] == record["content"]
    served.repositories["org/model"].commit(files | {"README.md": b"##"})
    assert of_hub(tmp_path)["content"] == record["content"], "another commit of the same model"


@cases("pretrained.hub", "change", "says", "message")
def test_what_keeps_a_model_from_coming_is_one_message(served, files, tmp_path, monkeypatch, change, says, message):  # noqa: F811
    repository = served.repositories["org/model"]
    repository.commit(files)
    vars(repository).update(change)
    if (token := says.pop("token", None)) is not None:
        served.tokens[MINE] = token
        monkeypatch.setenv("HF_TOKEN", MINE)
    if says.pop("offline", False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if says.pop("down", False):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=message) as error:
        of_hub(tmp_path, **says)
    assert MINE not in str(error.value)


def test_without_the_hub_a_model_in_the_cache_is_taken_and_one_that_is_not_whole_refused(
    served,  # noqa: F811
    files,
    tmp_path,
    monkeypatch,
):
    served.repositories["org/model"].commit(files)
    record = of_hub(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert of_hub(tmp_path / "again") == record
    shard = next(name for name in record["files"] if name.endswith(".safetensors"))
    next(Path(constants.HF_HUB_CACHE).glob(f"models--org--model/snapshots/*/{shard}")).unlink()
    with pytest.raises(UserError, match="is in the index, but not there; the cache has no more of it"):
        of_hub(tmp_path / "cut")
