"""What modules of `scripts` make once and keep: found in their sources, and forgotten between tests.

`pytest --forget` forgets all of it before each test, so that a test which passed only since an earlier one had made a
global fails.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT

CACHES = {"cache", "lru_cache", "OnceAProcess"}
CONTAINERS = {
    *("dict", "list", "set", "defaultdict", "Counter", "deque", "OrderedDict", "WeakSet", "WeakKeyDictionary"),
    "WeakValueDictionary",
}
SHARED = {
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "local", "ContextVar"),
    *("Queue", "LifoQueue", "ThreadPoolExecutor", "ProcessPoolExecutor", "Client", "AsyncClient", "Session"),
}
CHANGES = {
    *("append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard"),
    *("appendleft", "popleft", "__setitem__"),
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
THREADS = {"threading", "concurrent.futures", "asyncio", "multiprocessing.pool"}


def called_name(node: ast.expr) -> str:
    """The last name of what is called, through calls of calls: `lru_cache` of `functools.lru_cache(1)(load)`."""
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def module_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a source."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The names that a module assigns, with their values."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                yield target.id, value


def imported(tree: ast.Module) -> dict[str, str]:
    """Where the names come from that a module imports from `scripts`: `SPECS` from `scripts.rewards.registry.SPECS`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scripts"):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def changed(tree: ast.Module) -> set[str]:
    """The names whose containers a module's functions change."""
    names = set()
    for node in in_functions(tree):
        value = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            value = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            value = node.func.value
        if isinstance(value, ast.Name):
            names.add(value.id)
    return names


def in_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes within functions, each once."""
    for node in ast.iter_child_nodes(tree):
        yield from ast.walk(node) if isinstance(node, FUNCTIONS) else in_functions(node)


def found_in(sources: dict[str, str]) -> dict[str, str]:
    """The kinds of the globals in modules' sources, by dotted name.

    `cache`: a function that keeps results; `container`: one that functions fill; `shared`: a lock, pool or client;
    `global`: a name that functions bind; `properties`: a module of cached properties that starts threads.
    """
    trees = {module: ast.parse(source) for module, source in sources.items()}
    containers, kinds, filled = set(), {}, set()
    for module, tree in trees.items():
        for name, value in assigned(tree):
            called = called_name(value) if isinstance(value, ast.Call) else ""
            is_display = isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            if called in CACHES:
                kinds[f"{module}.{name}"] = "cache"
            elif called in SHARED:
                kinds[f"{module}.{name}"] = "shared"
            elif is_display or called in CONTAINERS:
                containers.add(f"{module}.{name}")
        for node in ast.walk(tree):
            if (
                isinstance(node, FUNCTIONS)
                and {called_name(each) for each in getattr(node, "decorator_list", ())} & CACHES
            ):
                kinds[f"{module}.{node.name}"] = "cache"
            if isinstance(node, ast.Global):
                kinds |= {f"{module}.{name}": "global" for name in node.names}
        origins = imported(tree)
        filled |= {origins.get(name, f"{module}.{name}") for name in changed(tree)}
        if "cached_property" in sources[module] and THREADS & set(imports(tree)):
            kinds[module] = "properties"
    return kinds | dict.fromkeys(sorted(containers & filled), "container")


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def in_scripts() -> dict[str, str]:
    """The globals of `scripts`, by dotted name, with their kinds."""
    return found_in({module_of(path): path.read_text() for path in sorted((ROOT / "scripts").rglob("*.py"))})


def loaded() -> list[ModuleType]:
    """The modules of `scripts` that this process has imported."""
    return [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "scripts" and module]


def forget() -> None:
    """Forget what the modules of `scripts` keep, and langdetect's profiles, as in a fresh process."""
    for module in loaded():
        for value in [*vars(module).values()]:
            if not isinstance(value, type) and callable(getattr(value, "cache_clear", None)):
                value.cache_clear()
    registry = sys.modules.get("scripts.rewards.registry")
    if registry is not None:
        registry._warned.clear()
    langdetect = sys.modules.get("langdetect.detector_factory")
    if langdetect is not None:
        langdetect._factory = None
