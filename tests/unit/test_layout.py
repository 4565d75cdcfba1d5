"""A blend's splits as other tools lay them out: links, and a manifest that their trainers read."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.data.layout import lay_out
from scripts.files import read_json, write_json


@pytest.fixture
def blend(tmp_path):
    """A blend's folder with splits of these rows."""

    def write(**rows: int) -> Path:
        folder = tmp_path / "results/data/rlvr1"
        folder.mkdir(parents=True)
        manifest = {"blend": "rlvr1", "source": {"name": "nvidia/blend", "revision": "abc"}}
        for name, side in (("train", "train"), ("val", "validation"), ("test", "test")):
            if name in rows:
                text = "".join(json.dumps({"row": number}) + "\n" for number in range(rows[name]))
                (folder / f"{name}-split.jsonl").write_text(text)
                manifest[side] = {"rows": rows[name], "sha256": name * 8}
        write_json(folder / "manifest.json", manifest)
        return folder

    return write


def test_every_split_is_a_link_and_the_manifest_says_where_it_is(blend):
    folder = blend(train=5, val=2, test=1)
    lay_out(folder / "manifest.json", folder / "dataset")
    manifest = read_json(folder / "dataset/manifest.json")
    for name in ("train", "val", "test"):
        path = Path(manifest[name])
        assert path == folder / f"dataset/{name}/data.jsonl"
        assert path.is_symlink()
        assert not path.readlink().is_absolute()
        assert path.read_text() == (folder / f"{name}-split.jsonl").read_text()
    run_hash = manifest.pop("run_hash")
    assert len(run_hash) == 16
    assert {key: value for key, value in manifest.items() if key not in {"train", "val", "test"}} == {
        "mode": "local_split",
        "source": "nvidia/blend@abc",
        "train_rows": 5,
        "val_rows": 2,
        "test_rows": 1,
    }


@pytest.mark.parametrize("rows", [{"train": 5, "val": 2}, {"train": 5, "val": 2, "test": 0}])
def test_a_split_that_is_not_there_has_an_empty_path(blend, rows):
    folder = blend(**rows)
    lay_out(folder / "manifest.json", folder / "dataset")
    told = read_json(folder / "dataset/manifest.json")
    assert told["test"] == ""
    assert not (folder / "dataset/test").exists()
    lay_out(folder / "manifest.json", folder / "dataset")
    assert read_json(folder / "dataset/manifest.json") == told


def test_the_links_survive_a_move_of_the_tree(blend, tmp_path):
    folder = blend(train=5, val=2)
    lay_out(folder / "manifest.json", folder / "dataset")
    shutil.move(tmp_path / "results", tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere/data/rlvr1/dataset/train/data.jsonl"
    assert len(moved.read_text().splitlines()) == 5
