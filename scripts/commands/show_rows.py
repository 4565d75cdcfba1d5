"""Show rows of the training splits as tokens, the learnt tokens marked."""

import argparse
import os
import sys

from scripts.backends.by_name import backend_of
from scripts.backends.tokens import remarks_on, text_of_rows, without_torch
from scripts.commands.project import project_of, snakemake_command
from scripts.errors import UserError, warn
from scripts.recipe.load import check_stage_name


def run(arguments: argparse.Namespace) -> int:
    """Print the first rows of a stage, or of all; exit status 1: a stage would refuse a row."""
    project, status = project_of(arguments), 0
    if arguments.stage:
        check_stage_name(project.recipe, arguments.stage)
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for stage in project.stages():
        if arguments.stage not in (None, stage.name):
            continue
        if not stage.train_split.exists():
            shown = f"{stage.train_split} is not there yet: {snakemake_command(stage.manifest, arguments)}"
        elif stage.parent_export_record is not None and not stage.parent_export_record.exists():
            command = snakemake_command(stage.parent_export_record, arguments)
            shown = f"the export that it starts from is not there yet: {command}"
        else:
            try:
                shown = without_torch(backend_of(stage.settings.made_by).shown_rows, stage, arguments.rows)
            except UserError as error:
                shown, status = str(error), 1
        print(f"stage {stage.name}, {stage.settings.algorithm}")
        if isinstance(shown, str):
            print(shown)
            continue
        for remark in remarks_on(shown):
            warn(f"{stage.name}: {remark}")
        print(text_of_rows(shown, str(stage.train_split), coloured))
    return status
