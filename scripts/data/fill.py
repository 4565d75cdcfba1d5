"""Resolve a blend's ``_hf_placeholder`` rows from the external tables; every other row passes byte for byte.

One row that cannot be resolved fails the whole blend: the message names file, line, dataset and row index, and
no output appears.
"""

import argparse
import json
from pathlib import Path

from scripts.data.placeholders import TableReader, Unresolved, resolve
from scripts.data.rows import read_rows
from scripts.errors import UserError, run_program
from scripts.files import open_atomically


def fill_blend(source: Path, tables_directory: Path, output: Path) -> int:
    """Write `output` from `source` with every placeholder resolved; returns how many there were."""
    tables = TableReader(tables_directory)
    resolved = 0
    with open_atomically(output) as (file,):
        for number, line, row in read_rows(source):
            if "_hf_placeholder" in row:
                try:
                    filled = json.dumps(resolve(row, tables), ensure_ascii=False).encode()
                except Unresolved as reason:
                    raise UserError(
                        f"{source}:{number}: cannot resolve the placeholder: {reason}; correct the row or the table "
                        f"below {tables_directory}"
                    ) from None
                file.write(filled + b"\n")
                resolved += 1
            else:
                file.write(line + b"\n")
    return resolved


def main() -> None:
    """Command line of the filler."""
    parser = argparse.ArgumentParser(prog="python -m scripts.data.fill", description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="blend as published (JSONL)")
    parser.add_argument("--tables", type=Path, help="folder of the external tables (default: tables/ beside the blend)")
    parser.add_argument("--output", type=Path, required=True, help="filled blend")
    arguments = parser.parse_args()
    tables = arguments.tables or arguments.source.with_name("tables")
    resolved = fill_blend(arguments.source, tables, arguments.output)
    print(f"{arguments.output}: {resolved} placeholder rows resolved")


if __name__ == "__main__":
    run_program(main)
