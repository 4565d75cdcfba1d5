"""How far the estimate of a training's memory (docs/memory.md) is from the peak of a real training on the CPU.

    python benchmarks/memory.py --model /path/to/SmolLM2-135M-Instruct --output benchmarks/memory

Trains two steps of each setting by backend `trl`, each in a process of its own, on rows of a given length under a limit
of 2,048 tokens, and compares the peak of its resident memory (VmHWM, imports included) with the estimate. Writes
memory.csv and memory.md; one to four minutes a setting on two idle cores. --only chooses by a part of its words.
"""

import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import TypeAdapter

from benchmarks.common import command_line, head, row
from scripts.backends.protocol import StopRequest, TrainingJob
from scripts.backends.trl.placing import estimate
from scripts.backends.trl.train import train_rank
from scripts.files import sha256_file, write_json
from scripts.model.lengths import TokenCounter
from scripts.model.shape import Shape
from scripts.recipe.recipe import AnyStage
from scripts.rows.chat_format import chat_template_of
from tests.pretrained import save_pretrained

STEPS, LIMIT, NEW, GROUP = 2, 2048, 32, 4
LORA, BF16 = {"lora": {"dim": 16, "alpha": 32}}, {"precision": "bfloat16"}
SETTINGS: list[tuple[str, int, int, dict[str, Any]]] = [  # algorithm, rows a step, tokens of a row, the policy's keys
    ("sft", 16, 48, {}),
    ("sft", 8, 256, {}),
    ("sft", 8, 256, BF16),
    ("sft", 16, 48, BF16 | LORA),
    ("sft", 16, 256, {"train_micro_batch_size": 4} | LORA),
    ("sft", 4, 1024, {"train_micro_batch_size": 1, "dtensor_cfg": {"activation_checkpointing": True}}),
    ("dpo", 4, 128, {}),
    ("dpo", 8, 128, {"train_micro_batch_size": 2} | BF16 | LORA),
    ("grpo", 16, 64, {}),
    ("grpo", 32, 64, BF16 | LORA),
    ("grpo", 64, 64, {"train_micro_batch_size": 16} | BF16 | LORA),
]


def stage_of(algorithm: str, rows: int, says: dict[str, Any]) -> Any:
    """The settings of a stage."""
    section: dict[str, Any] = {"max_num_steps": STEPS}
    policy = {"max_total_sequence_length": LIMIT, "optimizer": {"lr": 1e-5}, **says}
    if algorithm == "grpo":
        section |= {"num_prompts_per_step": rows // GROUP, "num_generations_per_prompt": GROUP}
        policy["generation"] = {"max_new_tokens": NEW}
    else:
        policy["train_global_batch_size"] = rows
    stage = {"algorithm": algorithm, "blend": "b", algorithm: section, "policy": policy}
    return TypeAdapter(AnyStage).validate_python(stage)


def write_rows(algorithm: str, rows: int, tokens: int, model: Path, path: Path) -> None:
    """Rows of so many tokens; of GRPO with the response."""
    counter = TokenCounter(str(model / "tokenizer.json"), chat_template_of(model))
    ask, words = [{"role": "user", "content": "Tell a story."}], "the cat sat on a mat and then it went away "
    for count in range(len(words) * tokens, 0, -2):
        text = (words * tokens)[:count].strip()
        answer = [{"role": "assistant", "content": text}]
        asked = [{"role": "user", "content": text}] if algorithm == "grpo" else [*ask, *answer]
        if counter.count(asked, asks=algorithm == "grpo") <= tokens - (NEW if algorithm == "grpo" else 0):
            break
    other = [{"role": "assistant", "content": text[:-9]}]
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}}
    made = {
        "sft": {"messages": asked},
        "dpo": {"prompt": ask, "chosen": answer, "rejected": other},
        "grpo": agent | {"responses_create_params": {"input": asked}, "question": "?", "expected_answer": "1"},
    }[algorithm]
    path.write_text((json.dumps(made) + "\n") * rows * STEPS)


def measure(algorithm: str, rows: int, tokens: int, says: dict[str, Any], model: Path) -> None:
    """Train in this process, and print its peak."""
    settings = stage_of(algorithm, rows, says)
    config = settings.of_config(settings.values_with_effect() | {"release": {}, "seed": 0})
    with tempfile.TemporaryDirectory() as directory:
        split, run = Path(directory, "rows.jsonl"), Path(directory, "run")
        (run / "checkpoints").mkdir(parents=True)
        write_rows(algorithm, rows, tokens, model, split)
        described = {"rows": rows * STEPS, "sha256": sha256_file(split)}
        write_json(split.with_name("manifest.json"), {"train": described, "validation": described})
        train_rank(TrainingJob("sft", settings, config, split, model, run, None, STEPS, 2, StopRequest(), 1, {}))
    print(re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def measured(told: list[Any], model: Path) -> int:
    """The peak, in kB, of a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--measure", json.dumps(told)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    """Command line of the measurement."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, help="a folder in Hugging Face's format")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="a part of the setting's words")
    parser.add_argument("--peaks", type=Path, help="a memory.csv, whose peaks are taken: nothing trains")
    parser.add_argument("--measure", help="what a process of its own is told")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*json.loads(arguments.measure), arguments.model)
        return
    peaks = {tuple(line[:4]): int(line[4]) for line in csv.reader(arguments.peaks.open())} if arguments.peaks else {}
    with tempfile.TemporaryDirectory() as place:
        model, settings = arguments.model, [each for each in SETTINGS if arguments.only in json.dumps(each)]
        if arguments.smoke:
            model, settings = Path(place, "model"), [("sft", 1, 64, {})]
            save_pretrained("llama", model)
        shape, lines = Shape.of_folder(model), []
        for algorithm, rows, tokens, says in settings:
            setting = (algorithm, str(rows), str(tokens), json.dumps(says)[1:-1].replace('"', ""))
            peak = peaks.get(setting) or measured([algorithm, rows, tokens, says], model)
            parts = estimate(shape, stage_of(algorithm, rows, says), tokens)
            total, shown = sum(parts.values()), ", ".join(f"{part} {size / 1e9:.2f}" for part, size in parts.items())
            lines.append((*setting, peak, f"{total / 1024:.0f}", f"{total / peak / 1024:.2f}", shown))
            print(row(*lines[-1]), flush=True)
    if arguments.output:
        with arguments.output.with_suffix(".csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)
        names = ("algorithm", "rows", "tokens", "policy", "peak kB", "reckoned kB", "ratio", "reckoned for, GB")
        text = "\n".join([head(*names), *(row(*line) for line in lines)])
        arguments.output.with_suffix(".md").write_text(f"# Memory reckoned and measured\n\n{__doc__}\n{text}\n")


if __name__ == "__main__":
    main()
