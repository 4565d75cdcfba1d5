"""Time what each call of Snakemake and `stagecoach plan` pays to know files outside of results by content.

``python -m benchmarks.contents`` makes projects with 1, 100 and 1,000 files of rows in a scratch folder.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from scripts.contents import NOTES
from scripts.files import scratch_folder
from scripts.program import run_command_line
from scripts.recipe.load import load_recipe
from scripts.stage.data_to_come import data_to_be_made
from scripts.stage.rule_settings import settings_files, write_settings

ROW = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
RECIPE = """
name: contents
source: {{kind: folder, path: {rows}}}
model: {{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}}
blends:
  sft: {{kind: demonstrations, file: part-*.jsonl}}
stages:
  sft:
    algorithm: sft
    blend: sft
    sft: {{max_num_steps: 1}}
    policy: {{max_total_sequence_length: 64, train_global_batch_size: 16, optimizer: {{lr: 1.0e-2}}}}
"""
TIMES = 11
LONG_AGO = 1_600_000_000


def milliseconds(action: Callable[..., Any], *arguments: Any, times: int = TIMES) -> float:
    """Return the median CPU time of a call, which other work on the machine leaves as it is."""
    took = []
    for _ in range(times):
        began = time.process_time()
        action(*arguments)
        took.append(time.process_time() - began)
    return 1000 * median(took)


def make_project(folder: Path, files: int, megabytes: float) -> Path:
    """Make a project whose blend of demonstrations has rows in so many files of this size; return its recipe."""
    rows = folder / "rows"
    rows.mkdir(parents=True)
    line = json.dumps(ROW) + "\n"
    for number in range(files):
        path = rows / f"part-{number}.jsonl"
        path.write_text(line * max(1, int(megabytes * 1e6 / len(line))), encoding="utf-8")
        os.utime(path, (LONG_AGO, LONG_AGO))
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(rows=rows), encoding="utf-8")
    return recipe


def main(megabytes: Annotated[float, "size of each file"] = 0.01) -> None:
    """Print the CPU times of a first call that hashes all files, and of calls after it."""
    print("files  first call  settings  data to be made  notes")
    for files in (1, 100, 1000):
        with scratch_folder() as folder:
            recipe, results = load_recipe(make_project(folder / "project", files, megabytes)), folder / "results"
            (results / "settings").mkdir(parents=True)
            first = milliseconds(write_settings, recipe, results, times=1)
            settings = milliseconds(settings_files, recipe, results)
            data = milliseconds(data_to_be_made, recipe, results)
            size = (results / NOTES).stat().st_size / 1000
            print(f"{files:5}  {first:7.0f} ms  {settings:5.1f} ms  {data:12.1f} ms  {size:.0f} kB")


if __name__ == "__main__":
    run_command_line(main)
