"""How often the preflights of a chain open its splits, and how long they take, at the first time and again.

    python benchmarks/split_reads.py --rows 100000 --stages 5

Every stage trains by SFT on a blend of its own, from a small pretrained model; the exports of its parents are links to
that model. An audit hook counts the opens of splits in all processes of a preflight.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.files import sha256_file, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import sync_configs
from scripts.stage.stage import Stage
from tests.pretrained import save_pretrained
from tests.stages import checkpoint_record, note_made

HELD_OUT = 1000
HOOK = """
import os, sys
log = os.open(os.environ["OPENS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def noted(event, arguments):
    if event == "open" and str(arguments[0]).endswith("-split.jsonl"):
        os.write(log, (str(arguments[0]) + chr(10)).encode())
sys.addaudithook(noted)
import runpy
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def write_rows(path: Path, count: int, seed: int) -> None:
    """Write demonstrations of about 150 words, shuffled."""
    rng = random.Random(seed)
    words = ["larger", "number", "answer", "box", "of", "the", "two", "What", "is", "with"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked = f"{number} " + " ".join(rng.choices(words, k=rng.randrange(5, 60)))
            said = " ".join(rng.choices(words, k=rng.randrange(5, 60)))
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")


def made_chain(folder: Path, rows: int, stages: int) -> Path:
    """Make recipe, splits, model and links; return the recipe."""
    save_pretrained("llama", folder / "tiny", max_position_embeddings=4096)
    policy = {"max_total_sequence_length": 512, "train_global_batch_size": 16, "optimizer": {"lr": 1e-3}}
    recipe = {"name": "reads", "seed": 1, "source": {"kind": "synthetic"}, "model": {"name": str(folder / "tiny")}}
    recipe |= {"blends": {}, "stages": {}, "defaults": {"sft": {"sft": {"max_num_steps": 10000}, "policy": policy}}}
    for number in range(stages):
        blend = {"kind": "demonstrations", "rows": rows, "holdout": HELD_OUT}
        recipe["blends"][f"b{number}"] = blend | {"environments": ["math_with_judge_simple_agent"]}
        recipe["stages"][f"s{number}"] = {"algorithm": "sft", "blend": f"b{number}", "default_gate": False}
        if number:
            recipe["stages"][f"s{number}"]["parent"] = f"s{number - 1}"
    path, results = folder / "recipe.yaml", folder / "results"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    site = {"name": "here", "threads": 2, "accelerator": "cuda", "gpu_memory_gb": 80, "try_batch": False}
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    loaded = load_recipe(path)
    sync_configs(loaded, results)
    for name in ("model", *loaded.stages):
        (results / name / "hf").mkdir(parents=True)
        (results / name / "hf/model").symlink_to(folder / "tiny")
    for number, name in enumerate(loaded.stages):
        stage = Stage(loaded, results, name)
        stage.manifest.parent.mkdir(parents=True)
        write_rows(stage.train_split, rows, number)
        write_rows(stage.validation_split, HELD_OUT, 100 + number)
        splits = {"train": (stage.train_split, rows), "validation": (stage.validation_split, HELD_OUT)}
        described = {key: {"rows": count, "sha256": sha256_file(split)} for key, (split, count) in splits.items()}
        write_json(stage.manifest, described)
        note_made(loaded, results, stage.settings.blend)
        write_json(stage.paths.record, checkpoint_record(name))
        write_json(stage.paths.gate, {"stage": name, "verdict": "pass"})
    return path


class Seconds(NamedTuple):
    """How long a program took, and its CPU time, which a busy machine changes less."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        """Return both for people."""
        return f"{self.wall:.1f} s ({self.cpu:.1f} s of CPU)"


def cpu_seconds() -> float:
    """Return the CPU time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(folder: Path, module: str, *arguments: str) -> tuple[Seconds, Counter[str]]:
    """Run a program; return its seconds and the opens of splits, by file."""
    opens = folder / "opens"
    opens.unlink(missing_ok=True)
    began = time.monotonic(), cpu_seconds()
    environment = os.environ | {"OPENS": str(opens), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HOOK, module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = Seconds(time.monotonic() - began[0], cpu_seconds() - began[1])
    if done.returncode:
        raise SystemExit(done.stderr)
    found = Counter(opens.read_text().split() if opens.exists() else ())
    return seconds, Counter({"/".join(Path(name).parts[-2:]): count for name, count in found.items()})


def main() -> None:
    """Print a line for each program."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--stages", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = made_chain(folder, asked.rows, asked.stages)
        for number in range(asked.stages):
            data = folder / f"results/data/b{number}"
            splits = [str(data / f"{split}-split.jsonl") for split in ("train", "val")]
            options = ["--kind", "demonstrations", "--workers", "2", "--output", str(data / "check.json")]
            seconds, opens = run(folder, "scripts.data.check", "--split", *splits, *options)
            print(f"check of b{number}: {seconds}, {opens.total()} opens", flush=True)
        for time_of_all in ("first", "again"):
            total, opened = Seconds(0, 0), Counter()
            for number in range(asked.stages):
                where = ["--recipe", str(recipe), "--results", str(folder / "results"), "--stage", f"s{number}"]
                options = ["--site", str(folder / "site.yaml"), "--output", str(folder / f"preflight{number}.json")]
                seconds, opens = run(folder, "scripts.train.preflight", *where, *options)
                total, opened = Seconds(total.wall + seconds.wall, total.cpu + seconds.cpu), opened + opens
                own = sum(count for file, count in opens.items() if file.startswith(f"b{number}/"))
                others = opens.total() - own
                says = f"{seconds}, {own} opens of its splits, {others} of others"
                print(f"{time_of_all}: preflight of s{number}: {says}")
            print(f"{time_of_all}: all preflights: {total}, {opened.total()} opens", flush=True)


if __name__ == "__main__":
    main()
