"""Placeholder rows: the external table behind each dataset name, looked up in flat memory, and how a row is filled.

A published table (Parquet) may hold gigabytes of text. The first lookup rewrites it as an Arrow file, which all
processes then map into memory. The rules are the released blends' fill script's, as Nemotron's data preparation states
them, with two differences: an answer stays a string, as math environments declare, and a row without a table entry is
an error, never dropped.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock

from scripts.data.published import PublishedFile
from scripts.data.source_record import differs_from_record, xxh3_file
from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.rows.jsonl import RowError

TEXT = pa.large_string()
TEXTS = pa.schema({"question": TEXT, "answer": TEXT})
_open_table = lru_cache(lambda path: pa.ipc.open_file(pa.memory_map(path)).read_all())


@dataclass(frozen=True)
class ExternalTable:
    """An external table on the hub, and the style of its templates."""

    repository: str
    style: Literal["dapo", "skywork"]
    file: str

    @property
    def local_path(self) -> Path:
        """The path of the table's file below the folder of all tables."""
        return Path(self.repository, self.file)


_DAPO = ExternalTable("BytedTsinghua-SIA/DAPO-Math-17k", "dapo", "data/dapo-math-17k.parquet")
_SKYWORK = ExternalTable("Skywork/Skywork-OR1-RL-Data", "skywork", "data/math-00000-of-00001.parquet")
TABLES = {
    "nano_v3_sft_profiled_dapo17k": _DAPO,
    "nano_v3_sft_profiled_skywork_no_omni": _SKYWORK,
    "super_v3_lcsft_step1000_dapo17k": _DAPO,
    "super_v3_lcsft_step1000_skyworks": _SKYWORK,
}


@dataclass(frozen=True)
class ExternalTables:
    """The tables below `directory`, unpacked below `unpacked` on first use.

    `hashes` are the XXH3-128 of the files, by path from the folder above `directory`.
    """

    directory: Path
    unpacked: Path
    hashes: Mapping[str, str] = field(default_factory=dict)

    def lookup(self, table: ExternalTable, row: int) -> tuple[str | None, str | None]:
        """Return question and ground truth at a row (from 0).

        IndexError, whose argument is the number of rows, for a row outside the table; UnicodeDecodeError for a text in
        another encoding.
        """
        path = self.unpacked / table.repository.replace("/", "--")
        if not path.exists():
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    _write(self._parquet(table), path)
        texts = _open_table(str(path))
        if not 0 <= row < len(texts):
            raise IndexError(len(texts))
        return texts["question"][row].as_py(), texts["answer"][row].as_py()

    def _parquet(self, table: ExternalTable) -> Path:
        """Return the table's file, whose hash is the recorded one."""
        path = self.directory / table.local_path
        if not path.is_file():
            raise UserError(f"{path}: no table of {table.repository} there; fetch the file")
        expected = self.hashes.get(str(path.relative_to(self.directory.parent)))
        if expected not in (None, xxh3_file(path)):
            raise UserError(differs_from_record(path))
        return path


def _write(parquet: Path, output: Path) -> None:
    with open_atomically(output) as (file,), pa.ipc.new_file(file, TEXTS) as writer:
        for batch in _texts(parquet):
            writer.write_batch(batch)
    pa.default_memory_pool().release_unused()


def _texts(path: Path) -> Iterator[pa.RecordBatch]:
    """Columns prompt[0].content (null of an empty prompt) and reward_model.ground_truth, some rows at a time."""
    try:
        for batch in PublishedFile(path, path.name).batches(["prompt", "reward_model"]):
            firsts = pc.list_slice(batch.content.column("prompt"), 0, 1, return_fixed_size_list=True).values
            answers = pc.struct_field(batch.content.column("reward_model"), "ground_truth")
            texts = [pc.struct_field(firsts, "content").cast(TEXT), answers.cast(TEXT)]
            yield pa.RecordBatch.from_arrays(texts, schema=TEXTS)
    except (UserError, pa.ArrowException, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path}: not a table with prompt[0].content and reward_model.ground_truth: {reason}; fetch it again"
        ) from None


