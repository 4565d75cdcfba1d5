"""Tables of cases as data: the folder tests/unit/cases has a file a subject, of tables by name."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent / "unit/cases"


@cache
def tables_of(subject: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{subject}.yaml").read_text())


def cases(table: str, *names: str) -> pytest.MarkDecorator:
    """Run a test with each row of a `subject.table`; a row is a list of the parameters of these names, or says them."""
    subject, _, name = table.partition(".")
    rows = tables_of(subject)[name]
    ids, rows = ([*rows], rows.values()) if isinstance(rows, dict) else (None, rows)
    plain = [[row[each] for each in names] if isinstance(row, dict) and len(names) > 1 else row for row in rows]
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], plain, ids=ids)
