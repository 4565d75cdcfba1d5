"""How far the estimate of a training's memory (docs/memory.md) is from what a training on the CPU takes.

    python benchmarks/memory.py --output benchmarks/memory.md

Trains two steps of each setting by backend `trl`, each in a process of its own with rows as long as the setting allows,
and compares the peak of its resident memory, less what it had before the model was loaded, with the estimate less its
fixed part. glibc is told to give freed memory back (MALLOC_MMAP_THRESHOLD_). Half a minute a setting on two idle cores;
--only chooses by a part of a setting's words.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft  # noqa: F401 - what is imported before is no memory of the training
import torch
from pydantic import TypeAdapter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import command_line, row
from scripts.backends.protocol import TrainingJob
from scripts.backends.stop import StopRequest
from scripts.backends.trl.placing import estimate
from scripts.backends.trl.train import train_rank
from scripts.files import sha256_file, write_json
from scripts.model.shape import Shape
from scripts.recipe.recipe import AnyStage
from scripts.rows.prompts import render
from tests.pretrained import tokenizer

THREADS, STEPS, MIB = 2, 2, 2**20
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-34M": {"kind": "llama", "vocab_size": 16000, "hidden_size": 512, "intermediate_size": 1408, "layers": 6},
    "llama-134M": {"kind": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "layers": 12},
    "mixtral-32M": {"kind": "mixtral", "vocab_size": 16000, "hidden_size": 384, "intermediate_size": 768, "layers": 6},
}
LORA = {"lora": {"dim": 8, "alpha": 16}}
BF16 = {"precision": "bfloat16"}
CHECKPOINTED = {"dtensor_cfg": {"activation_checkpointing": True}}
SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-34M", "sft", {"rows": 4}),
    ("llama-34M", "sft", {"rows": 8, "train_micro_batch_size": 2}),
    ("llama-34M", "dpo", {"rows": 2, **LORA}),
    ("llama-34M", "grpo", {"rows": 8, "train_micro_batch_size": 4, "kl": 0.1}),
    ("llama-134M", "sft", {"rows": 2}),
    ("llama-134M", "sft", {"rows": 8, "train_micro_batch_size": 2, **CHECKPOINTED}),
    ("llama-134M", "sft", {"rows": 2, **BF16, **LORA}),
    ("mixtral-32M", "sft", {"rows": 4}),
]
LENGTH = 256


def make_model(shape: dict[str, Any], folder: Path) -> None:
    """Save a model of random weights with a small tokenizer."""
    made, given = tokenizer(), dict(shape)
    heads = given["hidden_size"] // 64
    kind, layers = given.pop("kind"), given.pop("layers")
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    config = AutoConfig.for_model(
        kind,
        **given,
        **more,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=kind != "llama",
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    made.save_pretrained(folder)


def settings_of(algorithm: str, says: dict[str, Any]) -> dict[str, Any]:
    """What a recipe would say of the stage."""
    given = dict(says)
    rows, kl = given.pop("rows"), given.pop("kl", 0.0)
    policy = {"max_total_sequence_length": LENGTH, "optimizer": {"lr": 1e-5}, **given}
    stage: dict[str, Any] = {"backend": "trl", "algorithm": algorithm, "blend": "b", "policy": policy}
    if algorithm == "grpo":
        stage["grpo"] = {"num_prompts_per_step": rows // 4, "num_generations_per_prompt": 4, "max_num_steps": STEPS}
        policy["generation"] = {"max_new_tokens": LENGTH // 2}
        stage["loss_fn"] = {"reference_policy_kl_penalty": kl}
    else:
        stage[algorithm] = {"max_num_steps": STEPS}
        policy["train_global_batch_size"] = rows
    return stage


def stage_of(algorithm: str, says: dict[str, Any]) -> Any:
    """The stage's settings."""
    return TypeAdapter(AnyStage).validate_python(settings_of(algorithm, says))


