"""The code that a verdict depends on: an environment's file, the local modules it imports, and the verifiers here.

Nothing is run: imports are read from the text. What a file computes at run time (a module's name put together, a file
found by a pattern) is not seen.
"""

import ast
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from scripts.errors import UserError
from scripts.files import canonical_json, sha256_file, sha256_text
from scripts.installed import environment_files, versions_of_modules
from scripts.python_files import drop_docstrings, known_hash, parsed, reads_docstrings
from scripts.recipe.yaml_file import installation

OF_ALL = ("rewards/registry.py", "rewards/answers.py", "rewards/verdict.py", "rows/thoughts.py")
"""Modules that every verdict here passes through: they part thoughts from answers and turn failures into no verdict."""
OF_OWN, OF_GYM, OF_SHIPPED = "rewards/own.py", "rewards/gym.py", "rewards/environments"
JUDGING_ROOMS = ("rewards", "rows")
"""Rooms whose code decides a verdict; messages, files and settings live in others."""
LONGEST_NAME = 255


@dataclass(frozen=True)
class Code:
    """Code with everything local that it imports.

    Attributes:
        texts: SHA-256 by module or data file, named as the code names them.
        modules: Names of the imported modules that are not local.
    """

    texts: dict[str, str]
    modules: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Return one hash of all texts."""
        return sha256_text(canonical_json(self.texts))

    @property
    def with_versions(self) -> dict[str, str]:
        """Return what this Python runs: the hash, with the versions of Python and of the imported packages."""
        python = ".".join(map(str, sys.version_info[:2]))
        return {"code": self.sha256, "python": python, **versions_of_modules(self.modules)}


def code_of(
    environment: str, own: dict[str, Path], is_by_gym: bool = False, hash_of: Callable[[Path], str] = sha256_file
) -> Code:
    """Return the code that judges the rows of an environment.

    `own` are the files of the user's environments by name. `is_by_gym`: a server of NeMo-Gym judges, and the code here
    is its client. `hash_of` gives the SHA-256 of a data file.
    """
    if is_by_gym:
        return _code_here(OF_GYM)
    if environment in own:
        here, its = _code_here(OF_OWN), code_of_file(own[environment], hash_of)
        return Code({**here.texts, **its.texts}, tuple(sorted({*here.modules, *its.modules})))
    shipped = environment_files().get(environment)
    return _code_here(f"{OF_SHIPPED}/{shipped.name}" if shipped else OF_GYM)


def code_of_file(path: Path, hash_of: Callable[[Path], str] = sha256_file) -> Code:
    """Return a user's file with the local modules that it imports, theirs too, and the data files that they name.

    A file that is missing has no texts; one that is no Python has its own alone. `hash_of` gives the SHA-256 of a data
    file.
    """
    texts, others = dict[str, str](), set[str]()
    waiting, done = [(path.name, path)], set[Path]()
    keeps_docstrings = False
    while waiting:
        name, file = waiting.pop()
        source = None if file in done else _source_of(file)
        if source is None:
            continue
        done.add(file)
        tree = _parsed(source)
        # What a class has for a method may be a tool, which its docstring describes, also of a function imported.
        keeps_docstrings = keeps_docstrings or (tree is not None and reads_docstrings(tree))
        texts[name] = known_hash(source, keeps_docstrings)
        if tree is None:
            continue
        roots = [file.parent, *_local_roots()]
        for module in _imported(tree, _package_of(file, roots)):
            found = _local_files(module, roots)
            waiting += found
            if not found:
                others.add(module.partition(".")[0])
        texts |= _data_files(tree, roots, hash_of)
    return Code(texts, tuple(sorted(others)))


def hash_of_environment(path: Path, hash_of: Callable[[Path], str] = sha256_file) -> str:
    """Return a hash of a user's environment: of its file, and of what it imports and names, if anything.

    `hash_of` gives the SHA-256 of a data file.
    """
    code = code_of_file(path, hash_of)
    only = code.texts.get(path.name) if len(code.texts) == 1 else None
    return only or code.sha256


@cache
def _code_here(start: str) -> Code:
    """Return the code of a module of `scripts`, and of all that every verdict passes through."""
    texts, others = dict[str, str](), set[str]()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        tree = parsed((_scripts() / name).read_bytes())
        for module in _imported(tree):
            inside = f"{module.removeprefix('scripts.').replace('.', '/')}.py"
            if not module.startswith("scripts"):
                others.add(module.partition(".")[0])
            elif inside.partition("/")[0] in JUDGING_ROOMS and (_scripts() / inside).is_file():
                waiting.append(inside)
        texts[name] = _hash_of_code(tree)
    for name in OF_ALL:
        texts[name] = _hash_of_code(parsed((_scripts() / name).read_bytes()))
    return Code(texts, tuple(sorted(others)))


def _scripts() -> Path:
    return installation() / "scripts"


def _hash_of_code(tree: ast.Module) -> str:
    """Return a hash that comments, docstrings and line breaks do not change; the tree is spent."""
    drop_docstrings(tree)
    return sha256_text(ast.unparse(tree))


def _source_of(file: Path) -> bytes | None:
    """Return a file's bytes; None where there is no readable file, at which the import itself fails."""
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError:
        return None


