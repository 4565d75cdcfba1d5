"""Define the commands of `stagecoach` and their options."""

import argparse
import json
import os
from pathlib import Path

from scripts.installed import DISTRIBUTION, version_of

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


KINDS = {"path": given_path, "text": lambda text: str(given_path(text)), "int": int, "float": float}


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `stagecoach` and of its commands, by commands.json.

    Its options are argparse's words; a `path` is meant from the calling folder, a `text` is such a path as text.
    """
    said = json.loads(Path(__file__).with_name("commands.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        prog="stagecoach", description="Plan, watch, check, compare and trace the stages of a recipe."
    )
    version = f"%(prog)s {version_of(DISTRIBUTION) or '(not installed)'}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--directory", help="a folder of the project (default: the working directory)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in said["commands"].items():
        summary = command["help"]
        description = f"{summary[0].upper()}{summary[1:]}. {command.get('more', '')}"
        subparser = commands.add_parser(name, help=summary, description=description)
        shared = said["project"] if command.get("of_project") else {}
        for option, words in (shared | command.get("options", {})).items():
            typed = {"type": KINDS[words["type"]]} if "type" in words else {}
            subparser.add_argument(option, **words | typed)
        subparser.set_defaults(config=CONFIG)
    return parser
