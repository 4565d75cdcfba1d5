"""Ways to damage the records of a finished chain, and what the commands that read them then print."""

import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

TRACEBACK = "Traceback"
PIPE = "a pipe"
READ = (".json", ".jsonl", ".yaml", ".parquet")
"""What programs read of what a run leaves."""
OF_OTHERS = re.compile(
    r"(checkpoints/[^/]+/(?!files\.json)|exports/[0-9a-f]{16}/|/(weights|model)/|^data/source/(?!record\.json|made_from\.json)"
    r"|-split\.jsonl$|/live\.|\.snakemake)"
)
"""Files of models, of rows and of downloaded sources, which have other tests."""
WRONG = (None, True, 7, -1.5, "text", [], {}, [None], {"key": []}, "../../..")


def deep(size: int = 20_000) -> bytes:
    """JSON of so many lists within lists."""
    return b"[" * size + b"]" * size


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _writes(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        whole = path.read_bytes()
        path.unlink()
        path.write_bytes(content(whole))

    return damage


KINDS: dict[str, Callable[[Path], None]] = {
    "empty": _writes(lambda whole: b""),
    "cut in half": _writes(lambda whole: whole[: len(whole) // 2]),
    "no JSON": _writes(lambda whole: b"<html>not here</html>\n"),
    "binary": _writes(lambda whole: bytes(range(256)) * 4),
    "zeros": _writes(lambda whole: bytes(len(whole))),
    "UTF-16": _writes(lambda whole: whole.decode("utf-8", "replace").encode("utf-16")),
    "a list": _writes(lambda whole: b"[]\n"),
    "an empty object": _writes(lambda whole: b"{}\n"),
    "null": _writes(lambda whole: b"null\n"),
    "a text": _writes(lambda whole: b'"text"\n'),
    "a number": _writes(lambda whole: b"12\n"),
    "NaN": _writes(lambda whole: b'{"step": NaN, "identity": NaN, "content": NaN, "train": NaN}\n'),
    "nested deep": _writes(lambda whole: deep()),
    "a directory": _directory,
    "a dangling link": _dangling,
    PIPE: _pipe,
}


class Damage(NamedTuple):
    """One file of a chain and what is done to it."""

    file: str
    kind: str
    make: Callable[[Path], None]


def paths_within(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from paths_within(inner, (*place, key))


def replaced(value: Any, place: tuple[Any, ...], by: Any) -> Any:
    """A copy of a JSON value with another one at a place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = by
    return copy


def wrong_types(path: Path, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """A record with a value of another type at each place in turn, every so many of them, with the place's name."""
    is_lines = path.suffix == ".jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[0] if is_lines else "\n".join(lines))
    rest = "\n".join(lines[1:]) if is_lines else ""
    for number, place in enumerate(paths_within(record)):
        if number % every:
            continue
        by = WRONG[number // every % len(WRONG)]
        text = json.dumps(replaced(record, place, by))
        yield f"{'.'.join(map(str, place))} = {json.dumps(by)}", f"{text}\n{rest}".encode()


def files_left(results: Path, stage: str, blend: str) -> list[str]:
    """The files that a stage of a finished chain left, and the making of its data, as a walk finds them.

    Of a checkpoint and of an export the records count, not the model's own files; pages and logs are read by people.
    """
    folders = [results / stage, results / "data" / blend, results / "data/source", results / "settings"]
    found = {path for folder in folders for path in _below(folder)}
    found |= {path for path in results.iterdir() if path.is_file()}
    files = sorted(str(path.relative_to(results)) for path in found if path.suffix in READ)
    return [file for file in files if not OF_OTHERS.search(file)]


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder; the link to the training is followed, and those to a model are not."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path
    run = folder / "run"
    if run.is_symlink():
        yield from (run / path.relative_to(run.resolve()) for path in _below(run.resolve()))


def damages(results: Path, stage: str, blend: str, every: int = 1) -> list[Damage]:
    """All damages of what a stage of a finished chain left, and of its data."""
    found = []
    for file in files_left(results, stage, blend):
        path = results / file
        found += [Damage(file, kind, make) for kind, make in KINDS.items()]
        if path.suffix in (".json", ".jsonl"):
            found += [
                Damage(file, name, _writes(lambda whole, content=content: content))
                for name, content in wrong_types(path, every)
            ]
    return found


@contextlib.contextmanager
def damaged(path: Path, make: Callable[[Path], None]) -> Iterator[None]:
    """The file is damaged while the block runs, and is afterwards what it was."""
    kept = path.with_name(f".{path.name}.kept")
    os.link(path, kept)
    try:
        make(path)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        kept.rename(path)


class Printed(NamedTuple):
    """What a command printed, and its exit status; -1: it did not end."""

    status: int
    text: str


def preload(*modules: str) -> None:
    """Import what the commands need once, so that each call is a fork."""
    for module in modules:
        importlib.import_module(module)


def forked(arguments: list[str], seconds: float = 60.0) -> Printed:
    """``python -m`` with these arguments in a child process, which is ended after so many seconds."""
    with tempfile.TemporaryFile("w+b") as file:
        child = os.fork()
        if child == 0:
            signal.alarm(int(seconds))
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = open(1, "w", closefd=False, errors="replace")  # noqa: SIM115
            sys.stderr = sys.stdout
            sys.argv = arguments
            status = 1
            try:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                if isinstance(end.code, str):
                    print(end.code)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        _, state = os.waitpid(child, 0)
        file.seek(0)
        text = file.read().decode("utf-8", "replace")
    return Printed(os.waitstatus_to_exitcode(state), text)
