"""Define the commands of `stagecoach` and their options."""

import argparse
import os
from pathlib import Path

CONFIG = Path("config/config.yaml")


def given_path(text: str) -> Path:
    """Return a path of the command line as seen from the project."""
    return Path(os.path.relpath(calling_folder()), text)


def calling_folder() -> Path:
    """Return the folder that `stagecoach` was called in; the commands themselves run in the project's."""
    return Path(os.environ.get("STAGECOACH_FOLDER") or os.curdir)


def enter_project(directory: str | None) -> None:
    """Change to the project around `directory` (default: around the working directory); stay where there is none."""
    if directory is not None:
        os.chdir(directory)
    here = Path.cwd()
    os.environ["STAGECOACH_FOLDER"] = str(here)
    os.chdir(next((folder for folder in (here, *here.parents) if (folder / CONFIG).is_file()), here))


def project_options() -> argparse.ArgumentParser:
    """Return the options that name a project."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=given_path, default=CONFIG, help="default: %(default)s")
    for name in ("recipe", "site"):
        parser.add_argument(f"--{name}", type=lambda text: str(given_path(text)), help="instead of the config's")
    parser.add_argument("--run", help="instead of the config's")
    parser.add_argument("--seed", type=int, help="instead of the config's")
    parser.add_argument("--model", help="instead of the config's")
    parser.add_argument("--start", metavar="STAGE", help="the stage that starts from the model; else the config's")
    return parser


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `stagecoach` and of its commands."""
    parser = argparse.ArgumentParser(
        prog="stagecoach", description="Plan, watch, check, compare and trace the stages of a recipe."
    )
    parser.add_argument("--directory", help="a folder of the project (default: the working directory)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    project = project_options()

    def add(name: str, help: str, more: str = "", of_project: bool = False) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}", parents=[project] * of_project
        )

    init = add("init", "make a project: a folder with config, recipe, site and a Snakefile that uses this Stagecoach")
    init.add_argument("directory", type=given_path, help="a new folder")
    init.add_argument("--recipe", default="tiny", help="a shipped recipe to copy (default: %(default)s)")
    init.add_argument("--site", help="a shipped site to copy (default: laptop, for recipes of NeMo-RL h100)")
    init.add_argument("--results", type=given_path, help="a folder for results, for example on another disk")
    add(
        "plan",
        "show which stages would train now: from which step, why, on how many nodes and for how long",
        "Reads records alone, so it works while the cluster is down.",
        of_project=True,
    )
    add(
        "status",
        "show every stage in a line: fresh, queued, training, unfinished, failed",
        "Reads records and the ends of logs alone and asks no Slurm, so it may run in `watch`.",
        of_project=True,
    )
    doctor = add(
        "doctor",
        "check a recipe against a site before any job is submitted",
        "Reads files alone: recipe, site, images, checkouts, and data where present. Notes which Python of an image "
        "converts checkpoints. Exit status 1: a job would stop.",
        of_project=True,
    )
    doctor.add_argument("--command", dest="stage", metavar="STAGE", help="print NeMo-RL's command for a stage, and end")
    show = add(
        "show-rows",
        "show rows of the training splits as tokens, the learnt tokens marked",
        "Covers stages whose data and parent are there. Learnt tokens are green in a terminal, else between [[ and ]]. "
        "Exit status 1: a stage would refuse a row.",
        of_project=True,
    )
    show.add_argument("--stage", help="a single stage")
    show.add_argument("--rows", type=int, default=3, help="rows of each stage (default: %(default)s)")
    compare = add("compare", "write a page with runs side by side: curves, held-out scores, costs and configs")
    compare.add_argument("results", type=given_path, nargs="+", help="folders of results, such as results/seed7")
    compare.add_argument("--output", type=given_path, required=True, help="HTML")
    lineage = add(
        "lineage",
        "print a checkpoint's ancestors and verify their records",
        "Exit status 1: a file is missing or not as recorded; a line on stderr for each.",
    )
    lineage.add_argument("checkpoint", type=given_path, help="such as results/rlhf/ckpt")
    lineage.add_argument("--no-verify", action="store_true", help="read the records alone, no other file")
    lineage.add_argument("--json", action="store_true", help="print JSON instead of the tree")
    push = add(
        "push",
        "push a published stage's export with its model card to the Hugging Face hub, in one commit",
        "Nothing is pushed before every file of the export has its recorded hash. The token is HF_TOKEN, or the one of "
        "`hf auth login`. A new repository is private.",
    )
    push.add_argument("export", type=given_path, help="such as results/rlhf/hf")
    push.add_argument("--repository", required=True, help="organisation/name on the hub")
    push.add_argument("--card", type=given_path, help="the model card (default: made by scripts.report.card)")
    push.add_argument("--license", help="for the card that is made: the hub's name of the licence, such as apache-2.0")
    push.add_argument("--branch", help="of the repository (default: main)")
    push.add_argument("--public", action="store_true", help="make a new repository public")
    discard = add(
        "discard",
        "remove trainings that no run links to",
        "A training stays as long as a stage's run, ckpt or hf links to it. Nothing else ever removes one.",
    )
    discard.add_argument("paths", type=given_path, nargs="*", help="folders of results/store (default: all such)")
    discard.add_argument("--dry-run", action="store_true", help="name them with their sizes, and remove nothing")
    discard.add_argument("--config", type=given_path, default=CONFIG, help="default: %(default)s")
    return parser
