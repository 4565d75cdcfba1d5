"""Exports keep the form in which their model came: transformers 4 loads them, with the tokens and logits of 5.

`make transformers-4` makes the environment of transformers 4; without it these tests are skipped. `make loaders` holds the
same exports against vLLM and llama.cpp.
"""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft", reason="envs/trl.txt is not installed")

from tests.conftest import ROOT
from tests.loaders.compare import compare, read_by, write_parents
from tests.loaders.exports import make_exports, write_spec
from tests.loaders.parents import ARCHITECTURES

PYTHON = Path(os.environ.get("STAGECOACH_TRANSFORMERS_4_PYTHON", ROOT / ".venv-transformers-4/bin/python"))

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make transformers-4 has not been called")


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> dict[str, Path]:
    """Pretrained models as transformers 4 writes them."""
    return write_parents(PYTHON, tmp_path_factory.mktemp("parents"), ARCHITECTURES)


@pytest.fixture(scope="module")
def exports(parents, tmp_path_factory) -> dict[str, Path]:
    return make_exports(parents, tmp_path_factory.mktemp("exports"))


def test_transformers_4_reads_every_export_as_5_does(exports, tmp_path):
    spec = tmp_path / "spec.json"
    write_spec(exports, spec)
    found = compare(read_by(sys.executable, "by_transformers", spec), read_by(PYTHON, "by_transformers", spec), spec)
    assert [each.export for each in found] == [*exports]
    assert [each for each in found if not each.same_tokens or each.largest > 1e-5] == []


def test_an_export_has_the_parents_files_with_only_what_changed(parents, exports):
    """The recipe names a pad token and a template; training changes weights, and a reward model has a head."""
    for name, parent in parents.items():
        before = {path.name: path.read_bytes() for path in parent.iterdir()}
        for kind in ("pretrained", "trained", "adapters merged", "reward model"):
            if (folder := exports.get(f"{name}, {kind}")) is None:
                continue
            after = {path.name: path.read_bytes() for path in folder.iterdir()}
            changed = {file for file in before.keys() | after.keys() if before.get(file) != after.get(file)}
            settings = {
                "tokenizer_config.json",
                "special_tokens_map.json",
                "generation_config.json",
                "chat_template.jinja",
            }
            assert changed - {"model.safetensors"} == settings | ({"config.json"} if kind == "reward model" else set())
            assert keys_changed(before, after, "tokenizer_config.json") == {"pad_token"}
            assert keys_changed(before, after, "special_tokens_map.json") == {"pad_token"}
            assert keys_changed(before, after, "generation_config.json") == {"pad_token_id"}
            if kind == "reward model":
                head = {"architectures", "id2label", "label2id", "pad_token_id"}
                assert keys_changed(before, after, "config.json") == head


def keys_changed(before: dict[str, bytes], after: dict[str, bytes], name: str) -> set[str]:
    """The keys of a JSON file that are new, gone or have another value."""
    old, new = json.loads(before[name]), json.loads(after[name])
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
