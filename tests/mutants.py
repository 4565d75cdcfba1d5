"""Mutants of shipped recipes, sites and configs, from a seed: each is fine, or one short message with file and line.

`python -m tests.mutants 10000` tries so many.
"""

import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.errors import UserError
from scripts.recipe.load import load_config, load_recipe, load_site
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.yaml_file import installation

LONGEST = 1200
SHIPPED = {
    kind: sorted((installation() / "config").glob(pattern))
    for kind, pattern in {"recipe": "recipes/*.yaml", "site": "sites/*.yaml", "config": "config.yaml"}.items()
}
LONG = "x" * 300_000
VALUES = [
    *(
        "",
        "~",
        "{}",
        "[]",
        "text",
        "''",
        '""',
        "yes",
        "0",
        "-1",
        "0.7",
        "1e308",
        "1e400",
        ".nan",
        "-.inf",
        "012",
        "1_0",
    ),
    *("2026-01-01", "2026-13-45", "2026-02-30", "2026-01-01 25:61:61", "2026-01-01T00:00:00+99:99", "190:20:30"),
    *(
        "!!int abc",
        "!!float x",
        "!!bool x",
        "!!null x",
        "!!timestamp x",
        "!!int ''",
        "!!int {}",
        "!!str [a]",
        "!!map x",
    ),
    *("!!binary aGVsbG8=", "!!binary '%%%'", "!!binary ä", "!!binary gICAgA==", "!!set {a, b}", "!!set [a]"),
    *("!!omap [a: 1]", "!!omap x", "!!pairs [a: 1]", "!!pairs [a]", "!!python/object:os.system x", "!own x", "=", "<<"),
    *(
        r'"\UFFFFFFFF"',
        r'"\uD800"',
        r'"\U0001F600"',
        r'"\0"',
        r'"\x07"',
        r'"a\nb"',
        r'"\q"',
        "'\ufffe'",
        "\x00",
        "'\u2028'",
    ),
    *("*none", "&a [*a]", "&a {a: *a}", "@x", "%x", "`x", "- x", "a: b: c", "{", "[", '"', "]", "{a", "| x", "!", "&"),
    *("{1: 2}", "{0.7: x}", "{~: 1}", "{true: 1}", "{2026-01-01: 1}", "{[1, 2]: 3}", "{{a: 1}: b}", "{a: 1, a: 2}"),
    *(
        "{!!binary aGk=: 1}",
        "{<<: 1}",
        "{<<: [1]}",
        "{<<: {a: 1}}",
        "{'': 1}",
        "{a.b: {c: 1}}",
        "{x: ~}",
        "[~]",
        "[[]]",
    ),
    *("[{}, [], ~]", "[0.7]", "[true]", "[2026-01-01]", "[!!binary aGk=]", "[{a: [1]}]", "[1, 1]", "[-1]", "[a, a]"),
    *("9" * 30, "9" * 5000, "-" + "9" * 30, "0x" + "f" * 5000, "1e999999999", "0b2", "0o9", "1:60:99", "9" * 30 + ":1"),
    *(
        LONG,
        f"'{LONG}'",
        f"{{{LONG[:1000]}: 1}}",
        f"[{'x, ' * 50_000}x]",
        f"[{'1, ' * 50_000}1]",
        "[" * 500 + "]" * 500,
    ),
    *(
        "[" * 20_000,
        "{a: " * 500 + "1" + "}" * 500,
        "../../..",
        "/",
        "/dev/null",
        "'{prompt}'",
        "'*'",
        "'[a-'",
        "'(a+)+$'",
    ),
    *("{kind: hub}", "{kind: folder, path: 1}", "{kind: ~}", "{kind: [hub]}", "{stage: sft}", "{stage: ~, each: 1}"),
    *(
        "{sweep: {1: [2]}}",
        "{seed: []}",
        "{seed: [1, 1]}",
        "{1: [2]}",
        "[{1: 2}]",
        "[{a: 1}]",
        "{a.b: [1]}",
        "{'..': [1]}",
    ),
    *(
        "{name: 0.7}",
        "{name: x}",
        "{name: ~}",
        "{min: 1}",
        "!!int 1",
        "!!str 1",
        "? a",
        "{? [a] : b}",
        "'\t'",
        "\t",
        "#",
    ),
]
"""Texts of YAML to stand for a value, some of them broken."""
BOMB = "\n".join(
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
        "",
    ]
)


class Found(NamedTuple):
    """A mutant's outcome: fine, refused or failed, and the message or the traceback."""

    outcome: str
    says: str


