"""What are data worth that a model made, do kills change them, and how fast are they sampled?

    python benchmarks/generated.py --seeds 1 2 3 4 5 --strikes 40 > benchmarks/generated.md

Three parts, each of which `0` or no seed leaves out:

- `--seeds`: recipe benchmarks/generated.yaml by seed: each stage on generated rows beside its twin of equal steps on
  others. Nothing is bound to come out.
- `--strikes`: sampling and judging are killed at random times and started again until they end; responses, verdicts
  and rows must be those of an undisturbed call, to the byte.
- `--rows`: responses a second beside a loop over `generate` of transformers, one prompt at a time; bound: 3 times.
"""

import filecmp
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pandas as pd

from benchmarks.common import ROOT, checked, command_line, head, row
from scripts.recipe.load import load_recipe
from scripts.stage.tables import ROLLOUTS, read_table

RECIPE, TWINS = (
    "benchmarks/generated.yaml",
    {"best_of_8": "more_sft", "dpo_own": "dpo_other", "grpo_chosen": "grpo_all"},
)
FASTER, ALARM = 3.0, 120.0
MADE = "data/best/generated"
LOOP = """
import sys, time, torch
from scripts.evaluate.score import load_export
from scripts.sampling.sample import prompts_in
from scripts.model.generate import end_tokens
from scripts.rows.prompts import render_prompt
from pathlib import Path
torch.set_num_threads(2)
model, tokenizer = load_export(Path(sys.argv[1]))
rows = [prompt.row for prompt in prompts_in(Path(sys.argv[2]), "prompts")][: int(sys.argv[3])]
ends, began = sorted(end_tokens(model, tokenizer)), time.monotonic()
for row in rows:
    text = render_prompt(row, tokenizer)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True,
                   max_new_tokens=24, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
print(len(rows) / (time.monotonic() - began))
"""


def results_of(seed: int) -> Path:
    """Run the recipe with a seed; return its results. A finished run is not made again."""
    results = ROOT / f"results/generated-seed{seed}"
    config = ("--config", f"recipe={RECIPE}", f"seed={seed}", f"run={results.name}")
    checked("snakemake", "--quiet", "all", *config, "--", f"results/{results.name}/report.html")
    return results


def compared(seeds: list[int]) -> list[str]:
    """Return a row for each stage and its twin: held-out means over seeds, and the difference with its interval."""
    runs = [results_of(seed) for seed in seeds]
    lines = []
    for stage, twin in TWINS.items():
        tables = {
            name: pd.concat(
                [
                    read_table(run / name / "rollouts.parquet", ROLLOUTS).to_pandas().set_index(["split", "line"])
                    for run in runs
                ],
                keys=seeds,
            )
            for name in (stage, twin)
        }
        before, after, other = (
            tables[name][column]
            for name, column in ((stage, "reward_before"), (stage, "reward_after"), (twin, "reward_after"))
        )
        by_seed = (after - other).groupby(level=0).mean()
        gain = after - other
        half = 1.96 * gain.std() / len(gain) ** 0.5
        seeds_told = " ".join(f"{value:+.3f}" for value in by_seed)
        means = [f"{each.mean():.3f}" for each in (before, after, other)]
        lines.append(
            row(
                stage,
                twin,
                *means,
                f"{gain.mean():+.3f} ({gain.mean() - half:+.3f} to {gain.mean() + half:+.3f})",
                seeds_told,
            )
        )
    return lines


def commands_of(results: Path, folder: Path, store: Path) -> list[list[str | Path]]:
    """Return the programs that sample two shards, judge and select, with outputs below `folder`."""
    prompts = results / "data/prompts/train-split.jsonl"
    common = ["--recipe", RECIPE, "--blend", "best", "--prompts", prompts]
    program = [sys.executable, "-m"]
    exported = ["--exports", results / "sft/hf/record.json", "--store", store]
    held_out = ["--held-out", results / "data/prompts/val-split.jsonl"]
    samples = [
        [
            *(*program, "scripts.sampling.sample", *common, *exported, *held_out, "--shard", f"{number}-of-2"),
            *("--output", folder / f"samples/{number}-of-2.parquet"),
        ]
        for number in (1, 2)
    ]
    responses = [folder / f"samples/{number}-of-2.parquet" for number in (1, 2)]
    judge = [*program, "scripts.sampling.judge", *common, "--responses", *responses, "--store", store]
    judge += ["--output", folder / "judged.parquet"]
    select = [*program, "scripts.sampling.select", *common, "--judged", folder / "judged.parquet", "--sampled"]
    select += [path.with_suffix(".json") for path in responses]
    select += ["--makers", results / "sft/hf/record.json", "--output", folder]
    return [*samples, judge, select]


