"""What loads an export: transformers 4 and 5, vLLM's build for CPUs, llama.cpp's converter and server.

    make loaders        # makes the environments, and calls this with --output benchmarks/loaders.md

Exports of five architectures, made by the product's code, are read by each program in an environment of its own. The
models have random weights and a rotary base of their own; the recipe names a pad token and another chat template.
Tokens of four texts are compared, the last by the chat template, and the log-probabilities of the next tokens.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, command_line, end_for_lack_of, head, row
from tests.loaders.compare import Comparison, compare, read_by, write_parents
from tests.loaders.exports import make_exports, write_spec
from tests.loaders.parents import ARCHITECTURES

TRANSFORMERS_4 = ROOT / ".venv-transformers-4/bin/python"
LLAMA_CPP = ROOT / ".venv-llama-cpp/bin/python"
VLLM = ROOT / ".venv-vllm/bin/python"
OF_4, OF_5 = "form of transformers 4", "form of transformers 5"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Weights of all architectures are tiny; threads would only wait for each other."""


def is_read(program: str, export: str) -> bool:
    """Whether a program is asked to read an export."""
    kind = export.rpartition(", ")[2]
    if program == "transformers 4":
        return OF_5 not in export
    if program == "vLLM":  # an engine takes half a minute to start
        return kind == "trained" and OF_4 in export
    if program == "llama.cpp":  # which reads no head of one label
        return kind != "reward model"
    return True


def make_all(place: Path, architectures: tuple[str, ...]) -> dict[str, Path]:
    """Make the exports of parents in both forms; their folders by name."""
    parents = {}
    for form, python in ((OF_4, TRANSFORMERS_4), (OF_5, Path(sys.executable))):
        made = write_parents(python, place / form.rpartition(" ")[2], architectures)
        parents |= {f"{name}, {form}": folder for name, folder in made.items()}
    return make_exports(parents, place / "exports")


def compare_all(
    exports: dict[str, Path], place: Path, programs: dict[str, tuple[Path, str]]
) -> dict[str, list[Comparison]]:
    """Return what each program read, held against transformers 5."""
    every = place / "every.json"
    write_spec(exports, every)
    reference = read_by(sys.executable, "by_transformers", every, **ONE_THREAD)
    found = {}
    for program, (python, reader) in programs.items():
        spec = place / f"{program.replace(' ', '-')}.json"
        write_spec({name: folder for name, folder in exports.items() if is_read(program, name)}, spec)
        read = read_by(python, reader, spec, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", **ONE_THREAD)
        found[program] = compare(reference, read, spec)
        print(f"{program}: {len(found[program])} exports read", flush=True)
    return found


def report(exports: dict[str, Path], found: dict[str, list[Comparison]]) -> str:
    """Return the page."""
    lines = [
        "# What loads an export",
        "",
        "Written by `make loaders`. A cell is the largest difference of a next token's log-probability from",
        "transformers 5, where all tokens are equal; `tokens differ` where they are not; `-`: it was not asked.",
        "",
        head("export", *found),
    ]
    for name in exports:
        cells = []
        for compared in found.values():
            each = next((one for one in compared if one.export == name), None)
            if each is None:
                cells.append("-")
            else:
                cells.append(f"{each.largest:.0e}" if each.largest is not None else "tokens differ")
        lines.append(row(name, *cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without", nargs="*", default=[], help="programs to leave out, such as vLLM")
    arguments = parser.parse_args()
    programs = {
        "transformers 4": (TRANSFORMERS_4, "by_transformers"),
        "llama.cpp": (LLAMA_CPP, "by_llama_cpp"),
        "vLLM": (VLLM, "by_vllm"),
    }
    programs = {name: given for name, given in programs.items() if name not in arguments.without}
    architectures = ARCHITECTURES
    if arguments.smoke:
        architectures, programs = ("llama",), {"transformers 4": programs["transformers 4"]}
    if lacking := [name for name, (python, _) in programs.items() if not python.exists()]:
        end_for_lack_of(f"{', '.join(lacking)}: make loaders")
    with tempfile.TemporaryDirectory() as folder:
        exports = make_all(Path(folder), architectures)
        found = compare_all(exports, Path(folder), programs)
    text = report(exports, found)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
