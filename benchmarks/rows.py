"""What memory and time the rows of a stage take until it has trained its first step, by the size of its split.

    python benchmarks/rows.py --megabytes 10 100 1000 --output benchmarks/rows.md
    python benchmarks/rows.py --megabytes 10 100 --tree ../before --output before.md     # the code of another checkout

Makes its own splits and a small model with a vocabulary of 8,000. All rows of a split are due to be trained on, and the
training stops after its first step. Memory is the largest that a process could not give back (RssAnon in /proc): what
is mapped from disk is not counted, for the kernel drops it when memory is short.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALGORITHMS = {"SFT": "sft", "DPO": "dpo", "GRPO": "text"}
LONGEST, BATCH = 4096, 4
PROGRAM = "import sys; sys.path[:0] = sys.argv[1:3]; from benchmarks import rows; rows.train_once(*sys.argv[3:])"


def words(rng: random.Random) -> list[str]:
    """A vocabulary of made-up words."""
    return ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 11))) for _ in range(5000)]


def row_of(stage: str, rng: random.Random, vocabulary: list[str]) -> dict:
    """A row of about two kilobytes for a stage."""

    def text(mean: int) -> str:
        return " ".join(rng.choices(vocabulary, k=rng.randint(mean // 2, mean + mean // 2)))

    if stage == "dpo":
        return {"prompt": text(100), "chosen": text(100), "rejected": text(100)}
    agent = {"agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"}}
    if stage == "sft":
        roles = ("user", "assistant")
        return agent | {"messages": [{"role": role, "content": text(150)} for role in roles]}
    question = text(300)
    asked = {"input": [{"role": "user", "content": question}]}
    return agent | {"responses_create_params": asked, "question": question, "expected_answer": "1"}


def write_split(folder: Path, stage: str, size: int) -> int:
    """Write a split of about so many bytes with its manifest; its rows."""
    from scripts.files import sha256_file, write_json  # noqa: PLC0415

    rng, rows, written = random.Random(0), 0, 0
    vocabulary = words(rng)
    lines = [json.dumps(row_of(stage, rng, vocabulary))[1:] for _ in range(4000)]
    folder.mkdir(parents=True)
    split = folder / "train-split.jsonl"
    with split.open("w") as file:
        while written < size:
            written += file.write(f'{{"id": {rows}, {rng.choice(lines)}\n')
            rows += 1
    described = {"rows": rows, "sha256": sha256_file(split)}
    write_json(folder / "manifest.json", {"train": described, "validation": described})
    return rows


def save_model(folder: Path) -> None:
    """Save a small model with a tokenizer of 8,000 tokens that was trained on such rows."""
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    from tests.pretrained import SPECIALS, TEMPLATE  # noqa: PLC0415

    rng = random.Random(0)
    vocabulary = words(rng)
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator((" ".join(rng.choices(vocabulary, k=100)) for _ in range(2000)), trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **ends)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Memory(threading.Thread):
    """Watches the largest memory of this process that the kernel cannot take back, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = 0.0
        self.start()

    def run(self) -> None:
        """Look twenty times a second."""
        while True:
            held = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
            self.largest = max(self.largest, int(held[1]) / 1000)
            time.sleep(0.05)


def train_once(stage: str, folder: str, model: str, rows: str) -> None:
    """Train the first step of a stage on a split in which all rows are due; print what it took as JSON."""
    from scripts.backends.trl import train  # noqa: PLC0415
    from scripts.recipe.load import load_recipe  # noqa: PLC0415
    from scripts.stage.stop import StopRequest  # noqa: PLC0415
    from tests.conftest import ROOT as TREE  # noqa: PLC0415
    from tests.stages import Stages  # noqa: PLC0415

    stages = Stages.__new__(Stages)
    stages.directory, stages.recipe = Path(folder), load_recipe(TREE / "tests/algorithms.yaml")
    stages.split = lambda blend: Path(folder) / "train-split.jsonl"
    settings = stages.recipe.stages[stage]
    policy = settings.policy.model_copy(update={"max_total_sequence_length": LONGEST, "train_global_batch_size": BATCH})
    stages.recipe.stages[stage] = settings.model_copy(update={"policy": policy})
    stop = StopRequest(deadline=time.time())
    job = stages.job(stage, "run", int(rows) // BATCH, parent_model=Path(model), stop=stop, threads=2)
    memory, before = Memory(), time.monotonic()
    make, ready = train.TRAINERS[job.config.algorithm], []

    def timed(job: object) -> object:
        trainer = make(job)
        ready.append(time.monotonic() - before)
        return trainer

    train.TRAINERS[job.config.algorithm] = timed
    train.train_rank(job)
    print(json.dumps({"seconds": ready[0], "memory": memory.largest}))


def measure(stage: str, megabytes: int, tree: Path, model: Path, directory: Path) -> list[str]:
    """A row of the table: a split of a size, trained on by the code of a checkout, twice."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        rows = write_split(Path(folder) / "split", stage, megabytes * 1_000_000)
        found = []
        for _ in range(2):
            where = [str(Path(folder) / "split"), str(model), str(rows)]
            command = [sys.executable, "-c", PROGRAM, str(tree), str(ROOT), stage, *where]
            done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    figures = (first["seconds"], second["seconds"], max(first["memory"], second["memory"]))
    return [f"{megabytes} MB", f"{rows:,}", f"{figures[0]:.1f}", f"{figures[1]:.1f}", f"{figures[2]:,.0f}"]


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose code trains (default: this one)")
    parser.add_argument("--directory", type=Path, help="where the splits are made (default: the system's)")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    lines = [
        "| | split | rows | ready to train, s | at the second start, s | peak memory, MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        save_model(Path(directory) / "model")
        for name in arguments.algorithms:
            for megabytes in arguments.megabytes:
                stage, tree = ALGORITHMS[name], arguments.tree.resolve()
                row = measure(stage, megabytes, tree, Path(directory) / "model", Path(directory))
                lines.append("| " + " | ".join([name, *row]) + " |")
                print(lines[-1], flush=True)
    arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