def _parsed(source: bytes) -> ast.Module | None:
    try:
        return parsed(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _imported(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Yield the names of modules that a text imports, with the names in them, which may be modules too.

    `package` is the text's own, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, package)
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            given = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(given, str):
                yield given.lstrip(".")


def _base_of(node: ast.ImportFrom, package: str) -> str:
    """Return the module that ``from ... import`` names, a relative one by the package."""
    if not node.level:
        return node.module or ""
    above = package.split(".") if package else []
    above = above[: len(above) - (node.level - 1)]
    return ".".join([*above, *([node.module] if node.module else [])])


def _package_of(file: Path, roots: Iterable[Path]) -> str:
    """Return the package in which a file lies, as it is imported from one of the roots; nothing for a lone file."""
    for root in roots:
        if file.is_relative_to(root) and file.parent != root:
            return ".".join(file.parent.relative_to(root).parts)
    return ""


def _local_files(module: str, roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return the files that importing a module runs, packages above included; nothing for a module from elsewhere."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return []
    for root in roots:
        found = []
        for size in range(1, len(parts) + 1):
            name = "/".join(parts[:size])
            places = (f"{name}.py", f"{name}/__init__.py")
            found += [(place, root / place) for place in places if (root / place).is_file()]
        if found or (len(parts) > 1 and (root / parts[0]).is_dir()):
            return found
    return []


def _data_files(tree: ast.AST, roots: list[Path], hash_of: Callable[[Path], str]) -> dict[str, str]:
    """Return hashes of the files beside the text, or in the working directory, that a text names as a constant."""
    found = dict[str, str]()
    for node in ast.walk(tree):
        name = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if not isinstance(name, str) or "." not in name or len(name) > LONGEST_NAME or not name.isprintable():
            continue
        with suppress(OSError, UserError):  # not readable, or no name of a file at all
            path = next((root / name for root in roots if (root / name).is_file()), None)
            if path is not None:
                found[name] = hash_of(path)
    return found


def _local_roots() -> list[Path]:
    """Return the folders from which a program imports, but for those of installed packages."""
    schemes = sysconfig.get_paths()
    installed = [Path(schemes[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
    local = [root for root in roots if root.is_dir() and not _is_below(root.resolve(), installed)]
    return list(dict.fromkeys(local))


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders) or "site-packages" in path.parts


def files_hash(folder: Path, patterns: Iterable[str]) -> str:
    """Return one hash of the files below a folder whose names match, by relative path."""
    whole = sha256()
    for path in sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}):
        whole.update(f"{path.relative_to(folder)} {sha256_file(path)}\n".encode())
    return whole.hexdigest()
