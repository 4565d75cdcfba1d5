"""Programs that try to get out of the sandbox, to be paid for nothing, to end the training or to use up the machine.

They stand in hostile_programs.yaml: whole programs, functions, and calls of the kernel, each of which is a program of its own.
"""

import platform
from pathlib import Path

import yaml

_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PRELUDE: str = _READ["prelude"]
PROGRAMS: dict[str, str] = _READ["programs"]
FUNCTIONS: dict[str, str] = _READ["functions"]

if platform.machine() == "x86_64":
    for line in _READ["calls"].splitlines():
        name, number, *rest = line.split(" ", 2)
        arguments = "".join(f", {given}" for given in rest)
        PROGRAMS[f"call {number}, {name}"] = f"escaped(raw({number}{arguments}))"
    for number in (*range(470, 480), 511, 1000, 0x3FFFFFFF):
        PROGRAMS[f"call {number}, not known"] = (
            f"raw({number}, 0, 0, 0)\nif ctypes.get_errno() != errno.ENOSYS: escaped()"
        )
