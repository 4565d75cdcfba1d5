"""The command line of a program, made of the signature of its function."""

import argparse
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from scripts.errors import run_program


def run_command_line(main: Callable[..., int | None]) -> None:
    """Run `main` with the arguments of the command line."""
    run_program(lambda: main(**arguments_of(main)))


def arguments_of(main: Callable[..., int | None], words: list[str] | None = None) -> dict[str, Any]:
    """Parse the words of a command line (None: of the current): an option for each parameter of `main`.

    An option is required where the parameter has no default. `Annotated` bears the help, and a function that reads the
    text where the type does not. A list takes several values, a bool none.
    """
    module = sys.modules[main.__module__]
    name = module.__spec__.name if module.__spec__ else module.__name__
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=module.__doc__.partition("\n")[0])
    for parameter in signature(main).parameters.values():
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", **_options(parameter))
    return vars(parser.parse_args(words))


def _options(parameter: Parameter) -> dict[str, Any]:
    """Return argparse's words for a parameter."""
    kind, told = parameter.annotation, []
    if get_origin(kind) is Annotated:
        kind, *told = get_args(kind)
    is_required = parameter.default is Parameter.empty
    options: dict[str, Any] = {"help": told[0] if told else None, "required": is_required}
    options["default"] = None if is_required else parameter.default
    if kind is bool:
        return options | {"action": "store_true"}
    if isinstance(kind, UnionType):
        kind, options["nargs"] = next(each for each in get_args(kind) if each is not NoneType), "?"
    if get_origin(kind) is Literal:
        return options | {"choices": get_args(kind)}
    if get_origin(kind) is list:
        kind, options["nargs"] = get_args(kind)[0], "+" if is_required else "*"
    return options | {"type": told[1] if len(told) > 1 else kind}