class PlaceholderError(RowError):
    """Why a placeholder row cannot be filled; the caller adds file and line."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"cannot resolve the placeholder: {problem}")


Lookup = Callable[[ExternalTable, int], tuple[str | None, str | None]]


def fill_placeholder(row: dict[str, Any], lookup: Lookup) -> dict[str, Any]:
    """Return the row with question, answer and prompt from the table; PlaceholderError says why not.

    `lookup` returns question and ground truth of a table at a row, or raises IndexError with the number of rows.
    """
    placeholder, dataset = row["_hf_placeholder"], row.get("dataset")
    params = row.get("responses_create_params") or {}
    for name, value in (("_hf_placeholder", placeholder), ("responses_create_params", params)):
        if not isinstance(value, dict):
            raise PlaceholderError(f"{name} is not an object")
    if not isinstance(dataset, str) or dataset not in TABLES:
        raise PlaceholderError(f"dataset {dataset!r} is not a known placeholder table ({', '.join(TABLES)})")
    source_question, truth = _look_up(dataset, placeholder.get("row"), lookup)
    template = placeholder.get("question_template")
    if TABLES[dataset].style == "dapo":
        question = prompt = fill_dapo(source_question, template)
    else:
        question, prompt = source_question, fill_skywork(source_question, template)
    return {key: value for key, value in row.items() if key != "_hf_placeholder"} | {
        "question": question,
        "expected_answer": answer_text(truth),
        "responses_create_params": {**params, "input": [{"role": "user", "content": prompt}]},
    }


def _look_up(dataset: str, row: Any, lookup: Lookup) -> tuple[str, str]:
    if isinstance(row, bool) or not isinstance(row, int):
        raise PlaceholderError(f"dataset {dataset}: row index {row!r} is not an integer")
    try:
        question, answer = lookup(TABLES[dataset], row)
    except IndexError as error:
        raise PlaceholderError(f"dataset {dataset}: row {row} is outside the table's 0..{error.args[0] - 1}") from None
    except UnicodeDecodeError:
        raise PlaceholderError(f"dataset {dataset}: row {row} is not UTF-8; fetch the table again") from None
    if not question or answer is None:
        lacks = "answer (reward_model.ground_truth)" if question else "question (prompt[0].content)"
        raise PlaceholderError(f"dataset {dataset}: row {row} has no {lacks}")
    return question, answer


def fill_dapo(question: str, template: Any) -> str:
    """Drop the first and last of three or more blank-line parts, then add the template's prefix and suffix."""
    if not isinstance(template, dict):
        return question
    prefix, suffix = (template.get(key) or "" for key in ("prefix", "suffix"))
    if not isinstance(prefix, str) or not isinstance(suffix, str):
        raise PlaceholderError("question_template's prefix and suffix must be strings")
    parts = question.split("\n\n")
    middle = "\n\n".join(parts[1:-1]) if len(parts) >= 3 else question
    return f"{prefix}{middle}{suffix}".rstrip("\n")


def fill_skywork(question: str, template: Any) -> str:
    """Put the question at every {question} of the template; without a placeholder, return the question."""
    if not isinstance(template, str) or "{question}" not in template:
        return question
    return template.replace("{question}", question)


def answer_text(truth: str) -> str:
    """Return the answer in a ground truth as a string: the first value of a JSON list or object, or else the text.

    A number keeps its digits as written.
    """
    if not truth.lstrip().startswith(("[", "{")):
        return truth
    try:
        value, digits = json.loads(truth), json.loads(truth, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return truth
    first, as_written = _first(value), _first(digits)
    if first is None:
        raise PlaceholderError(f"the table's answer is empty: {truth}")
    return as_written if isinstance(as_written, str) else json.dumps(first)


def _first(value: list[Any] | dict[str, Any]) -> Any:
    return next(iter(value.values() if isinstance(value, dict) else value), None)