def mutant(text: str, dice: random.Random) -> str:
    """Return the text of a YAML file with one or a few mistakes."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        text = dice.choice((_value, _value, _value, _value, _value, _key, _key, _line, _bytes, _swap, _bomb))(
            text, dice
        )
    return text


def _spans(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return where keys and values stand in a text; none in a broken text."""
    keys, values, seen = [], [], set()

    def walk(node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        values.append((node.start_mark.index, node.end_mark.index))
        for inner in node.value if isinstance(node.value, list) else ():
            key, value = inner if isinstance(inner, tuple) else (None, inner)
            if key is not None:
                keys.append((key.start_mark.index, key.end_mark.index))
            walk(value)

    try:
        if (node := yaml.compose(text, yaml.CSafeLoader)) is not None:
            walk(node)
    except (yaml.YAMLError, RecursionError, ValueError):
        pass
    return keys, values


def _replaced(text: str, span: tuple[int, int], by: str) -> str:
    start, end = span
    return text[:start] + by + ("\n" if text[start:end].endswith("\n") else "") + text[end:]


def _value(text: str, dice: random.Random) -> str:
    values = _spans(text)[1]
    return _replaced(text, dice.choice(values), dice.choice(VALUES)) if values else text


def _key(text: str, dice: random.Random) -> str:
    keys = _spans(text)[0]
    if not keys:
        return text
    start, end = dice.choice(keys)
    key = text[start:end]
    other = text[slice(*dice.choice(keys))]
    return _replaced(text, (start, end), dice.choice((dice.choice(VALUES), f"{key}x", key[1:], key.upper(), other)))


def _line(text: str, dice: random.Random) -> str:
    lines = text.split("\n")
    place = dice.randrange(len(lines))
    line = lines[place]
    lines[place : place + 1] = dice.choice(([], [line, line], [f" {line}"], [line[1:]], [f"\t{line}"], [f"- {line}"]))
    return "\n".join(lines)


def _bytes(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text) + 1)
    return dice.choice(
        (
            text[:place],
            text[:place] + chr(dice.choice((0, 7, 34, 39, 58, 91, 123, 133, 0x2028, 0x1F600))) + text[place:],
        )
    )


def _swap(text: str, dice: random.Random) -> str:
    values = _spans(text)[1]
    return _replaced(text, dice.choice(values), text[slice(*dice.choice(values))]) if values else text


def _bomb(text: str, dice: random.Random) -> str:
    values = _spans(text)[1]
    return BOMB + _replaced(text, dice.choice(values), f"*a{dice.choice((1, 3, 11))}") if values else text


def read(kind: str, path: Path) -> None:
    """Read a recipe with its stages' configs, a site or a config."""
    if kind == "recipe":
        recipe = load_recipe(path)
        for name in recipe.stages:
            resolve_stage(recipe, name)
    elif kind == "site":
        load_site(path, RECIPE)
    else:
        load_config(path, {})


RECIPE = load_recipe(installation() / "config/recipes/tiny.yaml")


def tried(action: Callable[[], object], *named: str) -> Found:
    """Return the outcome of reading a file; a message that is long or does not name the file has failed."""
    try:
        action()
    except UserError as error:
        says = str(error)
        if len(says) > LONGEST:
            return Found("failed", f"{len(says)} characters: {says[:200]}")
        return Found("refused" if any(name in says for name in named) else "failed", says)
    except BaseException:
        return Found("failed", traceback.format_exc())
    return Found("fine", "")


def mutants(count: int, seed: int, folder: Path) -> Iterator[tuple[str, str, Found]]:
    """Yield kind, text and outcome of so many mutants."""
    dice = random.Random(seed)
    texts = [
        (kind, path.read_text())
        for kind, paths in SHIPPED.items()
        for path in paths
        for _ in range(1 + 5 * (kind == "config"))
    ]
    texts += [("recipe", text) for kind, text in texts if kind == "recipe" and "sweep:" in text for _ in range(2)]
    path = folder / "mutant.yaml"
    for _ in range(count):
        kind, text = dice.choice(texts)
        changed = mutant(text, dice)
        path.write_text(changed, encoding="utf-8", errors="surrogatepass")
        yield kind, changed, tried(lambda kind=kind: read(kind, path), str(path))


def main(count: int, seed: int = 1) -> None:
    """Print the failures of so many mutants by their last lines, and counts."""
    counts, failures, slowest, longest = Counter(), {}, (0.0, ""), 0
    with tempfile.TemporaryDirectory() as folder:
        before = time.perf_counter()
        for kind, text, found in mutants(count, seed, Path(folder)):
            now = time.perf_counter()
            if now - before > 3:
                print(f"{now - before:.0f} s", kind, found.outcome, found.says[-200:])
            slowest = max(slowest, (now - before, found.says[:300]))
            before = now
            counts[found.outcome] += 1
            length = (
                int(re.match(r"\d*", found.says).group() or 0)
                if " characters: " in found.says[:30]
                else len(found.says)
            )
            longest = max(longest, length if "Traceback" not in found.says else 0)
            if found.outcome == "failed":
                lines = found.says.strip().split("\n")
                where = [line for line in lines if "scripts/" in line][-1:]
                sign = (where, lines[-1][:60]) if "Traceback" in found.says else (["message"], lines[-1][-60:])
                failures.setdefault(str(sign), []).append((kind, found.says[-1500:], text))
    for sign, those in sorted(failures.items(), key=lambda item: -len(item[1])):
        print(f"{len(those):5} {sign}")
    print(
        dict(counts),
        "longest",
        longest,
        "slowest",
        slowest,
        "peak MB",
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
