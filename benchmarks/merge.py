"""Measure how far a merged export lies from its base with the adapters, and the memory that merging takes.

Five architectures with random weights, in float32 and bfloat16, with adapters over all linear layers and experts; then
a larger model in bfloat16, merged in a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import logging as transformers_logging

from scripts.backends.trl.merge import divergence, log_probabilities, write_merged
from scripts.model.load import load_model
from tests.pretrained import ARCHITECTURES, save_pretrained

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 16000}


def adapt(base: Path, folder: Path) -> None:
    """Save adapters with random weights over a base."""
    torch.manual_seed(1)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load_model(base, "auto"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def agreement(architecture: str, dtype: torch.dtype, place: Path) -> str:
    """A row of the table: the type written, the adapters' effect, and what merging them changed."""
    base, adapter, merged = (place / name for name in ("base", "adapter", "merged"))
    save_pretrained(architecture, base)
    load_model(base).to(dtype).save_pretrained(base)
    adapt(base, adapter)
    written = write_merged(base, adapter, merged)["dtype"]
    wanted = log_probabilities(PeftModel.from_pretrained(load_model(base), str(adapter)))
    found = log_probabilities(load_model(merged))
    effect = divergence(wanted, log_probabilities(load_model(base)))
    most = (wanted - found).abs().max().item()
    own = str(dtype).removeprefix("torch.")
    return f"| {architecture} | {own} | {written} | {effect:.1e} | {divergence(wanted, found):.1e} | {most:.1e} |"


def memory(place: Path) -> str:
    """The most memory that merging a larger model holds beyond the libraries, beside the model's own size."""
    config = AutoConfig.for_model("llama", **LARGE, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place / "large")
    adapt(place / "large", place / "large-adapter")
    size = sum(path.stat().st_size for path in (place / "large").glob("*.safetensors"))
    command = [sys.executable, __file__, "--merge", str(place)]
    before, after = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    ratio = (after - before) / size
    return f"Merging {size / 1e9:.2f} GB in bfloat16 held {(after - before) / 1e9:.2f} GB at most: {ratio:.2f} times."


def most_memory() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/merge.md"))
    parser.add_argument("--merge", type=Path, help="merge the large model below this folder, and print the memory held")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if arguments.merge:
        before = most_memory()
        write_merged(arguments.merge / "large", arguments.merge / "large-adapter", arguments.merge / "large-merged")
        print(json.dumps([before, most_memory()]))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = [
            agreement(name, dtype, place / f"{name}-{dtype}")
            for name in ARCHITECTURES
            for dtype in (torch.float32, torch.bfloat16)
        ]
        held = memory(place)
    head = "| architecture | base | export | effect, nats | apart, nats | most, log-probability |"
    text = f"""# Merged exports beside their base with the adapters

`python benchmarks/merge.py` wrote this: small models with random weights, adapters of rank 8 over all linear layers and
experts. *Effect* is the mean KL divergence of the base from base plus adapters, *apart* that of the export as read from
its files, both over 256 tokens in float32; *most* is the largest difference of a log-probability.

{head}
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}

{held}
"""
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