def struck(results: Path, strikes: int, seed: int = 1) -> tuple[int, int]:
    """Strike sampling and judging; return the number of strikes, and of chains whose files differ."""
    random.seed(seed)
    done = differing = 0
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary, "whole")
        for command in commands_of(results, whole, Path(temporary, "store")):
            checked(*command)
        while done < strikes:
            folder, store = Path(temporary, "struck"), Path(temporary, f"store{done}")
            for command in commands_of(results, folder, store):
                until = 4.0
                while True:
                    log = subprocess.DEVNULL
                    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
                    try:
                        status = process.wait(random.uniform(until, until + 15.0) if done < strikes else ALARM)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                        done += 1
                        until += 2.0
                        continue
                    if status:
                        sys.exit(f"{command} ended with {status}")
                    break
            names = ["samples/1-of-2.parquet", "samples/2-of-2.parquet", "judged.parquet", "best.jsonl", "record.json"]
            _, *others = filecmp.cmpfiles(whole, folder, names, shallow=False)
            differing += any(others)
            shutil.rmtree(folder)
            print(f"{done} of {strikes} strikes, {differing} chains differ", file=sys.stderr)
    return done, differing


def paces(results: Path, rows: int) -> tuple[float, float]:
    """Return the responses a second of the sampling program's engine, and of the loop."""
    export, prompts = results / "sft/hf/record.json", results / "data/prompts/train-split.jsonl"
    loop = float(checked(sys.executable, "-c", LOOP, export, prompts, str(rows)).split()[-1])
    with tempfile.TemporaryDirectory() as temporary:
        command = commands_of(results, Path(temporary, "out"), Path(temporary, "store"))[0]
        told = checked(*command)
    pace = float(told.splitlines()[-1].partition(", ")[2].partition(" a second")[0])
    return pace, loop


def main() -> None:
    """Print the tables; status 1 when a bound is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--strikes", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0, help="prompts of the loop")
    arguments = parser.parse_args()
    if arguments.smoke:
        graph = load_recipe(ROOT / RECIPE).graph
        makers = {stage.name: [maker.name for maker in stage.makers] for stage in graph.order}
        print(", ".join(f"{stage} is made by {', '.join(makers[stage]) or 'none'}" for stage in TWINS))
        sys.exit(any(makers[stage] != ["sft"] or makers[twin] for stage, twin in TWINS.items()))
    missed = False
    print(f"Made by `python {' '.join(sys.argv)}`, 2 CPU cores.\n")
    if arguments.seeds:
        lines = compared(arguments.seeds)
        told = " ".join(map(str, arguments.seeds))
        print(
            f"Held-out scores (greedy) of {RECIPE}, mean of seeds {told}; each stage beside its twin of equal steps.\n"
        )
        print(head("stage", "twin", "before", "stage's", "twin's", "difference, 95 %", "difference by seed"))
        print("\n".join(lines) + "\n")
    results = results_of(1) if arguments.strikes or arguments.rows else ROOT
    if arguments.strikes:
        strikes, differing = struck(results, arguments.strikes)
        missed |= differing > 0
        print(f"{strikes} strikes by SIGKILL while sampling and judging: {differing} differing files.\n")
    if arguments.rows:
        began = time.strftime("%Y-%m-%d")
        pace, loop = paces(results, arguments.rows)
        missed |= pace < FASTER * loop
        print(f"Responses a second ({began}): {pace:.0f}, a loop over generate {loop:.1f}: {pace / loop:.1f} times.")
    sys.exit(missed)


if __name__ == "__main__":
    main()
