"""Distillation of backend `trl`: memory with four teachers beside one, and tokens a second beside bare TRL.

    python benchmarks/distillation.py > benchmarks/distillation.md    (a few minutes on two idle cores)

Every training is a program of its own, on the same prompts: with four teachers, with one, and by TRL's
DistillationTrainer alone with one. Memory is the largest proportional set size of a program; bounds: four teachers at
most 1.10 of one, tokens a second at least 0.97 of TRL's. `--smoke` trains one step of a small model by four teachers.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head, peak_memory, row
from scripts.backends.protocol import StopRequest, TrainingJob, read_job, write_job
from scripts.recipe.resolve import resolve_stage, training_config
from tests.stages import Stages, logged

CORES, LENGTH, NEW_TOKENS, TEACHERS = 2, 96, 24, 4
RECIPE = """
name: distillation
seed: 42
source: {{kind: synthetic}}
model: {{name: {place}/model0}}
models: {{{models}}}
blends: {{prompts: {{rows: {rows}, holdout: 10, environments: [{environments}]}}}}
evaluation: {{max_new_tokens: 8}}
stages:
  student:
    algorithm: distillation
    blend: prompts
    teachers: {{{teachers}}}
    distillation: {{of: {{{of}}}, num_prompts_per_step: {batch}, max_num_steps: {steps}}}
    policy:
      max_total_sequence_length: {length}
      train_micro_batch_size: 8
      optimizer: {{lr: 1.0e-4}}
      generation: {{max_new_tokens: {new}}}
"""
ENVIRONMENTS = (
    "math_with_judge_simple_agent",
    "mcqa_simple_agent",
    "structured_outputs_simple_agent",
    "instruction_following_simple_agent",
)


def prepare(place: Path, width: int, layers: int, batch: int, steps: int) -> TrainingJob:
    """Save five models with random weights; return the job of a student of four teachers."""
    from transformers import AutoModelForCausalLM, Qwen3Config, set_seed  # noqa: PLC0415

    from tests.pretrained import tokenizer  # noqa: PLC0415

    made = tokenizer()
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": width // 8}
    tokens = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    for number in range(TEACHERS + 1):
        set_seed(number)
        model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(made), **shape, **tokens))
        model.save_pretrained(place / f"model{number}")
        made.save_pretrained(place / f"model{number}")
    names = [f"t{number}" for number in range(1, TEACHERS + 1)]
    values = {
        "models": ", ".join(f"{name}: {{name: {place}/model{name[1:]}}}" for name in names),
        "environments": ", ".join(ENVIRONMENTS),
        "teachers": ", ".join(f"{name}: {name}" for name in names),
        "of": ", ".join(f"{environment}: {name}" for environment, name in zip(ENVIRONMENTS, names, strict=True)),
    }
    counts = {"rows": steps * batch + 10, "batch": batch, "steps": steps, "length": LENGTH, "new": NEW_TOKENS}
    (place / "recipe.yaml").write_text(RECIPE.format(place=place, **counts, **values))
    stages = Stages(place, place / "recipe.yaml")
    return TrainingJob(
        stage="student",
        settings=stages.recipe.stages["student"],
        config=resolve_stage(stages.recipe, "student"),
        train_split=stages.split("prompts"),
        parent_model=place / "model0",
        run=place / "run",
        resume_from=None,
        max_num_steps=steps,
        threads=CORES,
        stop=StopRequest(),
        nodes=1,
        environments={},
        roles={f"teachers.{name}": place / f"model{name[1:]}" for name in names},
    )


def bare(job: TrainingJob) -> None:
    """Train by TRL alone from the job's first teacher; log the seconds and tokens of each step as Stagecoach does."""
    import torch  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: PLC0415
    from trl import DistillationConfig, DistillationTrainer  # noqa: PLC0415

    from scripts.rows.prompts import prompt_of  # noqa: PLC0415

    class Steps(TrainerCallback):
        begun, tokens = 0.0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "loss" in logs:
                entry = {"seconds": time.monotonic() - self.begun, "tokens": logs["num_tokens"] - self.tokens}
                self.tokens = logs["num_tokens"]
                with (job.run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(entry) + "\n")

    batch, micro = job.config.rows_per_step, job.settings.policy.train_micro_batch_size
    arguments = DistillationConfig(
        output_dir=str(job.run / "saving"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        max_steps=job.max_num_steps,
        max_completion_length=NEW_TOKENS,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = [json.loads(line) for line in job.train_split.read_text(encoding="utf-8").splitlines()]
    trainer = DistillationTrainer(
        model=str(job.parent_model),
        teacher_model=AutoModelForCausalLM.from_pretrained(next(iter(job.roles.values())), dtype="float32"),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt_of(line)} for line in rows]),
        processing_class=AutoTokenizer.from_pretrained(job.parent_model),
    )
    torch.set_num_threads(CORES)
    trainer.add_callback(Steps())
    trainer.train()


