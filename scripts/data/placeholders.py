"""Placeholder rows: which external table each dataset name means, and how a row is resolved from it.

The rules are those of the released blends' own fill script as Nemotron's data preparation states them, with two
differences: an answer always stays a string (math environments declare it so), and a row that cannot be resolved
is an error and never dropped.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scripts.errors import UserError


@dataclass(frozen=True)
class Table:
    """An external table on the hub, and the way its templates are filled."""

    repository: str
    split: str
    style: Literal["dapo", "skywork"]
    file: str

    @property
    def local_path(self) -> Path:
        """Where the table's published file lies below the folder of all tables."""
        return Path(self.repository, self.file)


_DAPO = Table("BytedTsinghua-SIA/DAPO-Math-17k", "train", "dapo", "data/dapo-math-17k.parquet")
_SKYWORK = Table("Skywork/Skywork-OR1-RL-Data", "math", "skywork", "data/math-00000-of-00001.parquet")
TABLES = {
    "nano_v3_sft_profiled_dapo17k": _DAPO,
    "nano_v3_sft_profiled_skywork_no_omni": _SKYWORK,
    "super_v3_lcsft_step1000_dapo17k": _DAPO,
    "super_v3_lcsft_step1000_skyworks": _SKYWORK,
}


class Unresolved(Exception):
    """Why one placeholder row cannot be resolved; the caller adds the row's place."""


class TableReader:
    """Questions and answers of the external tables, each table read once, on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._loaded: dict[Table, tuple[pa.Array, pa.Array]] = {}

    def lookup(self, dataset: str, row: Any) -> tuple[str, str]:
        """The question and the raw ground truth at a row index (0-based, over the files joined in name order)."""
        if dataset not in TABLES:
            raise Unresolved(f"dataset {dataset!r} is not a known placeholder table ({', '.join(TABLES)})")
        if isinstance(row, bool) or not isinstance(row, int):
            raise Unresolved(f"dataset {dataset}: row index {row!r} is not an integer")
        table = TABLES[dataset]
        if table not in self._loaded:
            self._loaded[table] = self._load(table)
        questions, answers = self._loaded[table]
        if not 0 <= row < len(questions):
            raise Unresolved(f"dataset {dataset}: row {row} is outside the table's 0..{len(questions) - 1}")
        question, answer = questions[row].as_py(), answers[row].as_py()
        if not question:
            raise Unresolved(f"dataset {dataset}: row {row} has an empty question (prompt[0].content)")
        if answer is None:
            raise Unresolved(f"dataset {dataset}: row {row} has no answer (reward_model.ground_truth)")
        return question, str(answer)

    def _load(self, table: Table) -> tuple[pa.Array, pa.Array]:
        folder = self.directory / table.repository
        patterns = (f"data/{table.split}-*.parquet", "data/*.parquet", f"{table.split}/*.parquet")
        for pattern in (*patterns, f"default/{table.split}/*.parquet"):
            if paths := sorted(folder.glob(pattern)):
                break
        else:
            raise UserError(f"{folder}: no parquet file of {table.repository}; fetch the table into data/ there")
        columns = [_read_columns(path) for path in paths]
        return tuple(pa.concat_arrays([part[side] for part in columns]) for side in (0, 1))


def _read_columns(path: Path) -> tuple[pa.Array, pa.Array]:
    """Columns prompt[0].content and reward_model.ground_truth of one parquet file."""
    try:
        names = pq.read_schema(path).names
        for column in ("prompt", "reward_model"):
            if column not in names:
                raise UserError(f"{path}: no column {column}; is this the published table?")
        table = pq.read_table(path, columns=["prompt", "reward_model"])
        prompts = table["prompt"].combine_chunks()
        first = pc.list_element(prompts, 0)
        return pc.struct_field(first, "content"), pc.struct_field(
            table["reward_model"].combine_chunks(), "ground_truth"
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a table with prompt[0].content and reward_model.ground_truth: {reason}") from None


def resolve(row: dict[str, Any], tables: TableReader) -> dict[str, Any]:
    """The row with question, answer and prompt filled in from its table; Unresolved says why it cannot be."""
    placeholder = row["_hf_placeholder"]
    if not isinstance(placeholder, dict):
        raise Unresolved("_hf_placeholder is not an object")
    dataset = row.get("dataset")
    source_question, truth = tables.lookup(str(dataset), placeholder.get("row"))
    style, template = TABLES[str(dataset)].style, placeholder.get("question_template")
    if style == "dapo":
        question = prompt = fill_dapo(source_question, template)
    else:
        question, prompt = source_question, fill_skywork(source_question, template)
    params = row.get("responses_create_params") or {}
    filled = {key: value for key, value in row.items() if key != "_hf_placeholder"}
    filled["question"] = question
    filled["expected_answer"] = answer_text(truth)
    filled["responses_create_params"] = {**params, "input": [{"role": "user", "content": prompt}]}
    return filled


def fill_dapo(question: str, template: Any) -> str:
    """Drop the first and last of three or more blank-line parts, then add the template's prefix and suffix."""
    if not isinstance(template, dict):
        return question
    parts = question.split("\n\n")
    middle = "\n\n".join(parts[1:-1]) if len(parts) >= 3 else question
    return f"{template.get('prefix') or ''}{middle}{template.get('suffix') or ''}".rstrip("\n")


def fill_skywork(question: str, template: Any) -> str:
    """Put the question at every {question} of the template; without one, the question itself."""
    if not isinstance(template, str) or "{question}" not in template:
        return question
    return template.replace("{question}", question)


def answer_text(truth: str) -> str:
    """The answer in a ground truth, as a string: the first of a JSON list or object, otherwise the text itself."""
    try:
        value = json.loads(truth, parse_int=str, parse_float=str)
    except ValueError:
        return truth
    if isinstance(value, list | dict):
        if not value:
            raise Unresolved(f"the table's answer is empty: {truth}")
        value = next(iter(value.values() if isinstance(value, dict) else value))
        return value if isinstance(value, str) else json.dumps(value)
    return truth
