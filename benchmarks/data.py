"""How fast a blend is filled, split and checked, beside a plain loop and beside ``cp``, and what memory it takes.

    python benchmarks/data.py --gigabytes 1 4 --output benchmarks/data.md

Makes its own input: rows of several environments, a quarter of them placeholders into two tables. Every figure of a
size is taken in one run, one program after the other, the best of `--times`. Memory is the largest sum, over a
program's processes, of their proportional set sizes, in a run of its own.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, command_line, head, peak_memory, row, seconds_of
from demo.synthesize import TABLE_SCHEMA
from scripts.data.placeholders import TABLES
from scripts.data.source_record import describe_file
from scripts.files import write_json

HOLDOUT = 100
TABLE_ROWS = 100_000
DATASETS = ("super_v3_lcsft_step1000_dapo17k", "super_v3_lcsft_step1000_skyworks")

PLAIN_LOOP = """
import json, sys
import pyarrow.parquet as pq
source, output, dapo, skywork = sys.argv[1:]
tables = {}
for name, path in (("dapo17k", dapo), ("skyworks", skywork)):
    tables[name] = pq.read_table(path).to_pylist()
with open(source) as rows, open(output, "w") as filled:
    for line in rows:
        row = json.loads(line)
        if "_hf_placeholder" in row:
            placeholder = row.pop("_hf_placeholder")
            found = tables[row["dataset"].rsplit("_", 1)[1]][placeholder["row"]]
            question, template = found["prompt"][0]["content"], placeholder["question_template"]
            if isinstance(template, dict):
                question = template["prefix"] + "\\n\\n".join(question.split("\\n\\n")[1:-1]) + template["suffix"]
            else:
                question = template.replace("{question}", question)
            row["question"] = question
            row["expected_answer"] = found["reward_model"]["ground_truth"]
            row["responses_create_params"] = {"input": [{"role": "user", "content": question}]}
        filled.write(json.dumps(row) + "\\n")
"""


class Input:
    """A blend of a size with its tables, made below a directory."""

    def __init__(self, directory: Path, gigabytes: float) -> None:
        self.directory, self.bytes = directory, int(gigabytes * 1e9)
        self.blend = directory / "blend.jsonl"
        rng = random.Random(0)
        self.words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 11))) for _ in range(5000)]
        self.words += ["größer", "π≈3.14", '"quoted"', "\n\n", "日本語", "{x}", "C:\\path"]
        self.tables = {name: self._write_table(name, rng) for name in DATASETS}
        self._write_blend(rng)
        files = {path.name: describe_file(path) for path in [self.blend]}
        origin = {"source": "benchmark", "revision": "0"}
        write_json(directory / "record.json", {"blends": {"blend": origin}, "tables": {}, "files": files})

    def text(self, rng: random.Random, words: int) -> str:
        """So many words, some of them hard to encode."""
        return " ".join(rng.choices(self.words, k=words))

    def _write_table(self, name: str, rng: random.Random) -> Path:
        path = self.directory / "tables" / TABLES[name].local_path
        path.parent.mkdir(parents=True)
        texts = [self.text(rng, 60).replace("\n", " ") for _ in range(2000)]
        rows = [
            {
                "data_source": "benchmark",
                "prompt": [{"content": f"Solve.\n\n{rng.choice(texts)} {row}\n\nAnswer last.", "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": str(row), "style": "rule"},
                "extra_info": {"index": row},
            }
            for row in range(TABLE_ROWS)
        ]
        pq.write_table(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), path)
        return path

    def _write_blend(self, rng: random.Random) -> None:
        whole = [json.dumps(self._row(rng), ensure_ascii=place % 2 == 0).encode()[1:] for place in range(3000)]
        written = number = 0
        with self.blend.open("wb") as file:
            while written < self.bytes:
                head = f'{{"id": {number}, '.encode()
                line = head + (self._placeholder(rng) if number % 4 == 3 else rng.choice(whole)) + b"\n"
                written += file.write(line)
                number += 1
        self.rows = number

    def _placeholder(self, rng: random.Random) -> bytes:
        dataset = rng.choice(DATASETS)
        template = {"prefix": "Solve: ", "suffix": ""} if dataset.endswith("dapo17k") else "Solve: {question}"
        row = {
            "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
            "dataset": dataset,
            "_hf_placeholder": {"row": rng.randrange(TABLE_ROWS), "question_template": template},
            "pass_rate": 0.25,
        }
        return json.dumps(row).encode()[1:]

    def _row(self, rng: random.Random) -> dict:
        """A row of one of four environments; its length is that of a short question or of a long tool conversation."""
        asked = {"input": [{"role": "user", "content": self.text(rng, int(rng.lognormvariate(6, 0.8)))}]}
        name = rng.choice(("mcqa", "code_gen", "single_step_tool_use", "math_with_judge"))
        if name == "mcqa":
            own = {"options": [{letter: self.text(rng, 4)} for letter in "ABCD"], "expected_answer": "A"}
            own["grading_mode"] = "strict_single_letter_boxed"
        elif name == "code_gen":
            tests = [self.text(rng, 6) for _ in range(30)]
            own = {"verifier_metadata": {"unit_tests": {"inputs": tests, "outputs": tests}}}
        elif name == "single_step_tool_use":
            string = {"type": "string", "description": self.text(rng, 12)}
            parameters = {"type": "object", "properties": dict.fromkeys("abcd", string), "required": ["a"]}
            tool = {"type": "function", "name": "find", "description": "d", "parameters": parameters, "strict": False}
            asked["tools"] = [tool] * 8
            own = {"expected_action": {"type": "function_call", "name": "find", "arguments": '{"a": "x"}'}}
            name += "_with_argument_comparison"
        else:
            own = {"question": self.text(rng, 40), "expected_answer": "34"}
        agent = f"{name}_simple_agent" if not name.startswith("single") else f"{name}_agent"
        return {
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            "responses_create_params": asked,
            **own,
        }


def megabytes_of(command: list[str]) -> float:
    """Return the largest memory of a command's processes together; looking often takes time of theirs."""
    return peak_memory(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL), 0.02) / 1e6


