"""Read Python as a syntax tree, and know a user's file by it: another comment or docstring makes no new file.

A file is known by the SHA-256 of the first text seen with the same syntax tree, so an unedited file has the hash of the
text. ``<results>/store/.seen`` keeps that hash, by the hash of the tree and by the hash of every text. A text named in
trainings by the text's own hash keeps that hash.

Docstrings count where code may read them: in a text with a class, whose methods may be tools described by docstrings,
and in a text that names ``__doc__`` or `inspect`.
"""

import ast
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from scripts.files import hidden_name, sha256_text

SEEN = "STAGECOACH_SEEN"
"""The variable with the folder of what was seen; without it a file is known by its text."""
FOLDER = Path("store/.seen")
"""The folder, below the results of all runs."""
READERS = {"inspect", "pydoc", "doctest", "__doc__"}
"""Modules and names by which code reads docstrings."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ATTEMPTS = 100
"""Readings of a text while other threads read theirs."""


def parsed(source: str | bytes, name: str = "<unknown>", mode: str = "exec") -> Any:
    """Return the syntax tree of a text, as `ast.parse` does, also while another thread reads one.

    CPython 3.11 counts the depth of a tree once for all threads, and ends a reading whose count another thread has
    changed by SystemError ("AST constructor recursion depth mismatch"). A thread that prints a traceback reads, too.

    SyntaxError, ValueError, RecursionError and MemoryError as of `ast.parse`.
    """
    for _ in range(ATTEMPTS):
        try:
            return ast.parse(source, name, mode)
        except SystemError:
            continue
    return ast.parse(source, name, mode)


def see_in(root: Path) -> None:
    """Let the process and child processes use the notes of the store; `root` holds the results of all runs."""
    os.environ[SEEN] = str((root / FOLDER).absolute())


def see_beside(training: Path) -> None:
    """Let a process that was started without the variable use the notes of a training's store."""
    os.environ.setdefault(SEEN, str(training.absolute().with_name(FOLDER.name)))


def known_hash(source: bytes, keeps_docstrings: bool = False) -> str:
    """Return the SHA-256 by which a text is known, and note a new text; the hash of the text where that is no Python.

    `keeps_docstrings`: docstrings count although nothing in the text reads them.
    """
    own = sha256(source).hexdigest()
    seen = os.environ.get(SEEN)
    if not seen:
        return own
    folder = Path(seen)
    by_text = folder / (f"{own}.docstrings" if keeps_docstrings else own)
    known = _read(by_text)
    if known:
        return known
    tree = _hash_of_tree(source, keeps_docstrings)
    if tree is None:
        return own
    # Who trained by this text's own hash before anything was noted finds the training again.
    first = _noted(folder / f"tree.{tree}", own)
    known = own if first != own and _is_trained_by(folder.parent, own) else first
    return _noted(by_text, known)


def _read(note: Path) -> str:
    try:
        return note.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _noted(note: Path, content: str) -> str:
    """Return the content of a note, made now or by an earlier process; `content` where no note can be written.

    A training makes the store: before the first training nothing needs a note.
    """
    known = _read(note)
    if known or not note.parent.parent.is_dir():
        return known or content
    try:
        note.parent.mkdir(exist_ok=True)
        fresh = hidden_name(note)
        fresh.write_text(content, encoding="ascii")
        try:
            os.link(fresh, note)
        finally:
            fresh.unlink()
    except OSError:  # another was first, or the store is another person's
        return _read(note) or content
    return content


def _hash_of_tree(source: bytes, keeps_docstrings: bool) -> str | None:
    """Return a hash of a text's syntax tree, without unread docstrings; None for a text that is no Python."""
    try:
        tree = parsed(source)
        if not keeps_docstrings and not reads_docstrings(tree):
            drop_docstrings(tree)
        return sha256_text(ast.dump(tree))
    except (SyntaxError, ValueError, RecursionError):
        return None


def reads_docstrings(tree: ast.Module) -> bool:
    """Whether a text may read docstrings: by a class, or by a name of `READERS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            return True
        named = [getattr(node, key, None) for key in ("id", "attr", "module", "value")]
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        if any(isinstance(name, str) and name in READERS for name in named):
            return True
    return False


def drop_docstrings(tree: ast.Module) -> None:
    """Remove the docstrings of a module, of classes and of functions."""
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, DOCUMENTED) and node.body else None
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_docstring and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]


def _is_trained_by(store: Path, sha256: str) -> bool:
    """Whether a training of the store names a text by a hash."""
    needle = sha256.encode()
    for config in store.glob("[!.]*/config.yaml"):
        try:
            if needle in config.read_bytes():
                return True
        except OSError:
            continue
    return False
