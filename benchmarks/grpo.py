"""Where a step of GRPO's time goes, and how fast backend `trl` is beside a bare TRL script of the same settings.

    python benchmarks/grpo.py --output benchmarks/grpo.md

Trains the tiny recipe's sft and rlvr1 in results/grpo/ (about two minutes on two idle cores), then rlvr1's steps again,
by turns through the backend and by a script that calls TRL alone; same rows, model, seed and reward, so the responses
are the same. Time counts from the end of the first step to the end of training, checkpoints included.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.recipe.load import load_recipe  # noqa: E402
from scripts.stage.stage import Stage  # noqa: E402

RECIPE, RUN = Path("config/recipes/tiny.yaml"), Path("results/grpo")
THREADS = 2


def train_by_backend(stage: Stage, run: Path) -> None:
    """The stage's steps as a rule trains them, without Snakemake."""
    from scripts.backends.protocol import TrainingJob  # noqa: PLC0415
    from scripts.backends.trl.train import train  # noqa: PLC0415
    from scripts.recipe.stage import Checkpointing  # noqa: PLC0415
    from scripts.stage.stop import StopRequest  # noqa: PLC0415

    (run / "checkpoints").mkdir()
    train(
        TrainingJob(
            stage=stage.name,
            settings=stage.settings.model_copy(update={"checkpointing": Checkpointing(save_period=4)}),
            config=stage.config,
            train_split=stage.train_split,
            parent_model=stage.first_model,
            run=run,
            resume_from=None,
            max_num_steps=stage.planned,
            threads=THREADS,
            stop=StopRequest(),
            nodes=1,
            environments={},
        )
    )


def train_by_trl(stage: Stage, run: Path) -> None:
    """The same steps by TRL's own trainer and nothing else of ours but the verifiers."""
    import torch  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    from scripts.data.prompts import render_prompt  # noqa: PLC0415
    from scripts.rewards.registry import reward_groups  # noqa: PLC0415

    torch.set_num_threads(THREADS)
    grpo, loss, policy = stage.config.grpo, stage.config.loss_fn, stage.config.policy
    size, prompts = grpo.num_generations_per_prompt, grpo.num_prompts_per_step
    tokenizer = AutoTokenizer.from_pretrained(stage.first_model)
    lines = stage.train_split.read_text(encoding="utf-8").splitlines()[: prompts * grpo.max_num_steps]
    rows = [{"prompt": render_prompt(json.loads(line), tokenizer), "row": line} for line in lines]

    def reward(completions: list[str], row: list[str], **_: Any) -> list[float]:
        groups = [(json.loads(row[at]), completions[at : at + size]) for at in range(0, len(row), size)]
        return [value for group in reward_groups(groups) for value in group]

    arguments = GRPOConfig(
        output_dir=str(run / "trl"),
        per_device_train_batch_size=prompts * size,
        num_generations=size,
        max_steps=grpo.max_num_steps,
        max_completion_length=policy.generation.max_new_tokens,
        temperature=policy.generation.temperature,
        beta=loss.reference_policy_kl_penalty,
        epsilon=loss.ratio_clip_min,
        epsilon_high=loss.ratio_clip_max,
        loss_type="dapo",
        scale_rewards="group" if grpo.normalize_rewards else "none",
        shuffle_dataset=False,
        remove_unused_columns=False,
        model_init_kwargs={"dtype": "float32"},
        learning_rate=policy.optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=policy.optimizer.clip_grad,
        adam_beta2=policy.optimizer.adam_beta2,
        weight_decay=policy.optimizer.weight_decay,
        seed=stage.config.seed,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_steps=4,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(stage.first_model),
        reward_funcs=[reward],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()


def measure(side: str) -> dict[str, Any]:
    """Train by one side in this process; seconds after the first step, and the tokens sampled in them."""
    from transformers import Trainer  # noqa: PLC0415

    ends, tokens = [], []
    log = Trainer.log

    def noted(trainer: Trainer, logs: dict[str, float], *arguments: Any) -> None:
        if "completions/mean_length" in logs:
            ends.append(time.monotonic())
            tokens.append(logs["completions/mean_length"])
        log(trainer, logs, *arguments)

    Trainer.log = noted
    stage = Stage(load_recipe(RECIPE), RUN, "rlvr1")
    with tempfile.TemporaryDirectory() as directory:
        {"backend": train_by_backend, "trl": train_by_trl}[side](stage, Path(directory))
        seconds = time.monotonic() - ends[0]
    return {"seconds": seconds, "tokens": round(sum(tokens[1:]) * stage.config.rollouts_per_step)}


def table(found: dict[str, list[dict[str, Any]]], metrics: pd.DataFrame) -> str:
    """The figures as Markdown."""
    steps = metrics.iloc[1:]
    whole = steps["seconds"].sum()
    phases = pd.DataFrame([dict(phases) for phases in steps["timing"]]).sum()
    parts = phases.to_dict() | {"the rest": whole - phases.sum()}
    lines = ["# A step of GRPO", "", "`python benchmarks/grpo.py` on 2 cores: stage rlvr1 of the tiny recipe.", ""]
    lines += [f"A step takes {whole / len(steps):.2f} s (mean of {len(steps)}, without the first):", ""]
    lines += ["| part | seconds a step | share |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {seconds / len(steps):.3f} | {seconds / whole:.0%} |" for name, seconds in parts.items()]
    lines += ["", "| by turns | tokens a second | tokens sampled |", "| --- | --- | ---: |"]
    speeds = {side: [run["tokens"] / run["seconds"] for run in runs] for side, runs in found.items()}
    for side, called in (("backend", "backend `trl`"), ("trl", "bare TRL script")):
        told = ", ".join(f"{speed:,.0f}" for speed in speeds[side])
        lines.append(f"| {called} | {told} | {found[side][0]['tokens']:,} |")
    ratio = statistics.median(speeds["backend"]) / statistics.median(speeds["trl"])
    return "\n".join([*lines, "", f"Backend beside bare TRL, by the medians: {ratio:.3f} (bound: 0.95)."]) + "\n"


def main() -> None:
    """Measure and print, and write the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("backend", "trl"), help="train once by one side, and print what it took")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side)))
        return
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    targets = [f"{RUN}/rlvr1/ckpt", f"{RUN}/rlvr1/metrics.parquet"]
    command = ["snakemake", "--config", f"run={RUN.name}", "--", *targets]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    found: dict[str, list[dict[str, Any]]] = {"backend": [], "trl": []}
    for _ in range(arguments.times):
        for side, runs in found.items():
            command = [sys.executable, __file__, "--side", side]
            done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    text = table(found, pd.read_parquet(ROOT / RUN / "rlvr1/metrics.parquet"))
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
