"""MMPR and MMPR-Tiny as NeMo-RL's loaders want them: from small archives laid out as the published ones are."""

import io
import json
import os
import sys
import types
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scripts.data import index, mmpr, mmpr_tiny
from scripts.errors import UserError
from scripts.files import read_json, sha256_file, write_json
from tests.cases import cases
from tests.conftest import refusal

SUBSETS = {"openbmb/RLAIF-V": ("RLAIF-V", 24), "CLEVR_math_sr0.5": ("CLEVR", 9), "ScienceQA": ("ScienceQA/images", 7)}
OURS = ("manifest.json", "train-split.jsonl", "val-split.jsonl", "check.json")


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, number // 256 % 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def pack(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("MMPR")
        for name, content in files.items():
            archive.writestr(name, content)


def pair(image, number=0):
    answers = {"chosen": f"It is {number}.", "rejected": f"<think>no</think>It is {number + 1}."}
    return {"id": number, "image": image, "question": f"<image>\nWhat is {number}?", **answers}


class Published:
    """The three files of OpenGVLab/MMPR, with few rows; tests change them before `write`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta, self.rows, self.images = {}, {}, {}
        for name, (root, count) in SUBSETS.items():
            annotation = f"MMPR/annotations/{name.replace('/', '_')}.jsonl"
            self.meta[name] = {
                "root": f"MMPR/images/{root}",
                "annotation": f"/mnt/petrelfs/someone/images/{annotation}",
                "data_augment": False,
                "repeat_time": 1,
                "length": count,
            }
            self.rows[annotation] = [pair(f"part/{number}.png", number) for number in range(count)]
            for number in range(count):
                self.images[f"MMPR/images/{root}/part/{number}.png"] = png(number)

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "meta.json").write_text(json.dumps(self.meta))
        lines = {
            name: "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows).encode()
            for name, rows in self.rows.items()
        }
        pack(self.folder / "annotations.zip", lines)
        pack(self.folder / "images.zip", self.images)
        return self.folder


@pytest.fixture
def published(tmp_path):
    return Published(tmp_path / "source/mpo")


@pytest.fixture
def prepare(tmp_path, published):
    """Prepares what is published, in a folder of its own; returns that folder."""
    record = tmp_path / "record.json"
    write_json(record, {"blends": {"mpo": {"source": "OpenGVLab/MMPR", "revision": "0" * 40}}, "files": {}})

    def run(folder: str = "results", write: bool = True, **options) -> Path:
        source = published.write() if write else published.folder
        mmpr.prepare_mmpr(source, record, tmp_path / folder / "data/mpo", **options)
        return tmp_path / folder / "data/mpo"

    return run


@pytest.fixture
def refused(prepare, tmp_path):
    """The message of a preparation that must fail and leave nothing that looks complete."""

    def run(**options) -> str:
        said = refusal(prepare, **options)
        output = tmp_path / "results/data/mpo"
        assert not any((output / name).exists() for name in (*OURS, mmpr.META))
        return said.replace(f"{tmp_path}/", "")

    return run


def rows_of_loader(data_path: Path) -> list[Path]:
    """The images of the rows that NeMo-RL's loader keeps: paths below the folder above the meta file's."""
    base, kept = str(data_path.parent.parent), []
    for entry in json.loads(data_path.read_text()).values():
        for line in Path(f"{base}/{entry['annotation']}").read_text().splitlines():
            row = json.loads(line)
            assert isinstance(row["chosen"] + row["rejected"] + row["question"], str)
            names = [row["image"]] if isinstance(row["image"], str) else row["image"]
            paths = [Path(f"{base}/{entry['root']}", name) for name in names]
            if len(paths) == 1 and paths[0].exists():
                kept.append(paths[0])
    return kept


def ours(output: Path) -> dict[str, bytes]:
    return {name: (output / name).read_bytes() for name in (*OURS, mmpr.META)}


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.name != index.MARK]


def test_the_loader_finds_every_row_and_the_manifest_counts_what_it_takes(prepare, published, tmp_path):
    output = prepare()
    kept = rows_of_loader(output / "meta/meta_public.json")
    assert len(kept) == 40
    assert sorted(path.read_bytes() for path in kept) == sorted(published.images.values())
    manifest = read_json(output / "manifest.json")
    assert manifest["blend"] == "mpo"
    assert manifest["source"].items() >= {"name": "OpenGVLab/MMPR", "revision": "0" * 40}.items()
    assert [manifest[side]["rows"] for side in ("train", "validation")] == [36, 4]
    for side, name in (("train", "train-split.jsonl"), ("validation", "val-split.jsonl")):
        assert manifest[side]["sha256"] == sha256_file(output / name)
        assert manifest[side]["bytes"] == (output / name).stat().st_size
    lines = [json.loads(line) for line in (output / "train-split.jsonl").read_text().splitlines()]
    assert [line["subset"] for line in lines[:-1]] == list(SUBSETS)
    assert lines[0]["sha256"] == sha256_file(output / lines[0]["annotation"])
    assert (lines[0]["rows"], lines[0]["kept"], lines[-1]["images"]["files"]) == (24, 24, 40)
    assert json.loads((output / "val-split.jsonl").read_text()) == {"loader": "mmpr", "seed": 42, "rows": 4}
    assert not leftovers(tmp_path)


def test_a_second_run_and_any_number_of_workers_give_the_same_files(prepare):
    first = ours(prepare())
    assert ours(prepare()) == first
    assert ours(prepare("others", threads=4)) == first


def test_the_splits_follow_the_content_and_not_how_it_is_packed(prepare, published):
    first = read_json(prepare() / "manifest.json")
    published.images = dict(reversed(published.images.items()))
    assert read_json(prepare() / "manifest.json") == first
    name = next(iter(published.images))
    published.images[name] = png(9999)
    assert read_json(prepare() / "manifest.json")["train"]["sha256"] != first["train"]["sha256"]


def test_a_new_revision_leaves_nothing_of_the_old_one(prepare, published):
    prepare()
    gone = "MMPR/images/CLEVR/part/8.png"
    del published.images[gone]
    published.rows["MMPR/annotations/CLEVR_math_sr0.5.jsonl"].pop()
    output = prepare()
    assert not (output / gone).exists()
    assert len(rows_of_loader(output / mmpr.META)) == 39


def test_the_archives_may_lie_at_another_depth(prepare, published):
    published.images = {f"a/{name}": content for name, content in published.images.items()} | {"a/README.md": b"hello"}
    published.rows = {name.removeprefix("MMPR/"): rows for name, rows in published.rows.items()}
    assert len(rows_of_loader(prepare() / mmpr.META)) == 40


def test_rows_that_the_loader_skips_are_counted(prepare, published, capsys):
    rows = published.rows["MMPR/annotations/openbmb_RLAIF-V.jsonl"]
    rows[3] = pair(["part/0.png", "part/1.png"])
    rows[4] = pair(["part/4.png"])
    rows[5] = pair("part/../part/5.png")
    output = prepare()
    assert read_json(output / "check.json") == {
        "blend": "mpo",
        "format": "mmpr",
        "subsets": 3,
        "rows": 40,
        "several_images": 1,
        "missing_images": 0,
        "kept": 39,
        "images": 40,
    }
    assert len(rows_of_loader(output / mmpr.META)) == 39
    assert read_json(output / "manifest.json")["train"]["rows"] == 36
    published.meta["ScienceQA"]["length"] = 8
    prepare()
    assert "ScienceQA.jsonl: 7 rows, but meta.json says 8" in capsys.readouterr().out


def test_missing_images_are_refused_unless_their_share_may_be_missing(refused, prepare, published):
    for number in (1, 2):
        del published.images[f"MMPR/images/RLAIF-V/part/{number}.png"]
    assert refused() == (
        "source/mpo/images.zip: lacks the images of 2 of 40 rows, which the loader would skip: openbmb/RLAIF-V (2 of "
        "24); fetch both archives at one revision, or let it pass (missing_images of the blend)"
    )
    output = prepare(missing_images=0.05)
    assert len(rows_of_loader(output / mmpr.META)) == 38
    assert read_json(output / "check.json")["missing_images"] == 2


def test_missing_annotations_are_refused(refused, published):
    del published.rows["MMPR/annotations/ScienceQA.jsonl"]
    assert refused() == (
        "source/mpo/annotations.zip: has no annotations for 1 of 3 subsets of meta.json: "
        "MMPR/annotations/ScienceQA.jsonl; fetch both files at one revision"
    )


@pytest.mark.parametrize("name", ["meta.json", "annotations.zip", "images.zip"])
def test_a_missing_file_is_named(refused, published, name):
    published.write()
    (published.folder / name).unlink()
    assert refused(write=False) == f"source/mpo: has no {name}; fetch the blend again, or put it there"


@cases("mmpr.rows", "row", "why")
def test_a_row_that_would_stop_the_loader_is_named(refused, published, row, why):
    published.rows["MMPR/annotations/ScienceQA.jsonl"][6] = row
    assert f"results/data/mpo/MMPR/annotations/ScienceQA.jsonl:7: {why}" in refused(threads=2)


@cases("mmpr.entries", "entry", "why")
def test_another_kind_of_meta_file_is_refused(refused, published, entry, why):
    published.meta["CLEVR"] = entry
    assert why in refused()


def test_too_few_rows_are_refused(refused, published):
    published.meta = {"ScienceQA": published.meta["ScienceQA"]}
    assert "of 7 rows the loader keeps 7, too few to hold any out; is it all of MMPR?" in refused()


def test_a_truncated_archive_is_one_clear_error(refused, published):
    images = published.write() / "images.zip"
    os.truncate(images, images.stat().st_size // 2)
    assert refused(write=False) == (
        "source/mpo/images.zip: damaged or cut short (File is not a zip file); delete the file and the copy in the hub's "
        "cache, and fetch again"
    )


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_names_the_member(refused, published, kind):
    images = published.write() / "images.zip"
    with zipfile.ZipFile(images, "w", kind) as archive:
        for name, content in published.images.items():
            archive.writestr(name, content)
    with zipfile.ZipFile(images) as archive:
        info = archive.getinfo("MMPR/images/CLEVR/part/3.png")
    content = bytearray(images.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 4
    images.write_bytes(content)
    message = refused(write=False, threads=2)
    assert message.startswith("source/mpo/images.zip: damaged or cut short (MMPR/images/CLEVR/part/3.png: ")


def test_a_member_that_leads_out_of_its_folder_is_refused_before_anything_is_extracted(refused, published, tmp_path):
    with zipfile.ZipFile(published.write() / "images.zip", "a") as archive:
        archive.writestr("MMPR/images/../../../escaped", "/etc/passwd")
    assert refused(write=False).endswith("/escaped' leads out of the folder; do not trust the archive")
    assert not list(tmp_path.rglob("*.png")) and not list(tmp_path.rglob("escaped"))


def test_images_that_someone_spoilt_are_extracted_again_and_a_killed_try_leaves_nothing(prepare, published, tmp_path):
    expected = ours(prepare())
    output = tmp_path / "results/data/mpo"
    image = output / "MMPR/images/CLEVR/part/0.png"
    image.write_bytes(bytes(image.stat().st_size))
    (output / "MMPR/images/old.png").write_bytes(b"x")
    assert ours(prepare()) == expected and image.read_bytes() == png(0)
    found = {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.png")}
    assert found == published.images and not leftovers(output)


def test_an_archive_that_the_disk_cannot_hold_is_refused_before_anything_is_unpacked(refused, monkeypatch):
    monkeypatch.setattr(index.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=3))
    assert refused().endswith("kB at results/data/mpo/MMPR/annotations, but 3 bytes are free")


def test_an_archive_of_something_else_is_refused(refused, published):
    published.images = {"data/a.png": png(1)}
    assert "images.zip: has no folder images/ with files; is the file the dataset's published archive?" in refused()


# MMPR-Tiny


def tiny_row(number: int, **changed) -> dict:
    row = {
        "data_source": "mmpr",
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": f"<image>{number}?"}],
        "images": [{"path": f"MMPR-Tiny/images/{number}.png", "bytes": None}],
        "reward_model": {"ground_truth": str(number), "style": "rule"},
    }
    return row | changed


@pytest.fixture
def prepare_tiny(tmp_path):
    """Prepares an MMPR-Tiny of these rows; returns the folder."""
    source, output = tmp_path / "source/vision", tmp_path / "results/data/vision"
    source.mkdir(parents=True)
    write_json(
        tmp_path / "record.json",
        {"blends": {"vision": {"source": "OpenGVLab/MMPR-Tiny", "revision": "1"}}, "files": {}},
    )
    pack(source / "images.zip", {f"images/{number}.png": png(number) for number in range(40)})

    def run(rows: list[dict] | None = None, holdout: int = 3, threads: int = 2) -> Path:
        if rows is not None:
            pq.write_table(pa.Table.from_pylist(rows), source / "mmpr_tiny.parquet")
        mmpr_tiny.prepare_mmpr_tiny(source, tmp_path / "record.json", output, holdout, threads)
        return output

    return run


def test_the_tiny_loader_finds_its_mark_its_table_and_every_image(prepare_tiny):
    output = prepare_tiny([tiny_row(number) for number in range(40)])
    assert (output / ".mmpr_ready").exists()
    table = pq.read_table(output / "mmpr_tiny.parquet").to_pylist()
    paths = [output / row["images"][0]["path"] for row in table]
    assert [path.read_bytes() for path in paths] == [png(number) for number in range(40)]
    manifest = read_json(output / "manifest.json")
    assert [manifest[side]["rows"] for side in ("train", "validation")] == [37, 3]
    assert json.loads((output / "val-split.jsonl").read_text()) == {"loader": "mmpr_tiny", "first_rows": 3}
    assert read_json(output / "check.json") == {
        "blend": "vision",
        "format": "mmpr_tiny",
        "rows": 40,
        "kept": 40,
        "several_images": 0,
        "images": 40,
    }
    first = {name: (output / name).read_bytes() for name in OURS}
    prepare_tiny(threads=1)
    assert {name: (output / name).read_bytes() for name in OURS} == first


def test_the_tiny_loader_holds_out_no_more_than_a_tenth(prepare_tiny):
    manifest = read_json(prepare_tiny([tiny_row(number) for number in range(25)], holdout=500) / "manifest.json")
    assert [manifest[side]["rows"] for side in ("train", "validation")] == [23, 2]


@cases("mmpr.tiny", "changed", "why")
def test_a_row_that_would_stop_the_tiny_loader_is_named(prepare_tiny, tmp_path, changed, why):
    rows = [tiny_row(number) for number in range(40)]
    rows[5] = tiny_row(5, **changed)
    with pytest.raises(UserError, match=rf"the loader would stop at 1 of 40 rows(.|\n)*row 5: {why}"):
        prepare_tiny(rows)
    output = tmp_path / "results/data/vision"
    assert not any((output / name).exists() for name in (*OURS, ".mmpr_ready", "mmpr_tiny.parquet"))


def test_a_damaged_table_is_one_clear_error(prepare_tiny, tmp_path):
    prepare_tiny([tiny_row(number) for number in range(40)])
    table = tmp_path / "source/vision/mmpr_tiny.parquet"
    os.truncate(table, table.stat().st_size // 2)
    with pytest.raises(UserError, match=r"mmpr_tiny.parquet: .*damaged, or not MMPR-Tiny's table; .*fetch again"):
        prepare_tiny()
    pq.write_table(pa.table({"prompt": ["a"]}), table)
    with pytest.raises(UserError, match=r"mmpr_tiny.parquet: .*damaged, or not MMPR-Tiny's table"):
        prepare_tiny()


# The release's own loaders


def loader_of_release(module: str, monkeypatch) -> types.ModuleType:
    """A loader of the checkout, with stand-ins for what it imports of NeMo-RL."""
    named = {
        "nemo_rl.data.interfaces": {"TaskDataSpec": object},
        "nemo_rl.data.llm_message_utils": {"strip_image_tokens_from_text": str},
        "nemo_rl.data.datasets.raw_dataset": {"RawDataset": object},
    }
    for name in ("nemo_rl", "nemo_rl.data", "nemo_rl.data.datasets", *named):
        double = types.ModuleType(name)
        vars(double).update(named.get(name, {}))
        monkeypatch.setitem(sys.modules, name, double)
    folder = Path(os.environ["STAGECOACH_NEMO_RL"], "nano-v3-omni/nemo_rl/data/datasets/response_datasets")
    loader = types.ModuleType(module)
    exec((folder / f"{module}.py").read_text(), vars(loader))  # noqa: S102
    return loader


@pytest.mark.skipif(
    not os.environ.get("STAGECOACH_NEMO_RL"),
    reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts by release",
)
def test_the_releases_own_loaders_take_the_rows_that_the_manifests_count(prepare, prepare_tiny, published, monkeypatch):
    published.rows["MMPR/annotations/openbmb_RLAIF-V.jsonl"][3] = pair(["part/0.png", "part/1.png"])
    tiny = prepare_tiny([tiny_row(number) for number in range(40)])
    loader = loader_of_release("mmpr_tiny", monkeypatch)
    sides = loader.prepare_mmpr_tiny_dataset(cache_dir=str(tiny), val_size=3)
    manifest = read_json(tiny / "manifest.json")
    assert {side: len(rows) for side, rows in sides.items()} == {side: manifest[side]["rows"] for side in sides}
    assert all(Path(row["images"][0]).is_file() for rows in sides.values() for row in rows)
    write_json(
        tiny.parents[2] / "record.json", {"blends": {"mpo": {"source": "OpenGVLab/MMPR", "revision": "1"}}, "files": {}}
    )
    output = prepare()
    sides = loader_of_release("mmpr", monkeypatch).prepare_mmpr_dataset(str(output / mmpr.META), "train")
    manifest = read_json(output / "manifest.json")
    assert {side: len(rows) for side, rows in sides.items()} == {side: manifest[side]["rows"] for side in sides}
