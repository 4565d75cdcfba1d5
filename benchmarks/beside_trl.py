"""A stage of backend `trl` beside a script that calls TRL alone: tokens a second, fixed cost, memory.

    python benchmarks/beside_trl.py --output benchmarks/beside_trl.md    (20 minutes on two idle cores)

SFT, DPO and GRPO of a pretrained model, in one process and in two, by turns through ``scripts.train.run``, as the rule
calls it, and through `bare` below, which has of Stagecoach only GRPO's verifiers; the same model, rows in the same
order, settings and checkpoints. Seconds of a step count from the end of the first to the end of the last. Fixed cost is
what a program takes beyond its steps. Memory is the largest sum, at one moment, of the proportional set sizes of all
its processes, in a run of its own. `--smoke` trains two steps by TRL alone.

    python benchmarks/beside_trl.py --model build/smollm2/model --rows build/smollm2/rows --processes 1 --times 2

A real model, with LoRA in bfloat16 on both sides and `policy.skip_padding` on Stagecoach's; rows has sft.jsonl (prompt,
completion) and rlvr.jsonl, and the pairs of DPO are made of the former. CPU-seconds count where others use the machine.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import yaml

from benchmarks.common import ROOT, checked, command_line, peak_memory, row
from tests.stages import Stages

RUN = Path("results/beside-trl")
IS_REAL = "--model" in sys.argv
STEPS, LENGTH, LR, SAVE_PERIOD = (3, 96, 3e-4, 6) if IS_REAL else (12, 256, 1e-4, 6)
BATCH = {"sft": 16, "dpo": 8, "grpo": 64} if IS_REAL else {"sft": 128, "dpo": 32, "grpo": 32}
GENERATIONS, NEW_TOKENS = 8, 24 if IS_REAL else 48
MICRO, RANK, ALPHA = 16, 16, 32
CORES = 2
RECIPE = f"""
name: beside-trl
seed: 42
source: {{kind: synthetic}}
model: {{name: FOLDER}}
blends:
  sft: {{kind: demonstrations, rows: 1600, holdout: 10, environments: &math [math_with_judge_simple_agent]}}
  dpo: {{kind: preferences, rows: 500, holdout: 10, environments: *math}}
  grpo: {{rows: 200, holdout: 10, environments: *math}}
evaluation: {{max_new_tokens: 8}}
stages:
  sft:
    algorithm: sft
    blend: sft
    sft: {{max_num_steps: {STEPS}}}
    policy: {{max_total_sequence_length: {LENGTH}, train_global_batch_size: {BATCH["sft"]}, optimizer: {{lr: {LR:f}}}}}
    checkpointing: &saving {{save_period: {SAVE_PERIOD}}}
  dpo:
    algorithm: dpo
    blend: dpo
    dpo: {{max_num_steps: {STEPS}}}
    policy: {{max_total_sequence_length: {LENGTH}, train_global_batch_size: {BATCH["dpo"]}, optimizer: {{lr: {LR:f}}}}}
    checkpointing: *saving
  grpo:
    algorithm: grpo
    blend: grpo
    grpo:
      num_prompts_per_step: {BATCH["grpo"] // GENERATIONS}
      num_generations_per_prompt: {GENERATIONS}
      max_num_steps: {STEPS}
    policy:
      max_total_sequence_length: {LENGTH}
      optimizer: {{lr: {LR:f}}}
      generation: {{max_new_tokens: {NEW_TOKENS}}}
    checkpointing: *saving
    probe: {{action: warn}}
"""


@dataclass
class Timing:
    """Seconds of a program, those of its steps after the first, and the tokens and CPU-seconds of these."""

    whole: float
    steps: float
    tokens: int
    cpu: float

    @property
    def fixed(self) -> float:
        """Seconds beyond the steps, of which the first is taken to last as long as the others."""
        return self.whole - self.steps * STEPS / (STEPS - 1)


def save_model(folder: Path) -> None:
    """Save a Qwen3 with random weights and a small tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3Config, set_seed  # noqa: PLC0415

    from tests.pretrained import tokenizer  # noqa: PLC0415

    made = tokenizer()
    set_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    tokens = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(made), **shape, **heads, **tokens))
    model.save_pretrained(folder)
    made.save_pretrained(folder)


