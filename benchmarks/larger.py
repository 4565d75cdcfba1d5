"""What larger models take by the chain of qwen3-gsm8k: hours and memory on this machine, a GPU of 24 GB, eight of 80.

    python benchmarks/larger.py --output benchmarks/larger.md    (five minutes on two idle cores)

A layer's cost is measured here: models of one and of five layers, as wide as Qwen3's, train adapters in bfloat16 and
decode, all steps with TOKENS tokens or ROWS rows; the difference counts for each further layer, the rest for embedding
and output layer. The same sum stands beside all 30 layers of SmolLM2's shape, measured. Hours of GPUs are reckoned and
not measured, by what the chips can do at best: at UTILISATION of the peak, 6 operations a parameter and token with
adapters and activations computed anew, 8 with all weights; a decoded token reads all weights at half the bandwidth.
Memory is that of docs/memory.md at LONGEST tokens; mean rows have ROW tokens, prompts PROMPT and answers ANSWER.
"""

import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.common import ROOT, command_line, head, row
from scripts.backends.trl.placing import estimate, memory_of_machine
from scripts.model.shape import Shape
from scripts.recipe.load import load_recipe

RECIPE = ROOT / "config/recipes/qwen3-gsm8k.yaml"
LONGEST, ROW, PROMPT, ANSWER = (
    640,
    200,
    100,
    200,
)  # tokens: the longest sequence; a mean row, prompt and answer of GSM8K
TOKENS, ROWS, TIMES = 512, 32, 5
UTILISATION = 0.3


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool, words: int = 151_936) -> Qwen3Config:
    """Return the shape of a Qwen3 (arXiv:2505.09388, table 1)."""
    return Qwen3Config(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


SMOLLM2 = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
MODELS = {
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, tied=False),
}


@dataclass(frozen=True)
class Machine:
    """What stands in the table; how the recipe's policy changes; a GPU's bytes, operations and bytes a second."""

    name: str
    policy: dict[str, Any]
    ranks: int = 1
    memory: float | None = None
    operations: float = 0
    bandwidth: float = 0


LORA, SHARDED = {"dim": 32, "alpha": 32}, {"enabled": True, "activation_checkpointing": True}
HERE = Machine("2 cores of this machine", {"generation": {"backend": "transformers", "max_new_tokens": 512}})
# Operations of dense bfloat16 and bandwidth as NVIDIA's data sheets of the RTX 4090 and the H100 SXM have them.
GPUS = (
    Machine("1 GPU of 24 GB", {}, 1, 24 * 2**30, 165e12, 1.0e12),
    Machine("1 GPU of 24 GB, nf4", {"lora": LORA | {"quantization": "nf4"}}, 1, 24 * 2**30, 165e12, 1.0e12),
    Machine("8 GPUs of 80 GB, whole", {"lora": None, "dtensor_cfg": SHARDED}, 8, 80 * 2**30, 989e12, 3.35e12),
)