def write_rows(algorithm: str, count: int, folder: Path, path: Path) -> None:
    """Rows whose tokens fill the length, or nearly."""
    own = AutoTokenizer.from_pretrained(folder)

    def filling(answer: bool, length: int) -> str:
        words = "What is the larger of the two numbers? "
        for size in range(length, 0, -1):
            text = (words * (size // 8 + 1))[: size * 4]
            messages = [{"role": "user", "content": "hi" if answer else text}]
            messages += [{"role": "assistant", "content": text}] if answer else []
            if len(own(render(messages, own, add_generation_prompt=not answer))["input_ids"]) <= length:
                return text
        raise ValueError(length)

    if algorithm == "sft":
        text = filling(True, LENGTH)
        row: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]}
    elif algorithm == "dpo":
        text = filling(True, LENGTH - 8)
        prompt = [{"role": "user", "content": "hi"}]
        answers = [[{"role": "assistant", "content": text}] for text in (text, text[:-8] + text[8:16])]
        row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
    else:
        messages = [{"role": "user", "content": filling(False, LENGTH // 2 - 1)}]
        environment = {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}
        row = {
            "responses_create_params": {"input": messages},
            "agent_ref": environment,
            "question": "?",
            "expected_answer": "1",
        }
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))


def memory(key: str) -> int:
    """This process's resident memory (VmRSS) or its peak (VmHWM) in bytes."""
    return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def measure(algorithm: str, says: dict[str, Any], folder: Path) -> None:
    """Train in this process, and print its peak above what it had before the model."""
    settings = stage_of(algorithm, says)
    values = settings.values_with_effect() | {"release": {}, "seed": 0}
    split = folder.parent / f"{algorithm}.jsonl"
    rows = says["rows"] * STEPS
    write_rows(algorithm, rows, folder, split)
    described = {"rows": rows, "sha256": sha256_file(split)}
    write_json(split.with_name("manifest.json"), {"train": described, "validation": described})
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        (run / "checkpoints").mkdir(parents=True)
        job = TrainingJob(
            stage="benchmark",
            settings=settings,
            config=settings.config_model.model_validate(values),
            train_split=split,
            parent_model=folder,
            run=run,
            resume_from=None,
            max_num_steps=STEPS,
            threads=THREADS,
            stop=StopRequest(),
            nodes=1,
            environments={},
        )
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        train_rank(job)
        print(memory("VmHWM") - before)


def measured(algorithm: str, says: dict[str, Any], folder: Path) -> int:
    """The peak of a process of its own."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | GIVEN_BACK
    command = [sys.executable, __file__, "--measure", algorithm, json.dumps(says), str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return int(printed.splitlines()[-1])


def line(name: str, algorithm: str, says: dict[str, Any], folder: Path, peak: int) -> str:
    """A line of the table."""
    settings = stage_of(algorithm, says)
    parts = estimate(Shape.of_folder(folder), settings, settings.policy, ranks=1)
    parts.pop("fixed")
    total = sum(parts.values())
    shown = ", ".join(f"{part} {size / MIB:.0f}" for part, size in sorted(parts.items(), key=lambda part: -part[1]))
    words = json.dumps(says)[1:-1].replace('"', "")
    return row(name, algorithm, words, f"{peak / MIB:.0f}", f"{total / MIB:.0f}", f"{total / peak:.2f}", shown)


HEAD = """# Estimate and peak of a training's memory

`python benchmarks/memory.py --output benchmarks/memory.md`, on two CPU cores, torch {torch}, rows of {length} tokens.
MiB above what the process had before the model was loaded; the estimate without its fixed gigabyte (docs/memory.md).

| model | algorithm | settings | measured | estimate | ratio | what for |
| --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
The estimate has no logits. On a CPU, torch's operators copy a tile of 4,096 tokens by 32,768 words eight times (up to
4 GB), so a small model with a large vocabulary needs more than estimated; Triton's kernel on a GPU copies none. FSDP2,
offload, nf4, 8-bit moments and vLLM were not measured. No figure of a GPU is here.
"""


def main() -> None:
    """Command line of the measurement."""
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="a part of the setting's words")
    parser.add_argument("--measure", nargs=3, help="what a process of its own is told")
    arguments = parser.parse_args()
    if arguments.measure:
        algorithm, says, folder = arguments.measure
        measure(algorithm, json.loads(says), Path(folder))
        return
    settings = [("llama-34M", "sft", {"rows": 1})] if arguments.smoke else SETTINGS
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, algorithm, says in settings:
            if arguments.only not in f"{name} {algorithm} {json.dumps(says)}":
                continue
            folder = Path(place, name)
            if not folder.exists():
                make_model(SHAPES[name], folder)
            rows.append(line(name, algorithm, says, folder, measured(algorithm, says, folder)))
            print(rows[-1], flush=True)
    if arguments.output:
        head = HEAD.format(torch=torch.__version__, length=LENGTH)
        arguments.output.write_text(head + "\n".join(rows) + "\n" + TAIL)


if __name__ == "__main__":
    main()
