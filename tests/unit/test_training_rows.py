"""The rows that backend trl trains on: on disk, tokenized once, and packed without padding."""

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest

from scripts.errors import UserError
from scripts.files import sha256_file, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from tests.conftest import ROOT, SHORT
from tests.pretrained import tokenizer
from tests.stages import Stages

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="envs/trl.txt is not installed")

ROWS, BATCH = 300, 4


class Handmade(Stages):
    """Stages whose blend of demonstrations is written here, in answers of unequal length."""

    def __init__(self, directory):
        self.directory, self.recipe = directory, load_recipe(SHORT)
        split = self.split("sft")
        split.parent.mkdir(parents=True)
        rows = [
            {
                "agent_ref": {"name": "math_with_judge_simple_agent"},
                "messages": [
                    {"role": "user", "content": f"What is {number}?"},
                    {"role": "assistant", "content": f"{number} " * (1 + number % 7)},
                ],
            }
            for number in range(ROWS)
        ]
        split.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.describe()

    def describe(self):
        """Write the split's manifest."""
        split = self.split("sft")
        described = {"rows": len(split.read_text().splitlines()), "sha256": sha256_file(split)}
        write_json(split.with_name("manifest.json"), {"train": described, "validation": described})

    def sft(self, run, steps=2, **policy):
        """A job of SFT with such settings of its policy, those that are not in its config."""
        job = self.job("sft", run, steps)
        values = job.config.policy.model_copy(update={"train_global_batch_size": BATCH})
        job = replace(job, config=job.config.model_copy(update={"policy": values}))
        stated = job.settings.policy.model_validate(job.settings.policy.model_dump() | policy)
        return replace(job, settings=job.settings.model_copy(update={"policy": stated}))


@pytest.fixture
def stages(tmp_path):
    return Handmade(tmp_path)


@pytest.fixture
def read(stages):
    """What the rows of a job are read by, for a tokenizer and a longest row."""
    from scripts.backends.trl.rows import training_rows
    from scripts.backends.trl.tokenization import DEMONSTRATIONS, tokenize_demonstrations

    def rows(count=ROWS, max_length=64, share=1.0, **changes):
        prepare = partial(tokenize_demonstrations, processor=tokenizer(**changes), max_length=max_length, variables={})
        job = stages.sft("sft")
        job = replace(job, settings=job.settings.model_copy(update={"max_truncated_share": share}))
        return training_rows(job, count, DEMONSTRATIONS, prepare)

    return rows


def kept(stages):
    """The key of the rows that are kept, and the file that holds them."""
    (file,) = stages.directory.glob("tokens/*/*")
    return file.parent.name, file


def test_rows_are_read_from_disk_in_file_order_and_as_many_as_are_asked_for(stages, read):
    rows = read(count=200)
    assert [file["filename"] for file in rows.cache_files] == [str(kept(stages)[1])]
    assert len(rows) == 200 and len(read(count=10**9)) == ROWS
    texts = tokenizer().batch_decode(read()[:]["input_ids"])
    assert all(f"What is {number}?" in text for number, text in enumerate(texts))


def test_every_epoch_of_a_shuffled_stage_has_each_row_once_in_an_order_of_its_own():
    from scripts.backends.trl.rows import epochs_in_random_order

    order = epochs_in_random_order(rows=50, count=130, seed=3)
    epochs = order[:50], order[50:100], order[100:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert len(epochs[2]) == len(set(epochs[2])) == 30
    assert len({tuple(epoch[:30]) for epoch in (*epochs, range(50))}) == 4
    assert order[:70] == epochs_in_random_order(rows=50, count=70, seed=3)  # whatever is trained after it
    assert order != epochs_in_random_order(rows=50, count=130, seed=4)
    assert epochs_in_random_order(rows=8, count=8, seed=0) == [3, 4, 0, 2, 6, 5, 7, 1]  # in every version


def test_a_stage_of_which_too_many_rows_are_cut_is_refused_and_others_say_how_many(read, stages, capsys):
    read(max_length=64)
    assert "cut" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"split.jsonl: 300 of 300 rows \(100.0%\) are cut at .* of stages.sft$"):
        read(max_length=8, share=0.99)
    assert list((stages.directory / "tokens").iterdir()) == []
    read(max_length=8, share=1.0)
    assert "sft: 300 of 300 rows (100.0%) are cut" in capsys.readouterr().out


def test_a_second_attempt_finds_them_and_whatever_changes_them_makes_them_anew(stages, read, monkeypatch, tmp_path):
    read()
    first, file = kept(stages)
    made = file.stat().st_mtime_ns
    read()
    assert kept(stages) == (first, file) and file.stat().st_mtime_ns == made
    keys = {first}
    template = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    for changes in ({"chat_template": template}, {"max_length": 32}, {"count": 200}, {"eos_token": "<|endoftext|>"}):
        read(**changes)
        assert kept(stages)[0] not in keys  # and the ones before are gone
        keys.add(kept(stages)[0])
    split = stages.split("sft")
    split.write_text(split.read_text().replace("What is 7?", "What is 8?"))
    stages.describe()
    read()
    assert kept(stages)[0] not in keys


def test_edited_code_makes_them_anew_and_what_fails_leaves_nothing(stages, tmp_path, monkeypatch):
    from scripts.backends.trl.rows import training_rows
    from scripts.backends.trl.tokenization import DEMONSTRATIONS

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    code = tmp_path / "edited_code.py"
    keys = set()
    for ids in ("[1]", "[1, 2]", "missing"):
        row = f"{{'input_ids': {ids}, 'labels': [1], 'pictures': []}}"
        code.write_text(f"def prepare(lines, processor):\n    return [{row} for line in lines]\n")
        sys.modules.pop("edited_code", None)
        importlib.invalidate_caches()
        prepare = partial(importlib.import_module("edited_code").prepare, processor=tokenizer())
        if ids == "missing":
            with pytest.raises(NameError):
                training_rows(stages.sft("sft"), ROWS, DEMONSTRATIONS, prepare)
        else:
            assert training_rows(stages.sft("sft"), ROWS, DEMONSTRATIONS, prepare)[0]["input_ids"] == json.loads(ids)
            keys.add(kept(stages)[0])
    assert len(keys) == 2 and list((stages.directory / "tokens").iterdir()) == []


@pytest.mark.parametrize("name", ["sft", "dpo", "mpo", "kto", "text", "distillation"])
def test_the_order_of_rows_is_in_a_config_only_when_it_is_set(name):
    recipe = load_recipe(ROOT / "tests/algorithms.yaml")
    stage = recipe.stages[name]
    shuffled = stage.model_copy(update={"data": type(stage.data)(shuffle=True)})
    plain = resolve_stage(recipe, name).values()
    other = resolve_stage(recipe.model_copy(update={"stages": recipe.stages | {name: shuffled}}), name).values()
    assert "shuffle" not in plain.get("data", {}) and other["data"]["shuffle"] is True
    assert {key: value for key, value in other.items() if key != "data"} == {
        key: value for key, value in plain.items() if key != "data"
    }