def real_recipe(model: Path, rows: Path, place: Path) -> str:
    """The recipe for a real model; its rows are copied, and every pair prefers a completion to the next row's."""
    shutil.copytree(rows, place / "rows")
    made = [json.loads(line) for line in (rows / "sft.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in pairwise(made)
        if row["completion"] != other["completion"]
    ]
    (place / "rows/dpo.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = yaml.safe_load(RECIPE.replace("FOLDER", str(model.resolve())))
    recipe["source"] = {"kind": "folder", "path": str(place / "rows")}
    for name, blend in recipe["blends"].items():
        del blend["rows"], blend["environments"]
        blend["file"] = "rlvr.jsonl" if name == "grpo" else f"{name}.jsonl"
    for name in ("sft", "grpo"):
        recipe["blends"][name]["environment"] = "instruction_following_simple_agent"
    settings = {"precision": "bfloat16", "skip_padding": True, "train_micro_batch_size": MICRO}
    for stage in recipe["stages"].values():
        stage["policy"] |= settings | {"lora": {"dim": RANK, "alpha": ALPHA}}
    return yaml.safe_dump(recipe)


def prepare(place: Path, model: Path | None, rows: Path) -> dict[int, list[str]]:
    """Make the model, recipe, rows and what a stage needs before it trains; the options of a stage by processes."""
    recipe, options = place / "recipe.yaml", {}
    if model:
        recipe.write_text(real_recipe(model, rows, place))
    else:
        save_model(place / "model")
        recipe.write_text(RECIPE.replace("FOLDER", str(place / "model")))
    for processes in (1, 2):
        site = place / f"site{processes}.yaml"
        site.write_text(f"name: here\nthreads: {CORES // processes}\nprocesses: {processes}\n")
        options[processes] = ["--recipe", str(recipe), "--results", str(RUN), "--site", str(site)]
        options[processes] += ["--threads", str(CORES // processes)]
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    targets = [f"{RUN}/{stage}/preflight.json" for stage in ("sft", "dpo", "grpo")]
    config = [f"recipe={recipe}", f"site={place / 'site1.yaml'}", f"run={RUN.name}"]
    checked("snakemake", "--config", *config, "--", *targets, f"{RUN}/model/hf/record.json")
    return options


def command_of(side: str, stage: str, processes: int, options: list[str], place: Path) -> list[str]:
    """What trains a stage by one side, in a folder that has nothing of it yet."""
    shutil.rmtree((ROOT / RUN / stage / "run").resolve(), ignore_errors=True)
    for left in ("ckpt", "logs"):
        shutil.rmtree(ROOT / RUN / stage / left, ignore_errors=True)
    shutil.rmtree(place / "bare", ignore_errors=True)
    if side == "stagecoach":
        return [sys.executable, "-m", "scripts.train.run", "--stage", stage, *options]
    model, split = ROOT / RUN / "model/hf/model", ROOT / RUN / "data" / stage / "train-split.jsonl"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    return [
        sys.executable,
        *launcher,
        __file__,
        "--bare",
        stage,
        str(model),
        str(split),
        str(place / "bare"),
        str(STEPS),
        *(["--model", str(model)] if IS_REAL else []),
    ]


def start(command: list[str], processes: int) -> subprocess.Popen:
    """Start a program with its share of the cores for every process."""
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES // processes), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def logged_tokens(stage: str) -> int:
    """The tokens that Stagecoach logged of a stage's steps after the first."""
    lines = (ROOT / RUN / stage / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return sum(json.loads(line)["tokens"] for line in lines)


def timed(command: list[str], stage: str, processes: int) -> Timing:
    """Run a program and take the times at which it says that a step is done."""
    begun, ends, tokens, lines, cpu = time.monotonic(), [], [], [], []
    process = start(command, processes)
    for line in process.stdout:
        lines.append(line)
        if re.search(rf"step \d+/{STEPS}\b", line):
            ends.append(time.monotonic())
            cpu.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
            tokens += [int(found[1])] if (found := re.search(r"(\d+) tokens", line)) else []
    if process.wait() != 0 or len(ends) != STEPS:
        sys.exit("".join(lines) + f"{command}: ended with {process.returncode} after {len(ends)} steps")
    trained = tokens[-1] - tokens[0] if tokens else logged_tokens(stage)
    return Timing(time.monotonic() - begun, ends[-1] - ends[0], trained, cpu[-1] - cpu[0])


def memory(command: list[str], processes: int) -> int:
    """Return the largest memory of a program's processes together, in bytes."""
    process = start(command, processes)
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return peak_memory(process, 0.25)


def measure(stage: str, processes: int, options: list[str], place: Path, times: int) -> str:
    """A row of the table."""
    found: dict[str, list[Timing]] = {"stagecoach": [], "bare": []}
    for _ in range(times):
        for side, timings in found.items():
            timings.append(timed(command_of(side, stage, processes, options, place), stage, processes))
            print(stage, processes, side, timings[-1], file=sys.stderr, flush=True)
    peaks = {side: memory(command_of(side, stage, processes, options, place), processes) for side in found}
    ours, bare = ([timing.tokens / timing.steps for timing in found[side]] for side in found)
    fixed = [statistics.median(timing.fixed for timing in timings) for timings in found.values()]
    cells = [
        stage,
        str(processes),
        ", ".join(f"{speed:,.0f}" for speed in ours),
        ", ".join(f"{speed:,.0f}" for speed in bare),
        f"{statistics.median(ours) / statistics.median(bare):.3f}",
        f"{fixed[0]:.1f} - {fixed[1]:.1f} = {fixed[0] - fixed[1]:.1f}",
        f"{peaks['stagecoach'] / 1e6:,.0f}",
        f"{peaks['bare'] / 1e6:,.0f}",
        f"{peaks['stagecoach'] / peaks['bare']:.3f}",
    ]
    return row(*cells, *(f"{statistics.median(t.tokens / t.cpu for t in found[side]):,.0f}" for side in found))


def bare(algorithm: str, model: str, split: str, output: str, steps: int) -> None:
    """Train by TRL alone, with rows as conversations that TRL tokenizes; print every step's end."""
    import torch  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from peft import LoraConfig  # noqa: PLC0415
    from transformers import AutoTokenizer, TrainerCallback  # noqa: PLC0415
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: PLC0415

    from scripts.rewards.registry import reward_groups  # noqa: PLC0415
    from scripts.rows.examples import preference_of  # noqa: PLC0415
    from scripts.rows.prompts import prompt_of  # noqa: PLC0415

    class Steps(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs and state.is_world_process_zero:
                print(f"step {state.global_step}/{steps} {logs['num_tokens']:.0f} tokens", flush=True)

    def reward(completions: list[Any], row: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        starts = range(0, len(row), GENERATIONS)
        groups = [(json.loads(row[start]), texts[start : start + GENERATIONS]) for start in starts]
        return [value for group in reward_groups(groups) for value in group]

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lines = Path(split).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    given: dict[str, Any] = {
        "output_dir": output,
        "per_device_train_batch_size": BATCH[algorithm] // int(os.environ.get("WORLD_SIZE", "1")),
        "max_steps": steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_steps": SAVE_PERIOD,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }
    micro = min(MICRO, BATCH[algorithm])
    if IS_REAL:
        given |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": BATCH[algorithm] // micro}
        given |= {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
    adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    in_order = {"train_sampling_strategy": "sequential"}
    if algorithm == "sft":
        data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        config, kind = SFTConfig(max_length=LENGTH, shuffle_dataset=False, **in_order, **given), SFTTrainer
    elif algorithm == "dpo":
        pairs = [preference_of(row) for row in rows]
        data = [{"prompt": pair.prompt, "chosen": pair.answers[0], "rejected": pair.answers[1]} for pair in pairs]
        config, kind = DPOConfig(max_length=LENGTH, beta=0.05, **in_order, **given), DPOTrainer
    else:
        data = [{"prompt": prompt_of(row), "row": line} for row, line in zip(rows, lines, strict=True)]
        lengths = {"num_generations": GENERATIONS, "max_completion_length": NEW_TOKENS}
        as_ours = {"epsilon_high": 0.28, "shuffle_dataset": False, "remove_unused_columns": False}
        config, kind = GRPOConfig(**lengths, **as_ours, **given), GRPOTrainer
    rewarded = {"reward_funcs": [reward]} if algorithm == "grpo" else {}
    shared = {"processing_class": AutoTokenizer.from_pretrained(model), "train_dataset": Dataset.from_list(data)}
    trainer = kind(model=model, args=config, peft_config=adapters if IS_REAL else None, **shared, **rewarded)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    trainer.add_callback(Steps())
    trainer.train()
    trainer.save_model()


def try_bare(place: Path) -> None:
    """Train two steps of SFT by TRL alone in this process, on the recipe's own rows."""
    save_model(place / "model")
    recipe = place / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(place / "model")))
    BATCH["sft"] = 4
    os.environ["OMP_NUM_THREADS"] = str(CORES)
    bare("sft", str(place / "model"), str(Stages(place, recipe).split("sft")), str(place / "bare"), 2)


def main() -> None:
    """Measure and print, and write the table where asked."""
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--stages", nargs="+", default=["sft", "dpo", "grpo"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", type=Path, help="folder of a real model")
    parser.add_argument("--rows", type=Path, help="folder of the real model's rows")
    parser.add_argument("--bare", nargs=5, help="train by TRL alone: algorithm, model, split, output, steps")
    arguments = parser.parse_args()
    if arguments.bare:
        *places, steps = arguments.bare
        bare(*places, int(steps))
        return
    if arguments.smoke:
        with tempfile.TemporaryDirectory() as directory:
            try_bare(Path(directory))
        return
    lines = [
        "# Backend `trl` beside bare TRL",
        "",
        f"`python {' '.join(sys.argv)}` on {CORES} cores; {arguments.model or 'a Qwen3 of 4 layers of 256'},",
        f"{STEPS} steps of {BATCH['sft']} rows (SFT), {BATCH['dpo']} pairs or {BATCH['grpo']} completions, by turns,",
        f"with a checkpoint at the end and after every {SAVE_PERIOD} steps. Bounds of the small model: tokens",
        "a second at least 0.97, fixed cost at most 10 s more, memory at most 1.05. Where several processes train, one",
        "more, of 90 MB, holds the stage.",
        "",
        "| stage | processes | tokens a second | bare TRL | ratio | fixed seconds | MB | bare TRL | ratio "
        "| tokens a CPU-second | bare TRL |",
        "| --- | ---: | --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory() as directory:
        options = prepare(Path(directory), arguments.model, arguments.rows)
        for stage in arguments.stages:
            for processes in arguments.processes:
                lines.append(measure(stage, processes, options[processes], Path(directory), arguments.times))
    shutil.rmtree(ROOT / RUN)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
