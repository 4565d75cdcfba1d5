"""The commands of `stagecoach` and their options, for people and for completion."""

import argparse
import os
from pathlib import Path

CONFIG = Path("config/config.yaml")


def given_path(text: str) -> Path:
    """A path on the command line, from the project."""
    return Path(os.path.relpath(calling_folder()), text)


def calling_folder() -> Path:
    """The folder that `stagecoach` was called in; the commands themselves run in the project's."""
    return Path(os.environ.get("STAGECOACH_FOLDER") or os.curdir)


def enter_project(directory: str | None) -> None:
    """Change to the folder of the project that the working directory, or this one, lies in; nowhere if in none."""
    if directory is not None:
        os.chdir(directory)
    here = Path.cwd()
    os.environ["STAGECOACH_FOLDER"] = str(here)
    os.chdir(next((folder for folder in (here, *here.parents) if (folder / CONFIG).is_file()), here))


def project_options() -> argparse.ArgumentParser:
    """The options of the commands that speak of a project."""
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
    """The parser of `stagecoach` and of all its commands."""
    parser = argparse.ArgumentParser(
        prog="stagecoach", description="Plan, watch, check, compare and trace the stages of a recipe."
    )
    parser.add_argument("--directory", help="of the project (default: the one that the working directory lies in)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    project = project_options()

    def add(name: str, help: str, more: str = "", of_project: bool = False) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}", parents=[project] * of_project
        )

    init = add(
        "init",
        "make a project: a folder with config, recipe, site and a Snakefile that uses this Stagecoach",
        "The site is filled in from sinfo or nvidia-smi, where they are.",
    )
    init.add_argument("directory", type=given_path, help="a new folder")
    init.add_argument("--recipe", default="tiny", help="a shipped one, which is copied (default: %(default)s)")
    init.add_argument("--results", type=given_path, help="where results go, such as a folder on another disk")
    plan = add(
        "plan",
        "what would train if the workflow ran now: from which step, why, on how many nodes and for how long",
        "It reads records only, so it works while the cluster is down. What is set aside is listed with its size.",
        of_project=True,
    )
    plan.add_argument(
        "--ladder", action="store_true", help="instead: what the chain costs on each rung below and above the recipe"
    )
    add(
        "status",
        "where every stage stands, one line each: fresh, queued, training, unfinished, failed",
        "It asks no Slurm and reads records and the ends of logs only, so it may run in `watch`.",
        of_project=True,
    )
    doctor = add(
        "doctor",
        "find what would go wrong with a recipe on a site before anything is submitted",
        "It reads files only: recipe, site, images, checkouts, and the data where they are there. Of images it notes "
        "which Python will convert the checkpoints. Exit status 1: something would stop.",
        of_project=True,
    )
    doctor.add_argument(
        "--command",
        dest="stage",
        metavar="STAGE",
        help="print what NeMo-RL would be told of a stage, apart from the deadline, and end",
    )
    show = add(
        "show-rows",
        "rows as the stages train on them: the very tokens, and which of them are learnt",
        "Of stages whose data and start are there. What is learnt is green in a terminal, else between [[ and ]]. Exit "
        "status 1: a stage would refuse a row.",
        of_project=True,
    )
    show.add_argument("--stage", help="of this stage alone")
    show.add_argument("--rows", type=int, default=3, help="of each stage (default: %(default)s)")
    compare = add("compare", "runs side by side on one page: curves, held-out scores, costs and configs")
    compare.add_argument("results", type=given_path, nargs="+", help="folders of results, such as results/seed7")
    compare.add_argument("--output", type=given_path, required=True, help="HTML")
    lineage = add(
        "lineage",
        "print where a checkpoint comes from, verify all that its records tell, and draw the chain",
        "Exit status 1: something on disk is missing or not as recorded; one line each on stderr.",
    )
    lineage.add_argument("checkpoint", type=given_path, help="such as results/rlhf/ckpt")
    lineage.add_argument("--no-verify", action="store_true", help="read the records alone, no other file")
    lineage.add_argument("--json", action="store_true", help="print JSON instead of the tree")
    lineage.add_argument("--graph", type=given_path, help="write the graph: .svg, .dot (Graphviz) or .mmd (Mermaid)")
    push = add(
        "push",
        "push a published stage's export with its model card to the Hugging Face hub, in one commit",
        "Nothing is pushed before every file of the export has the hash that its record says. The token is HF_TOKEN, "
        "or that of `hf auth login`. A repository that is not there yet is made private.",
    )
    push.add_argument("export", type=given_path, help="such as results/rlhf/hf")
    push.add_argument("--repository", required=True, help="organisation/name on the hub")
    push.add_argument("--card", type=given_path, help="the model card; none: the one that scripts.report.card makes")
    push.add_argument("--license", help="for the card that is made: the hub's name of it, such as apache-2.0")
    push.add_argument("--adapter", action="store_true", help="the adapter alone, of a stage that trained one")
    push.add_argument("--branch", help="of the repository; none: main")
    push.add_argument("--public", action="store_true", help="a repository that is made anew is public")
    discard = add(
        "discard",
        "remove run directories that were set aside",
        "Nothing else ever removes them; `stagecoach status` lists them.",
    )
    discard.add_argument("paths", type=given_path, nargs="+", help="run.<identity> directories")
    return parser
