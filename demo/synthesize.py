"""Write a local stand-in for the hub: a recipe's blends and the two placeholder tables, in the published layout.

Rows follow NeMo-Gym's contract (``agent_ref``, ``responses_create_params``, the verifier's fields). A share of the math
rows are ``_hf_placeholder`` rows into two Parquet tables like DAPO-Math-17k and Skywork-OR1. The last `holdout` rows of
a blend have prompts of no training row. A preference prefers the right answer to a spoilt one; an
unpaired answer is either.
"""

import argparse
import hashlib
import io
import json
import random
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demo.tasks import FAMILIES, Task, hallucinate, make_task, spoil
from scripts.data.download import fetch_source
from scripts.data.placeholders import TABLES
from scripts.data.source_record import describe_file
from scripts.errors import UserError, run_program
from scripts.files import open_atomically, write_json
from scripts.recipe.blend import SynthesizedBlend
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe

DAPO_WRAPPER = (
    "Solve the following math problem step by step.\n\n{question}\n\nRemember to put your answer on its own line."
)
CLEAN_SHARE = 0.75
SPOILT_SHARE = 0.85
WANTED_SHARE = 0.5


class _Tables:
    """The external tables being written, a row for each placeholder."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("dapo", "skywork")}

    def placeholder(self, task: Task, style: str) -> dict[str, Any]:
        question, answer = task.fields["question"], task.fields["expected_answer"]
        if style == "dapo":
            dataset, template = "super_v3_lcsft_step1000_dapo17k", {"prefix": "math: ", "suffix": ""}
            content, truth = DAPO_WRAPPER.format(question=question), answer
        else:
            dataset, template = "super_v3_lcsft_step1000_skyworks", "math: {question}"
            content, truth = question, json.dumps([answer])
        rows = self.rows[style]
        rows.append(
            {
                "data_source": style,
                "prompt": [{"content": content, "role": "user"}],
                "ability": "math",
                "reward_model": {"ground_truth": truth, "style": "rule"},
                "extra_info": {"index": len(rows)},
            }
        )
        return {"_hf_placeholder": {"row": len(rows) - 1, "question_template": template}, "dataset": dataset}


def is_held_out(environment: Environment, prompt: str) -> bool:
    """Whether a prompt, one in ten by hash, is reserved for validation."""
    return hashlib.sha256(f"{environment}\n{prompt}".encode()).digest()[0] < 26


def synthesize_blend(name: str, blend: SynthesizedBlend, recipe: Recipe, tables: _Tables) -> list[dict[str, Any]]:
    """Return the rows of a blend in training order."""
    if blend.kind in ("preferences", "unpaired") and blend.pictures:
        raise UserError(f"blend {name}: synthetic {blend.kind} have no pictures; leave out blends.{name}.pictures")
    if strange := [environment for environment in blend.environments if environment not in FAMILIES]:
        raise UserError(
            f"blend {name}: no rows of {', '.join(strange)} can be synthesized; give it a source that has them"
        )
    rng = random.Random(f"{recipe.source.seed}/{name}")
    training_rows = blend.rows - blend.holdout
    rows, seen = [], set()
    while len(rows) < blend.rows:
        held_out = len(rows) >= training_rows
        environment = rng.choice(blend.environments)
        can_show = FAMILIES[environment].make_with_picture is not None and blend.pictures > 0
        has_picture = can_show and rng.random() < blend.pictures
        task = make_task(environment, rng, has_picture)
        asked = f"{task.prompt}{task.image or ''}"
        if is_held_out(environment, asked) != held_out or (held_out and asked in seen):
            continue
        seen.add(asked)
        spoilt = not held_out and len(rows) >= CLEAN_SHARE * training_rows and rng.random() < SPOILT_SHARE
        rows.append(_row(task, environment, blend, spoilt, rng, recipe.source.placeholder_share, tables))
    return rows


def _row(
    task: Task,
    environment: Environment,
    blend: SynthesizedBlend,
    spoilt: bool,
    rng: random.Random,
    placeholder_share: float,
    tables: _Tables,
) -> dict[str, Any]:
    agent = {"agent_ref": {"type": "responses_api_agents", "name": str(environment)}}
    if blend.kind == "preferences":
        return {"prompt": task.prompt, "chosen": task.answer, "rejected": _spoil(task, environment, blend, rng)}
    if blend.kind == "unpaired":
        label = rng.random() < WANTED_SHARE
        answer = task.answer if label else _spoil(task, environment, blend, rng)
        return {"prompt": task.prompt, "completion": answer, "label": label}
    if blend.kind == "demonstrations":
        answer = _spoil(task, environment, blend, rng) if spoilt else task.answer
        messages = [{"role": "user", "content": task.content}, {"role": "assistant", "content": answer}]
        return {**agent, "messages": messages}
    if task.image is None and environment is Environment.MATH and rng.random() < placeholder_share:
        return {**agent, **tables.placeholder(task, rng.choice(("dapo", "skywork")))}
    params: dict[str, Any] = {"input": [{"role": "user", "content": task.content}]}
    if task.tools:
        params["tools"] = list(task.tools)
    return {**agent, "responses_create_params": params, **task.fields}


def _spoil(task: Task, environment: Environment, blend: SynthesizedBlend, rng: random.Random) -> str:
    if blend.hallucinated_tools and task.tools:
        return hallucinate(task.answer)
    return spoil(environment, task.answer, rng)


def write_source(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """Write all blends, tables and ``record.json`` below a directory; return the record."""
    tables = _Tables()
    written = []
    for name, blend in recipe.fetched.items():
        path = directory / f"{name}.jsonl"
        with open_atomically(path) as (file,):
            for row in synthesize_blend(name, blend, recipe, tables):
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        written.append(path)
    for style, rows in tables.rows.items():
        path = directory / "tables" / next(table for table in TABLES.values() if table.style == style).local_path
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), buffer)
        with open_atomically(path) as (file,):
            file.write(buffer.getvalue())
        written.append(path)
    revision = f"synthetic-{recipe.source.seed}"
    record = {
        "blends": {name: {"source": "synthetic", "revision": revision} for name in recipe.fetched},
        "tables": {table.repository: revision for table in sorted(set(TABLES.values()), key=attrgetter("repository"))},
        "files": {str(path.relative_to(directory)): describe_file(path) for path in sorted(written)},
    }
    write_json(directory / "record.json", record)
    return record


TABLE_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64())])),
    ]
)


def main() -> None:
    """Command line of the synthesizer."""
    parser = argparse.ArgumentParser(prog="python -m demo.synthesize", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, required=True, help="recipe YAML whose blends to write")
    parser.add_argument("--output", type=Path, required=True, help="directory for the blends, tables/ and record.json")
    parser.add_argument("--workers", type=int, default=1, help="processes, for blends of other sources")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if recipe.synthesized == recipe.fetched:
        write_source(recipe, arguments.output)
    else:
        fetch_source(recipe, arguments.output, max(1, arguments.workers), write_source)


if __name__ == "__main__":
    run_program(main)
