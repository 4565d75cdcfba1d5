"""A stranger's data set, model folder or training gives no file outside of it, and no weights but the recorded ones."""

import grp
import json
import os
import shutil
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.data.download import Fetcher, Wanted, fetch_source
from scripts.errors import UserError
from scripts.files import file_inside, replace_directory, sync_tree
from scripts.model.hugging_face import INDEX, tensors_of
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.load import load_recipe
from scripts.recipe.model import PretrainedModel
from scripts.recipe.recipe import Recipe
from scripts.recipe.source import FolderSource
from scripts.stage.store import check_owners
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import SHORT
from tests.pretrained import save_pretrained

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="envs/trl.txt is not installed")
KEY = '{"question": "the key", "answer": "1234"}\n'
ROW = '{"question": "1 + 1?", "answer": "2"}\n'


@pytest.fixture
def secret(tmp_path) -> Path:
    """A private file that the user can read."""
    path = tmp_path / "home/secret.jsonl"
    path.parent.mkdir()
    path.write_text(KEY)
    path.chmod(0o600)
    return path


# --- names of files ---


@pytest.mark.parametrize(
    "form",
    [
        "../home/secret.jsonl",
        "data/../../home/secret.jsonl",
        "{secret}",
        "link.jsonl",
        "linked/secret.jsonl",
        "chain.jsonl",
    ],
)
def test_no_name_and_no_link_leads_out_of_a_folder(tmp_path, secret, form):
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "link.jsonl").symlink_to(secret)
    (folder / "linked").symlink_to(secret.parent)
    (folder / "chain.jsonl").symlink_to("link.jsonl")
    with pytest.raises(UserError, match="leads out of the folder"):
        file_inside(folder, form.format(secret=secret))


def test_links_within_a_folder_and_of_a_hubs_cache_are_followed(tmp_path):
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs/0123").write_text(ROW)
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "rows.jsonl").symlink_to("../../blobs/0123")
    (snapshot / "same.jsonl").symlink_to("rows.jsonl")
    for name in ("rows.jsonl", "same.jsonl"):
        assert file_inside(snapshot, name).read_text() == ROW
    (tmp_path / "elsewhere").symlink_to(snapshot)
    assert file_inside(tmp_path / "elsewhere", "rows.jsonl").read_text() == ROW
    (snapshot / "refs.jsonl").symlink_to("../../refs")
    with pytest.raises(UserError, match="leads out"):
        file_inside(snapshot, "refs.jsonl")


@pytest.fixture(scope="module")
def recipe():
    """A recipe of a blend whose files the card of a folder names."""
    short = load_recipe(SHORT)

    def make(folder: Path) -> Recipe:
        source = FolderSource(kind="folder", path=str(folder), split="train")
        blend = PublishedBlend(
            source=source, columns={"prompt": "question", "expected_answer": "answer"}, environments=["math"]
        )
        return short.model_copy(update={"source": source.whole(), "blends": {"a": blend}})

    return make


CARD = "---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"


@pytest.mark.parametrize(
    "files",
    [
        "../home/secret.jsonl",
        "{secret}",
        "[../home/secret.jsonl]",
        "[{{split: train, path: ../home/secret.jsonl}}]",
        "[{{split: train, path: [rows.jsonl, '{secret}']}}]",
        "link.jsonl",
        "'*.jsonl'",
        "../home",
        "data/../../home/secret.jsonl",
    ],
)
@pytest.mark.parametrize("folder", ["", "\n  data_dir: .", "\n  data_dir: ../home", "\n  data_dir: {home}"])
def test_a_data_sets_card_makes_no_file_of_the_user_training_data(recipe, tmp_path, secret, files, folder):
    source = tmp_path / "repository"
    source.mkdir()
    (source / "rows.jsonl").write_text(ROW)
    (source / "link.jsonl").symlink_to(secret)
    (source / "README.md").write_text(
        CARD.format(files=files.format(secret=secret) + folder.format(home=secret.parent))
    )
    with pytest.raises(UserError, match=r"leads out of the folder|no file is like|should have the file") as refused:
        fetch_source(recipe(source), tmp_path / "out")
    assert "1234" not in str(refused.value) and not (tmp_path / "out").exists()


# --- what is a user's own stays as it is ---


def as_it_was(path: Path) -> tuple[int, int, bytes]:
    state = path.stat()
    return stat.S_IMODE(state.st_mode), state.st_mtime_ns, path.read_bytes()


def test_linked_files_of_a_user_keep_mode_and_times(recipe, tmp_path, secret):
    before = as_it_was(secret)
    with replace_directory(tmp_path / "made") as fresh:
        os.link(secret, fresh / "linked.jsonl")
        (fresh / "own.jsonl").touch(0o600)
    sync_tree(tmp_path / "made")
    assert as_it_was(secret) == before and (tmp_path / "made/own.jsonl").stat().st_mode & 0o044


