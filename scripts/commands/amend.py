"""Let a stage go on from its newest checkpoint under another environment's file, pin or setting."""

import argparse
from dataclasses import replace

from scripts.commands.project import project_of
from scripts.errors import UserError
from scripts.recipe.load import check_stage_name
from scripts.stage.amending import amend, undo
from scripts.stage.stage import Stage


def run(arguments: argparse.Namespace) -> None:
    """Amend the stage, or undo its amendment, and print what happens next."""
    project = project_of(arguments)
    name = arguments.stage
    check_stage_name(project.recipe, name, "")
    if name not in project.recipe.stages:
        raise UserError(f"{name}: is not trained itself; amend the stage that trains it")
    stage = Stage(project.recipe, project.results, name, root=project.root)
    state = project.states()[name]
    if state.identity is None or state.planned is None:
        raise UserError(f"{name}: cannot be amended yet: {state.note or 'its data come first'}")
    if state.state == "training":
        raise UserError(f"{name}: {state.note} is at work; wait for it or stop it, then amend")
    if arguments.undo:
        undone = undo(stage)
        print(f"{name}: amendment undone; {undone['identity']} stays in the store")
        print(f"now: identity {replace(stage).identity}")
        return
    if arguments.because is None:
        raise UserError(f"amend {name}: give the reason with --because (or --undo)")
    amendment = amend(stage, arguments.because, project.site.group)
    changed = " and ".join(amendment["changed"])
    print(
        f"{name}: amended at step {amendment['step']} of {amendment['planned']}: {changed} changed, because "
        f"{amendment['because']}"
    )
    print(f"goes on from {amendment['from']} as {amendment['identity']}: call snakemake")
