"""How fast Parquet files become a blend of several sources, beside `datasets` doing the same, and in what memory.

    python benchmarks/columns.py --gigabytes 0.25 1 --output benchmarks/columns.md

Makes two data sets of half the size each: questions with worked answers, and conversations. Both programs filter by a
column, take the answer behind its mark, put prompts into a template and conversations into messages, mix all rows by a
seed and write JSON lines, by two processes. Memory is the largest sum, over a program's processes, of what they could
not give back (private and dirty memory; files that are mapped are not counted), in a run of its own.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import measure_sizes, seconds_of  # noqa: E402

RECIPE = """
name: columns
source: {{kind: folder, path: {folder}}}
model: {{name: {folder}}}
blends:
  mixed:
    kind: demonstrations
    sources:
      - file: questions-*.parquet
        filter: [[level, ">", 1]]
        prompt_template: "{{prompt}}\\n\\nPut the final answer in \\\\boxed{{}}."
        answer_after: "####"
        completion_template: "{{reasoning}}\\n\\\\boxed{{{{answer}}}}"
      - {{file: conversations-*.parquet, system_prompt: Be brief.}}
  scored: {{file: scored.csv, environment: math_with_judge_simple_agent}}
evaluation: {{max_new_tokens: 8}}
stages:
  sft:
    algorithm: sft
    blend: mixed
    sft: {{max_num_steps: 1}}
    policy: {{max_total_sequence_length: 256, train_global_batch_size: 8, optimizer: {{lr: 1.0e-3}}}}
"""
DATASETS = """
import sys
from datasets import concatenate_datasets, load_dataset
folder, cache, output = sys.argv[1:]

def asked(row):
    reasoning, _, answer = row["answer"].rpartition("####")
    content = row["question"] + "\\n\\nPut the final answer in \\\\boxed{}."
    reply = reasoning.removesuffix("\\n") + "\\n\\\\boxed{" + answer.strip().replace(",", "") + "}"
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]}

def as_messages(row):
    return {"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]}

def load(name):
    return load_dataset("parquet", data_files=f"{folder}/{name}-*.parquet", split="train", cache_dir=cache)

questions = load("questions").filter(lambda row: row["level"] > 1, num_proc=2)
questions = questions.map(asked, num_proc=2, remove_columns=questions.column_names)
conversations = load("conversations")
conversations = conversations.map(as_messages, num_proc=2, remove_columns=conversations.column_names)
mixed = concatenate_datasets([questions.cast(conversations.features), conversations]).shuffle(seed=0)
mixed.to_json(output, num_proc=2, force_ascii=False)
"""


def make_input(folder: Path, gigabytes: float) -> int:
    """Write the two data sets as Parquet of so many bytes in all, compressed as the hub's are; their rows."""
    rng = random.Random(0)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 11))) for _ in range(50_000)]
    words += ["größer", "π≈3.14", '"quoted"', "\n\n", "日本語", "{x}", "C:\\path"]

    def text(mean: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(mean // 2, mean + mean // 2)))

    def question() -> dict:
        return {
            "question": text(50),
            "answer": f"{text(90)}\n#### {rng.randrange(10_000):,}",
            "level": rng.randrange(5),
        }

    def conversation() -> dict:
        messages = [{"role": role, "content": text(90)} for role in ("user", "assistant") * 2]
        return {"id": str(rng.random()), "messages": messages, "source": "made"}

    rows = 0
    for name, make in (("questions", question), ("conversations", conversation)):
        written = part = 0
        while written < gigabytes * 0.5e9:
            path = folder / f"{name}-{part:03}.parquet"
            table = pa.Table.from_pylist([make() for _ in range(60_000)])
            pq.write_table(table, path, row_group_size=10_000)
            written, part, rows = written + path.stat().st_size, part + 1, rows + len(table)
    return rows


def megabytes_of(command: list[str]) -> float:
    """The largest memory of a command's processes together that is theirs alone, looked at often."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{command}: status {process.returncode}")
    return peak / 1e6


def _memory(pid: int) -> int:
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        maps = [process.memory_maps() for process in processes]
    except psutil.Error:
        return 0
    return sum(area.anonymous for areas in maps for area in areas)


def figures_of(gigabytes: float, times: int, scratch: Path) -> dict[str, float]:
    """Everything that is measured of one size."""
    rows = make_input(scratch, gigabytes)
    recipe = scratch / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=scratch))
    (scratch / "scored.csv").write_text("question,answer\n1+1?,2\n")
    ours = [sys.executable, "-m", "scripts.data.download", f"--recipe={recipe}", f"--output={scratch}/ours"]
    programs = {
        "ours": [*ours, "--workers=2"],
        "one process": [*ours, "--workers=1"],
        "datasets": [sys.executable, "-c", DATASETS, str(scratch), f"{scratch}/cache", f"{scratch}/theirs.jsonl"],
    }
    best: dict[str, float] = {"rows": rows, "bytes": sum(path.stat().st_size for path in scratch.glob("*.parquet"))}
    for _ in range(times):
        for name, command in programs.items():
            for left in ("ours", "cache"):
                shutil.rmtree(scratch / left, ignore_errors=True)
            seconds = seconds_of(command)
            best[name] = min(seconds, best.get(name, seconds))
            if name == "ours":
                _keep(scratch / "ours/mixed.jsonl", scratch / "mixed.jsonl")
    if _contents(scratch / "mixed.jsonl") != _contents(scratch / "theirs.jsonl"):
        raise SystemExit("the two programs wrote different rows")
    for name in ("ours", "datasets"):
        shutil.rmtree(scratch / "cache", ignore_errors=True)
        best[f"{name}, MB"] = megabytes_of(programs[name])
    return best


def _keep(path: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    target.hardlink_to(path)


def _contents(path: Path) -> int:
    """A number that is the same for the same rows in any order."""
    with path.open() as lines:
        return sum(hash(json.dumps(json.loads(line)["messages"], sort_keys=True)) for line in lines)


def table(sizes: dict[float, dict[str, float]]) -> str:
    """The figures as a Markdown table."""
    every = list(sizes.values())
    asked = " ".join(f"{size:g}" for size in sizes)
    lines = [
        "# Columns of Parquet as a blend",
        "",
        f"`python benchmarks/columns.py --gigabytes {asked}` on 2 cores. Seconds.",
        "",
        "| Parquet | " + " | ".join(f"{figures['bytes'] / 1e9:.2f} GB" for figures in every) + " |",
        "| --- |" + " ---: |" * len(every),
        "| rows of both data sets | " + " | ".join(f"{int(figures['rows']):,}" for figures in every) + " |",
    ]
    for name, called in (
        ("ours", "filtered, mapped, checked, mixed, hashed and written by two processes"),
        ("one process", "the same by one"),
        ("datasets", "`datasets`: filter, map, concatenate, shuffle, to_json by two processes"),
    ):
        lines.append(f"| {called} | " + " | ".join(f"{figures[name]:.1f}" for figures in every) + " |")
    faster = " | ".join(f"{figures['datasets'] / figures['ours']:.1f}" for figures in every)
    lines.append(f"| speed beside `datasets` | {faster} |")
    for name, called in (("ours", "peak memory, MB"), ("datasets", "peak memory of `datasets`, MB")):
        lines.append(f"| {called} | " + " | ".join(f"{figures[f'{name}, MB']:.0f}" for figures in every) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measure_sizes(__doc__, 2, figures_of, table)
