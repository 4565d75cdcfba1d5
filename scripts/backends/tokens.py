"""Show rows of a stage as tokens, the learnt tokens marked."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from itertools import cycle, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from scripts.errors import printable
from scripts.processes import end_with, process_start
from scripts.recipe.model import RandomModel
from scripts.records import ShownRow, ShownTokens

Told = TypeVar("Told")
FIRST, LAST = 80, 40
BETWEEN = "¦"
PLAIN, LEARNT = ("\x1b[48;5;254;30m", "\x1b[48;5;252;30m"), ("\x1b[48;5;120;30m", "\x1b[48;5;114;30m")
"""Backgrounds of neighbouring tokens, so that none needs a mark between them."""
RESET = "\x1b[0m"


def without_torch(tell: Callable[..., Told], *arguments: Any) -> Told:
    """Call a function in a forked process without torch, where tokenizers load in half a second; return the result.

    transformers imports torch, needlessly for tokenizers. Where either is loaded already, call the function here.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return tell(*arguments)
    me = (os.getpid(), process_start(os.getpid()))
    with ProcessPoolExecutor(1, get_context("fork"), initializer=_begin, initargs=me) as pool:
        return pool.submit(tell, *arguments).result()


def _begin(parent: int, start: int | None) -> None:
    """End with the parent; hide torch."""
    end_with(parent, start)
    sys.modules["torch"] = None
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def load_here(model: Path | RandomModel, chat_template: str | None) -> Any:
    """Return a model's tokenizer or processor with a chat template (None: the model's), or the reason for none."""
    if isinstance(model, Path) and not model.exists():
        return f"{model} is not there yet"
    if find_spec("transformers") is None:
        return "transformers is not installed here (envs/trl.txt)"
    from scripts.model import processor  # noqa: PLC0415 - the controller lacks what it needs

    load = processor.load_processor if isinstance(model, Path) else processor.make_processor
    try:
        return processor.use_template(load(model), chat_template)
    except (OSError, ValueError, ImportError) as error:
        return f"the tokenizer of {model} cannot be loaded here ({error})"


def shown_row(line: int, parts: Iterable[tuple[str, bool, list[int]]], tokenizer: Any) -> ShownRow:
    """Return a row made of parts: name, whether learnt, token ids."""
    tokens: list[ShownTokens] = [
        {"name": name, "is_learnt": is_learnt, "ids": ids, "texts": _texts(ids, tokenizer)}
        for name, is_learnt, ids in parts
        if ids
    ]
    learnt = sum(len(part["ids"]) for part in tokens if part["is_learnt"])
    return {"line": line, "tokens": sum(len(part["ids"]) for part in tokens), "learnt": learnt, "parts": tokens}


def runs(ids: list[int], labels: list[int], ignored: int) -> Iterator[tuple[str, bool, list[int]]]:
    """Split a row into parts by labels."""
    for is_learnt, pairs in groupby(zip(ids, labels, strict=True), lambda pair: pair[1] != ignored):
        yield "", is_learnt, [token for token, _ in pairs]


def _texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the tokens' texts; for a piece of a character the name in the vocabulary."""
    names = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
    return [
        name.replace("▁", " ") if "▁" in name or "\ufffd" in text else text
        for name, text in zip(names, texts, strict=True)
    ]


def shortened_row(row: ShownRow) -> ShownRow:
    """Return a row for a record: without token ids, long parts cut in the middle."""
    return row | {"parts": [_shortened(part) for part in row["parts"]]}


def _shortened(part: ShownTokens) -> ShownTokens:
    texts = part["texts"]
    if len(texts) > FIRST + LAST + 1:  # so that a shortened part stays as it is
        texts = [*texts[:FIRST], f" … {len(texts) - FIRST - LAST:,} more … ", *texts[-LAST:]]
    return {"name": part["name"], "is_learnt": part["is_learnt"], "texts": texts}


def remarks_on(rows: Iterable[ShownRow]) -> list[str]:
    """Return what a backend remarks on the shown rows of a stage."""
    return [row["remark"] for row in rows if "remark" in row]


def text_of_rows(rows: Iterable[ShownRow], split: str, coloured: bool) -> str:
    """Return rows as text: learnt tokens on green, without colours between double brackets."""
    lines = []
    for row in rows:
        learnt = f"{row['learnt']} learnt" if row["learnt"] else "the response to them is learnt"
        lines.append(f"{split}:{row['line']}: {row['tokens']} tokens, {learnt}")
        lines += [f"  {_part(part, coloured)}" for part in map(_shortened, row["parts"])]
    return "\n".join(lines)


def _part(part: ShownTokens, coloured: bool) -> str:
    name = f"{part['name']}: " if part["name"] else ""
    texts = [_visible(text) for text in part["texts"]]
    if coloured:
        colours = cycle(LEARNT if part["is_learnt"] else PLAIN)
        return name + "".join(f"{colour}{text}{RESET}" for colour, text in zip(colours, texts, strict=False))
    joined = BETWEEN.join(texts)
    return name + (f"[[{joined}]]" if part["is_learnt"] else joined)


def _visible(text: str) -> str:
    """Return a token's text on a single line, without control characters."""
    on_one_line = text.replace("\n", "⏎").replace("\t", "\\t")
    return printable(on_one_line)