def train(side: str, job: TrainingJob, place: Path) -> tuple[float, float]:
    """Train in a program of its own; return tokens a second, the first step left out, and the peak in bytes."""
    (job.run / "checkpoints").mkdir(parents=True)
    write_job(place / "job", job)
    environment = os.environ | {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--side", side, "--job", str(place / "job")]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []
    threading.Thread(target=lambda: said.extend(process.stdout), daemon=True).start()
    peak = peak_memory(process, 0.1)
    if process.returncode != 0:
        sys.exit("".join(said))
    steps = logged(job.run)[1:] or logged(job.run)
    return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps), peak


def main() -> None:
    """Print the table; status 1 where a bound is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--side", choices=["stagecoach", "bare"], help="train a written job in this process")
    parser.add_argument("--job", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        from scripts.backends.trl.train import train_rank  # noqa: PLC0415

        {"stagecoach": train_rank, "bare": bare}[arguments.side](read_job(arguments.job))
        return
    sizes = {"width": 64, "layers": 1, "batch": 16, "steps": 1} if arguments.smoke else {}
    sizes = sizes or {"width": 512, "layers": 8, "batch": 16, "steps": 5}
    found: dict[str, list[tuple[float, float]]] = {"four teachers": [], "one teacher": [], "bare TRL, one teacher": []}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        four = prepare(place, **sizes)
        values = four.config.values()
        del values["distillation"]["of"]
        one = {"roles": dict([*four.roles.items()][:1]), "config": training_config(values)}
        if arguments.smoke:
            print(train("stagecoach", four, place))
            return
        for number in range(arguments.times):
            for (name, runs), changes in zip(found.items(), ({}, one, one), strict=True):
                side = "bare" if name.startswith("bare") else "stagecoach"
                run = place / f"{name.replace(' ', '-')}-{number}"
                runs.append(train(side, TrainingJob(**{**vars(four), "run": run, **changes}), place))
                print(name, runs[-1], file=sys.stderr, flush=True)
    speeds, peaks = ({name: statistics.median(column) for name, column in each} for each in _columns(found))
    model = f"a Qwen3 of {sizes['layers']} layers of {sizes['width']}"
    print(f"Distillation of {model}, {sizes['batch']} prompts a step.\n")
    print(f"Made by `python benchmarks/distillation.py`, {CORES} CPU cores; medians of {arguments.times}.\n")
    print(head("training", "tokens a second", "MB"))
    print("\n".join(row(name, f"{speeds[name]:,.0f}", f"{peaks[name] / 1e6:,.0f}") for name in found))
    memory = peaks["four teachers"] / peaks["one teacher"]
    speed = speeds["one teacher"] / speeds["bare TRL, one teacher"]
    is_kept = memory <= 1.1 and speed >= 0.97
    print(f"\nMemory, four teachers beside one: {memory:.3f}, at most 1.10.")
    print(f"Tokens a second beside TRL's: {speed:.3f}, at least 0.97. Bounds {'kept' if is_kept else 'MISSED'}.")
    sys.exit(not is_kept)


def _columns(found: dict[str, list[tuple[float, float]]]) -> Any:
    return ([(name, [run[place] for run in runs]) for name, runs in found.items()] for place in (0, 1))


if __name__ == "__main__":
    main()
