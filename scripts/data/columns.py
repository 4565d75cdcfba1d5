"""Data sets that are published as columns (Parquet), as rows of a blend.

Rows that break their contract (an empty answer, a chosen answer that equals the rejected one) are left out and counted.
"""

import json
import random
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import pyarrow.parquet as pq
from pyarrow.lib import ArrowException

from scripts.data.check import Rules
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.recipe.blend import Blend
from scripts.recipe.environment import Environment

Row = dict[str, Any]
BATCH = 1024
IN_A_BOX = "\n\nReason step by step, and put the final answer in \\boxed{}."


def gsm8k(row: Row, kind: str) -> Row:
    """openai/gsm8k: ``question``, and ``answer`` with ``#### 42`` as its last line; the marks of calculators go."""
    reasoning, mark, answer = row["answer"].rpartition("\n#### ")
    if not mark:
        raise ValueError("no line of the answer begins with ####")
    answer, question = answer.strip().replace(",", ""), row["question"] + IN_A_BOX
    if kind == "prompts":
        return _math(question, answer)
    reasoning = re.sub(r"<<[^>]*>>", "", reasoning)
    return _agent(Environment.MATH) | {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{reasoning}\n\\boxed{{{answer}}}"},
        ]
    }


def tulu3(row: Row, kind: str) -> Row:
    """Tulu 3's mixtures: ``messages``; ``chosen`` and ``rejected``; ``messages``, ``ground_truth`` and ``dataset``."""
    if kind == "demonstrations":
        return {"messages": row["messages"]}
    if kind == "preferences":
        answers = row["chosen"][-1], row["rejected"][-1]
        completions = [{"rank": rank, "completion": [answer]} for rank, answer in enumerate(answers)]
        return {"context": row["chosen"][:-1], "completions": completions}
    if row["dataset"] != "ifeval":
        return _math(row["messages"][-1]["content"], row["ground_truth"]) | _request(row["messages"])
    return _agent("tulu3_constraints") | _request(row["messages"]) | {"constraint": json.loads(row["ground_truth"])}


COLUMNS: dict[str, Callable[[Row, str], Row]] = {"gsm8k": gsm8k, "tulu3": tulu3}


def _agent(environment: str) -> Row:
    return {"agent_ref": {"type": "responses_api_agents", "name": str(environment)}}


def _request(messages: list[Row]) -> Row:
    return {"responses_create_params": {"input": messages}}


def _math(question: str, answer: str) -> Row:
    request = _request([{"role": "user", "content": question}])
    return _agent(Environment.MATH) | request | {"question": question, "expected_answer": answer}


def write_rows(sets: list[list[Path]], output: Path, blend: Blend) -> None:
    """Write the rows of a blend of columns as JSONL, set after set of files; UserError where none is left.

    With `shuffle` the rows of a set stand in another order than in its files, the same whenever the rows are.
    """
    rows = _Rows(blend)
    with open_atomically(output) as (target,):
        for files in sets:
            target.writelines(_mixed(rows.of(files), output.parent) if blend.shuffle else rows.of(files))
        if not rows.kept:
            raise UserError(f"{sets[0][0]}: no row can be trained on; the first: {rows.first_problem}")
    if rows.left_out:
        left_out = f"{rows.left_out} of {rows.kept + rows.left_out} rows left out"
        print(f"{output.name}: {left_out}; the first: {rows.first_problem}", file=sys.stderr)


def _mixed(lines: Iterator[bytes], folder: Path) -> Iterator[bytes]:
    """The lines in an order of their own; they wait in a temporary file, since they may be larger than the memory."""
    with TemporaryFile(dir=folder) as file:
        sizes = array("Q", map(file.write, lines))
        starts = [0, *accumulate(sizes)]
        order = list(range(len(sizes)))
        random.Random(0).shuffle(order)
        for number in order:
            file.seek(starts[number])
            yield file.read(sizes[number])


class _Rows:
    """The rows of a blend of columns as lines, and how many could be none."""

    def __init__(self, blend: Blend) -> None:
        self.columns, self.kind = blend.columns, blend.kind
        self.rules = Rules(blend.kind, frozenset(map(str, blend.environments)))
        self.kept = self.left_out = 0
        self.first_problem = "there is none"

    def of(self, files: list[Path]) -> Iterator[bytes]:
        """The lines of a set of files."""
        for file in files:
            try:
                for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH):
                    yield from filter(None, map(self._line, batch.to_pylist()))
            except (ArrowException, OSError) as error:
                raise UserError(f"{file}: cannot be read as Parquet: {error}") from None

    def _line(self, published: Row) -> bytes | None:
        try:
            row = COLUMNS[self.columns](published, self.kind)
            problem = self.rules.problem_of(row, row["agent_ref"]["name"] if "agent_ref" in row else None)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            problem = f"it has not the columns of {self.columns} ({type(error).__name__}: {error})"
        if problem is None:
            self.kept += 1
            return msgspec.json.encode(row) + b"\n"
        if not self.left_out:
            self.first_problem = f"row {self.kept + 1}: {problem}"
        self.left_out += 1
        return None
