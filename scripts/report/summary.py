"""summary.csv: one row a stage."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from scripts.errors import UserError
from scripts.files import open_atomically
from scripts.report.selection import selection_sentences
from scripts.report.trained_stage import TrainedStage
from scripts.stage.paths import StagePaths


def rows_of(stages: Iterable[StagePaths]) -> Iterator[dict[str, Any]]:
    """Yield a row a stage; print damaged records and mark the row."""
    for stage in stages:
        try:
            says = " ".join(selection_sentences(stage.directory.parent, [stage.name]))
            yield TrainedStage(stage).row | ({"selection": says} if says else {})
        except UserError as error:
            print(error, file=sys.stderr)
            yield {"stage": stage.name, "gate": "damaged"}


def write_summary(stages: Iterable[StagePaths], output: Path) -> None:
    """Write summary.csv."""
    table = pd.DataFrame(rows_of(stages))
    with open_atomically(output) as (file,):
        table.to_csv(file, index=False, float_format="%.6g")