def shape_of(config: PreTrainedConfig) -> Shape:
    """Return the shape of a model that is never made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {name: list(tensor.shape) for name, tensor in model.named_parameters()}
    matrices = [shape for name, shape in tensors.items() if len(shape) == 2 and "embed" not in name]
    return Shape(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        1,
        config.vocab_size,
        None,
        sum(parameter.numel() for parameter in model.parameters()),
        matrices,
    )


def seconds(call: Callable[[], Any]) -> float:
    """Return the median of TIMES calls after a first, or the time of the first by `--smoke`."""
    taken = []
    for _ in range(1 if "--smoke" in sys.argv else TIMES + 1):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:] or taken)


def costs(config: PreTrainedConfig, layers: int) -> tuple[float, float]:
    """Measure the seconds that so many layers train TOKENS tokens in, and those of a decoded token of ROWS rows."""
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    prompts = torch.randint(100, 1000, (ROWS, PROMPT))

    def decode() -> None:
        with torch.inference_mode():
            model(prompts[:, :1], past_key_values=cache, use_cache=True)

    with torch.inference_mode():
        cache = model(prompts, use_cache=True, logits_to_keep=1).past_key_values
    decoding = seconds(decode)
    adapters = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = get_peft_model(model, adapters)
    tokens = torch.randint(100, 1000, (2, TOKENS // 2))

    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            trained(tokens, labels=tokens).loss.backward()

    return seconds(train), decoding


def whole(config: PreTrainedConfig) -> tuple[float, float]:
    """Reckon the costs of all layers from those of one and of five."""
    one, five = costs(config, 1), costs(config, 5)
    further = (config.num_hidden_layers - 1) / 4
    return tuple(first + (fifth - first) * further for first, fifth in zip(one, five, strict=True))


def stages_on(machine: Machine) -> Any:
    """Return the recipe's stages with the machine's policy."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for stage in recipe["stages"].values():
        keys = {key: value for key, value in machine.policy.items() if key in stage["policy"] or key != "generation"}
        stage["policy"] |= keys
    recipe["stages"]["rlvr"].pop("loss_fn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return load_recipe(path).stages


def line(model: str, shape: Shape, machine: Machine, costs_here: tuple[float, float] | None) -> str:
    """Write a row of the table: memory of a process, seconds of a step of each stage, hours of the chain."""
    stages = stages_on(machine)
    parts = [estimate(shape, stage, LONGEST, machine.ranks, machine.memory) for stage in stages.values()]
    needed, has = max(sum(part.values()) for part in parts), machine.memory or memory_of_machine()
    sft, grpo = (stage.samples_per_step for stage in stages.values())
    if costs_here:
        a_token, decoding = costs_here[0] / TOKENS, costs_here[1] * grpo / ROWS
    else:
        operations = 6 if machine.policy.get("lora", LORA) else 8
        a_token = operations * shape.parameters / (machine.operations * UTILISATION) / machine.ranks
        reading = 2 * shape.parameters / (machine.bandwidth / 2)
        decoding = reading + 2 * shape.parameters * grpo / machine.ranks / (machine.operations * UTILISATION)
    supervised, rollouts, updates = sft * ROW * a_token, ANSWER * decoding, grpo * (PROMPT + ANSWER) * a_token
    steps = [stage.section.max_num_steps for stage in stages.values()]
    hours = (steps[0] * supervised + steps[1] * (rollouts + updates)) / 3600
    fits = f"{needed / 1e9:.1f} of {has / 1e9:.0f}" + (" (too much)" if needed > has else "")
    return row(model, machine.name, fits, f"{supervised:.3g}", f"{rollouts:.3g} + {updates:.3g}", f"{hours:.3g}")


def main() -> None:
    """Measure, reckon and print."""
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    models = {"Qwen3-0.6B": qwen3(64, 128, 4, 8, tied=True, words=1024)} if arguments.smoke else MODELS
    lines = []
    for name, config in models.items():
        measured, shape = whole(config), shape_of(config)
        lines += [line(name, shape, HERE, measured), *(line(name, shape, gpu, None) for gpu in GPUS)]
        print("\n".join(lines[-4:]), flush=True)
    text = [
        "# Larger models by the same chain",
        "",
        re.sub(
            r"\b[A-Z]{3,}\b",
            lambda found: str(globals().get(found[0], found[0])),
            "A layer" + __doc__.partition("A layer")[2].strip(),
        ),
        "",
        head("model", "machine", "GB of a process", "s an SFT step", "s a GRPO step: rollouts + update", "hours"),
        *lines,
    ]
    if not arguments.smoke:
        reckoned, measured = whole(SMOLLM2), costs(SMOLLM2, SMOLLM2.num_hidden_layers)
        both = [f"{ours:.2f} s reckoned, {real:.2f} s measured" for ours, real in zip(reckoned, measured, strict=True)]
        text += ["", f"SmolLM2, 30 layers: {TOKENS} tokens trained in {both[0]}; a token of {ROWS} rows in {both[1]}."]
    if arguments.output:
        arguments.output.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
