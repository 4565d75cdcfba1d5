"""Run the command `stagecoach`; import no module but the called subcommand's, for a quick help and status."""

import argparse
from importlib import import_module

from scripts.commands.arguments import command_parser, enter_project
from scripts.errors import run_program


def main() -> int | None:
    """Parse the command line of `stagecoach` and run the subcommand."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--directory")
    given, rest = first.parse_known_args()  # before or behind the command
    enter_project(given.directory)
    arguments = command_parser().parse_args(rest)
    return import_module(f"scripts.commands.{arguments.command.replace('-', '_')}").run(arguments)


if __name__ == "__main__":
    run_program(main)