def figures_of(gigabytes: float, times: int, scratch: Path) -> dict[str, float]:
    """Everything that is measured of one size."""
    given = Input(scratch, gigabytes)
    output, filled = scratch / "splits", scratch / "filled.jsonl"
    fill = [sys.executable, "-m", "scripts.data.fill", f"--source={given.blend}", f"--holdout={HOLDOUT}"]
    fill += [f"--output={output}", "--workers=2"]
    check = [sys.executable, "-m", "scripts.data.check", "--workers=2", f"--output={scratch}/check.json"]
    check += ["--split", str(output / "train-split.jsonl"), str(output / "val-split.jsonl")]
    copy = scratch / "copy"
    loop = [sys.executable, "-c", PLAIN_LOOP, str(given.blend), str(filled), *map(str, given.tables.values())]
    head_and_tail = f"head -n -{HOLDOUT} {filled} > {scratch}/train && tail -n {HOLDOUT} {filled} > {scratch}/val"
    best: dict[str, float] = {"rows": given.rows}
    for _ in range(times):
        for name, command in (
            ("fill", fill),
            ("cp", ["cp", str(given.blend), str(copy)]),
            ("cp and sync", ["sh", "-c", f"cp {given.blend} {copy} && sync {copy}"]),
            ("check", check),
        ):
            copy.unlink(missing_ok=True)
            for split in output.glob("*.jsonl") if name == "fill" else ():
                split.unlink()
            seconds = seconds_of(*command)
            best[name] = min(seconds, best.get(name, seconds))
    best["plain loop"] = seconds_of(*loop) + seconds_of("sh", "-c", head_and_tail)
    best |= {"fill, MB": megabytes_of(fill), "check, MB": megabytes_of(check)}
    return best


def table(sizes: dict[float, dict[str, float]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "# Filling, splitting and checking a blend",
        "",
        "`python benchmarks/data.py --gigabytes " + " ".join(f"{size:g}" for size in sizes) + "` on 2 cores. Seconds.",
        "",
        head("", *(f"{size:g} GB" for size in sizes)),
    ]

    def line(name: str, values: list[str]) -> None:
        lines.append(row(name, *values))

    every = list(sizes.items())
    line("rows, a quarter of them placeholders", [f"{int(one['rows']):,}" for _, one in every])
    for name, called in (
        ("fill", "fill, split and manifest, synced to the disk"),
        ("plain loop", "(a) json.loads and json.dumps, then head and tail, not synced"),
        ("cp", "(b) cp, not synced"),
        ("cp and sync", "cp, then sync"),
        ("check", "check of both splits"),
    ):
        line(called, [f"{one[name]:.2f}" for _, one in every])
    line("speed beside (a)", [f"{one['plain loop'] / one['fill']:.1f}" for _, one in every])
    line("speed beside (b)", [f"{one['cp'] / one['fill']:.2f}" for _, one in every])
    line("speed beside cp and sync", [f"{one['cp and sync'] / one['fill']:.2f}" for _, one in every])
    line("checked, MB/s", [f"{size * 1000 / one['check']:.0f}" for size, one in every])
    line("peak memory of fill, MB", [f"{one['fill, MB']:.0f}" for _, one in every])
    line("peak memory of check, MB", [f"{one['check, MB']:.0f}" for _, one in every])
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure at the sizes that the command line names, and print the table; write it where asked."""
    parser = command_line(__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to make the input (default: the temporary folder)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.gigabytes, arguments.times = [0.001], 1
    sizes = {}
    for gigabytes in arguments.gigabytes:
        scratch = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            sizes[gigabytes] = figures_of(gigabytes, arguments.times, scratch)
        finally:
            shutil.rmtree(scratch)
    text = table(sizes)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