def test_dating_the_source_as_snakemake_does_dates_no_file_of_the_user(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    before = {}
    for name in ("rows.jsonl", "pictures.zip"):
        (folder / name).write_text(ROW)
        os.utime(folder / name, (1e9, 1e9))
        before[name] = as_it_was(folder / name)
    fetcher = Fetcher(tmp_path / "source")
    fetcher.fetch([Wanted(FolderSource(kind="folder", path=str(folder)), name, name) for name in before])
    for name in before:
        os.utime(tmp_path / "source" / name, follow_symlinks=False)
        assert (tmp_path / "source" / name).read_text() == ROW
    assert {name: as_it_was(folder / name) for name in before} == before


@needs_transformers
def test_a_private_model_stays_private_through_its_export(tmp_path):
    from scripts.train.export import export_pretrained

    save_pretrained("llama", tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        path.chmod(0o600)
    before = {path: as_it_was(path) for path in (tmp_path / "model").iterdir()}
    export_pretrained(PretrainedModel(name=str(tmp_path / "model")), tmp_path / "results/model/hf")
    assert {path: as_it_was(path) for path in (tmp_path / "model").iterdir()} == before


# --- models ---


@needs_transformers
@pytest.mark.parametrize(
    "name", ["tokenizer_notes", "tokenizer.model", "chat_template.jinja", "code.py", "config.json"]
)
@pytest.mark.parametrize("target", ["absolute", "relative", "through a folder"])
def test_a_link_in_a_models_folder_brings_no_file_from_outside(tmp_path, secret, name, target):
    from scripts.train.export import export_pretrained

    save_pretrained("llama", tmp_path / "model")
    (tmp_path / "model/there").symlink_to(secret.parent)
    named = {"absolute": secret, "relative": "../home/secret.jsonl", "through a folder": "there/secret.jsonl"}[target]
    (tmp_path / "model" / name).unlink(missing_ok=True)
    (tmp_path / "model" / name).symlink_to(named)
    with pytest.raises(UserError, match=rf"{name}: leads out of the folder"):
        export_pretrained(PretrainedModel(name=str(tmp_path / "model")), tmp_path / "results/model/hf")
    assert not (tmp_path / "results/model/hf").exists() and not any((tmp_path / "results/model/exports").iterdir())


@needs_transformers
@pytest.mark.parametrize(
    "shard",
    [
        "{outside}",
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "sub/inner.safetensors",
        "lost.safetensors",
    ],
)
def test_an_index_places_tensors_in_files_of_its_folder_alone(tmp_path, shard):
    save_pretrained("llama", tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    names = list(tensors_of(tmp_path / "model"))
    (tmp_path / "model/sub").mkdir()
    for copy in ("outside.safetensors", "model/sub/inner.safetensors"):
        shutil.copy(weights, tmp_path / copy)
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    named = shard.format(outside=tmp_path / "outside.safetensors")
    index = tmp_path / "model" / INDEX
    for placed in (
        dict.fromkeys(names, named),
        dict.fromkeys(names, "model-00001-of-00001.safetensors") | {"more": named},
    ):
        index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
        with pytest.raises(UserError, match=r"outside of the folder|is in the index, but not there"):
            tensors_of(tmp_path / "model")


@pytest.mark.parametrize("placed", [[], 1, "a", {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": {}}, None])
def test_an_index_without_names_of_files_is_refused_in_one_message(tmp_path, placed):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(UserError, match="weight_map does not place tensors in files"):
        tensors_of(tmp_path)


# --- trainings of others ---


@pytest.fixture
def training(tmp_path) -> Path:
    folder = tmp_path / "store/0123"
    (folder / "checkpoints/step_1").mkdir(parents=True)
    (folder / "checkpoints/step_1/model.safetensors").write_text("weights")
    return folder


def test_a_training_of_ones_own_is_taken_over(training):
    check_owners(TrainingFolder(training))


def test_a_training_of_another_user_is_refused_unless_its_group_is_named(training, monkeypatch):
    group = grp.getgrgid(training.stat().st_gid).gr_name
    monkeypatch.setattr(os, "geteuid", lambda: training.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"taken over only from oneself, or from the members of the site's group"):
        check_owners(TrainingFolder(training))
    check_owners(TrainingFolder(training), group)
    weights = training / "checkpoints/step_1/model.safetensors"
    weights.chmod(0o666)
    with pytest.raises(UserError, match=r"model\.safetensors: is "):
        check_owners(TrainingFolder(training), group)
    weights.chmod(0o644)
    (training / "checkpoints/step_2").symlink_to("step_1")
    with pytest.raises(UserError, match="step_2: is "):
        check_owners(TrainingFolder(training), group)
    with pytest.raises(UserError, match="nobodies, a group unknown here"):
        check_owners(TrainingFolder(training), "nobodies")
