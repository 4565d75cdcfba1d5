"""What each release's own run_sft.py makes of rows: the tokens and the loss mask that scripts/.../demonstrations.py tells."""

import base64
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import trl
from PIL import Image

from scripts.backends.nemo_rl.command import overrides_of
from scripts.backends.nemo_rl.demonstrations import as_read, chunks_of, parts_of, write_rows
from scripts.backends.nemo_rl.releases import load_releases
from scripts.backends.nemo_rl.settings import NemoRlSettings
from scripts.errors import UserError
from scripts.model.processor import load_processor, make_processor, make_tokenizer
from scripts.recipe.load import load_recipe
from scripts.rows.prompts import render
from tests.conftest import ROOT
from tests.production import CHECKOUTS, PYTHON, TRIED, needs_nemo_rl

PROGRAM, LENGTH = Path(__file__).with_name("cpu") / "sft_rows.py", 1500
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


def said(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=False)]


CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "3"}
PLAIN = {
    "plain": {"messages": said("2+2", "4")},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *said("2+2", "4")]},
    "parts": {"messages": said([{"type": "input_text", "text": "2"}, {"type": "text", "text": "+2"}], "4")},
    "turns": {"messages": said("2+2", "4", "3+3", "6")},
    "thoughts": {"messages": said("2+2", "<think>\nhm\n</think>\n\n4", "3+3", "<think>\nso\n</think>\n\n6")},
    "long": {"messages": said("x" * LENGTH, "4")},
}
TOOLS = {
    "tool": {"messages": [*said("1+2"), CALLED, RESULT, *said("", "3")[1:]], "tools": [TOOL]},
    "results": {"messages": [*said("1+2"), CALLED, RESULT, RESULT, *said("", "3")[1:]], "tools": [TOOL]},
}

pytestmark = needs_nemo_rl


def rows_of(release, rows, stage, folder, tokenizer, config="sft.yaml"):
    """What the release's own code makes of rows, by their names."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    path = folder / "read/rows.jsonl"
    path.parent.mkdir()
    write_rows(folder / "rows.jsonl", path)
    settings = {"++policy.tokenizer": {"name": str(tokenizer), "chat_template": "default"}, "data": stage.reads}
    settings |= {"policy.max_total_sequence_length": LENGTH, "sft": stage.sft}
    told = [word.replace("'{train}'", str(path)) for word in overrides_of(settings | release.sft_data)]
    told = [word.replace("'{validation}'", str(path)) for word in told]
    checkout = Path(CHECKOUTS, release.name).resolve()
    environment = os.environ | {
        "PYTHONPATH": f"{checkout}:{checkout}/examples",
        "HF_DATASETS_CACHE": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    command = [PYTHON, PROGRAM, f"examples/configs/{config}", *told]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(rows), done.stderr[-2000:]
    return dict(zip(rows, found, strict=True))


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training", "llama3"])
@pytest.mark.parametrize("name", TRIED)
def test_the_releases_make_the_tokens_and_masks_that_are_told(tmp_path, name, template):
    release = load_releases()[name]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer.bos_token = tokenizer.pad_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    processor, outcomes = load_processor(tmp_path / "tokenizer"), set()
    rows = PLAIN | (
        TOOLS
        if any("use_preserving_dataset" in reader for reader in release.sft_data.values()) and template != "llama3"
        else {}
    )
    known = Path(CHECKOUTS, name, "examples/configs/sft.yaml").read_text()
    last = {"only_unmask_final": True} if "only_unmask_final" in known else {}  # since v0.7.0
    for number, (data, sft) in enumerate((({}, {}), ({"add_generation_prompt": True, "add_eos": False}, last))):
        policy = {"max_total_sequence_length": LENGTH}
        stage = NemoRlSettings.model_construct(algorithm="sft", data=data, sft=sft, policy=policy)
        (folder := tmp_path / str(number)).mkdir()
        for row, real in rows_of(release, rows, stage, folder, tmp_path / "tokenizer").items():
            try:
                chunks_of(rows[row], row, processor, stage)
            except UserError as error:
                outcomes.add((row, str(error).split(":")[1].strip()))
                read = as_read(rows[row])
                whole = render(read["messages"], processor, tools=read.get("tools"))
                assert whole not in processor.decode(real["ids"]), f"{row}: refused, though it is read as it is meant"
                continue
            parts = parts_of(rows[row], row, processor, stage)
            if not real["counts"]:
                assert not any(is_learnt for _, is_learnt, _ in parts), row
                outcomes.add((row, "masked"))
                continue
            told = [(token, is_learnt) for _, is_learnt, ids in parts for token in ids]
            assert told == list(zip(real["ids"], real["mask"], strict=True)), row
    refused = {"turns", "thoughts", *TOOLS} if template == "qwen3" else {"results"} if "qwen3" in template else set()
    assert {row for row, what in outcomes if what != "masked"} == refused & rows.keys()
    assert ("long", "masked") in outcomes


@pytest.mark.parametrize("name", ["v0.7.0", "main"])  # nano-v3-omni asks for a config of the model, which is none here
def test_a_picture_becomes_the_tokens_that_its_processor_makes_and_the_answer_is_learnt(tmp_path, name):
    processor = make_processor(load_recipe(ROOT / "config/recipes/tiny-omni.yaml").model)
    processor.save_pretrained(tmp_path / "processor")
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(picture, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    shown = [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": "colour?"}]
    rows = {"picture": {"messages": said(shown, "red")}, "none": {"messages": said("colour?", "red")}}
    stage = NemoRlSettings.model_construct(algorithm="sft", data={}, sft={}, policy={})
    folder, config = tmp_path / "rows", "sft_vlm_3B.yaml"
    folder.mkdir()
    found = rows_of(load_releases()[name], rows, stage, folder, tmp_path / "processor", config)
    learnt = {
        row: [id for id, is_learnt in zip(real["ids"], real["mask"], strict=True) if is_learnt]
        for row, real in found.items()
    }
    assert learnt["picture"] == learnt["none"]
    assert processor.tokenizer.decode(learnt["none"]) == "<|assistant|>red<|end|>"
    each = [real["ids"].count(processor.image_token_id) for real in found.values()]
    assert each == [4, 0] and len(found["picture"]["ids"]) == len(found["none"]["ids"]) + 4
