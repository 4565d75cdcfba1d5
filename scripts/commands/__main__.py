"""The command `stagecoach`.

Only the command that is called is imported, so that help, completion and `watch stagecoach status` are quick.
"""

import argparse
import os
from importlib import import_module

from scripts.commands.arguments import command_parser, enter_project
from scripts.errors import run_program


def main() -> int | None:
    """Command line of `stagecoach`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--directory")
    given, rest = first.parse_known_args()  # before or behind the command
    enter_project(given.directory)
    parser = command_parser()
    if "_ARGCOMPLETE" in os.environ:
        from argcomplete import autocomplete  # noqa: PLC0415

        from scripts.commands.completion import candidates  # noqa: PLC0415

        autocomplete(parser, always_complete_options="long", default_completer=candidates)
    arguments = parser.parse_args(rest)
    return import_module(f"scripts.commands.{arguments.command.replace('-', '_')}").run(arguments)


if __name__ == "__main__":
    run_program(main)
