"""A quantised export beside a stage's: made without training, scored beside the stage's own, on the stage's page."""

import json
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="envs/trl.txt is not installed"),
]
RLHF = "rlhf: {algorithm: grpo, parent: sft, blend: rlhf"


def test_a_chain_is_quantised_and_scored_without_training(copied):
    def read(path: str) -> dict:
        return json.loads((copied.results / path).read_text())

    trained = (copied.results / "rlhf/ckpt/record.json").read_bytes()
    for settings in ("{format: int4, group_size: 32}", "{format: fp8}"):
        copied.edit(RLHF, f"{RLHF}, quantize: {settings}")
        output = copied.snakemake()
        assert "rule quantize" in output and "rule train" not in output
        copied.edit(f"{RLHF}, quantize: {settings}", RLHF)
        scores, export = read("rlhf/quantized/eval.json"), read("rlhf/quantized/hf/record.json")
        assert scores["mean"]["before"] == read("rlhf/eval.json")["mean"]["after"]
        assert scores["content"] == export["content"] != read("rlhf/hf/record.json")["content"]
        assert export["quantized"]["format"] in settings
        config = read("rlhf/quantized/hf/model/config.json")["quantization_config"]
        assert config["quant_method"] == "compressed-tensors"
    assert (copied.results / "rlhf/ckpt/record.json").read_bytes() == trained
    assert "Quantised: held-out scores" in (copied.results / "rlhf/stage.html").read_text()
