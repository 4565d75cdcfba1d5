"""What the tests share."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def write_rows(tmp_path):
    """Write rows (objects, or bytes for a damaged line) as a JSONL file."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.write_bytes(
            b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
        )
        return path

    return write
