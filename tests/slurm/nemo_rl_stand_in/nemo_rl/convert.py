"""The converters from a Megatron checkpoint to a Hugging Face directory; they differ in their arguments."""

import argparse
import json
import os
from pathlib import Path

import yaml
from safetensors.torch import save_file

from nemo_rl import weights

PARALLEL = ("tp", "pp", "ep", "etp")


def main(*, parallel: bool) -> None:
    """Convert what the command line says: by one process, or by as many as torchrun starts, of which the first writes."""
    parser = argparse.ArgumentParser()
    for name in ("--config", "--megatron-ckpt-path", "--hf-ckpt-path"):
        parser.add_argument(name, type=Path, required=True)
    if parallel:
        for name in PARALLEL:
            parser.add_argument(f"--{name}", type=int, default=1)
    else:
        parser.add_argument("--hf-model-name")
        parser.add_argument("--no-strict", action="store_true")
    arguments = parser.parse_args()
    policy = yaml.safe_load(arguments.config.read_text())["policy"]
    model = (not parallel and arguments.hf_model_name) or policy["model_name"]
    if not parallel or os.environ["RANK"] == "0":
        export(arguments.megatron_ckpt_path, arguments.hf_ckpt_path, model, policy["tokenizer"]["name"])


def export(iteration: Path, output: Path, model: str, tokenizer: str) -> None:
    """Write the Hugging Face directory; FileExistsError if it is there, OSError if the model it came from is not."""
    if output.exists():
        raise FileExistsError(f"HF checkpoint already exists at {output}")
    for name in (model, tokenizer):
        if Path(name).is_absolute() and not Path(name).is_dir():
            raise OSError(f"{name} is neither a directory nor the id of a repository")
    tensors = weights.read(iteration)
    output.mkdir(parents=True)
    shards = [dict(list(tensors.items())[:1]), dict(list(tensors.items())[1:])]
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write(output / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})

    own = Path(model, "config.json")
    config = json.loads(own.read_text()) if own.exists() else {"model_type": "nemotron_h", "vocab_size": 16}
    config.pop("dtype", None)
    _write(output / "config.json", config | {"torch_dtype": "bfloat16"})
    weights.write_tokenizer(tokenizer, output)


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
