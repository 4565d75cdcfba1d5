"""Whether a file of JSON lines already holds rows of a blend, so that the file is linked and no row composed.

A row is read alike in both cases: what composing would change in a row is a reason to compose the file.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from scripts.data.check import Rules
from scripts.data.json_texts import EMPTY, messages_in
from scripts.data.misfit import Misfit
from scripts.data.shapes import Mapper
from scripts.recipe.blend import PublishedBlend
from scripts.recipe.source import Rows
from scripts.rows.jsonl import Block, RowError, blocks_of, key_of, row_or_error
from scripts.rows.keys import Unread, unread_keys
from scripts.rows.kinds import KINDS
from scripts.rows.parallel import in_order

TEXTS = ("messages", "prompt", "chosen", "rejected", "completion", "context", "completions")


@dataclass
class Look:
    """What some lines hold: whether a row is to be composed, and keys that nothing reads."""

    composes: bool = False
    unread: Unread = field(default_factory=Unread)


def unread_if_ready(path: Path, blend: PublishedBlend, workers: int) -> Unread | None:
    """Return the keys that nothing reads in a file of ready rows; None for a file to compose.

    Lines that are no rows, and rows that no composing mends, are left to the fill and the check.
    """
    rules = Rules(KINDS[blend.kind], frozenset(map(str, blend.environments)))
    look = partial(look_at, rules=rules, allow=frozenset(blend.allow))
    with path.open("rb") as file:
        is_list = file.read(100).lstrip().startswith(b"[")
    if is_list:
        return None
    found = Unread()
    for seen in in_order(look, blocks_of(path), workers):
        if seen.composes:
            return None
        found.add(seen.unread)
    return found


def look_at(block: Block, rules: Rules, allow: frozenset[str]) -> Look:
    """Look at the lines of a block, up to the first row that is to be composed."""
    look, mappers = Look(), dict[tuple[str, ...], Mapper]()
    for line in block.read().split(b"\n"):
        row = row_or_error(line.rstrip(b"\r"))
        if isinstance(row, RowError) or (allow and key_of(line) in allow):
            continue
        if composes(row, rules, mappers):
            return Look(composes=True)
        if "_hf_placeholder" not in row:
            look.unread.add(unread_keys(row, rules.kind.name))
    return look


def composes(row: dict[str, Any], rules: Rules, mappers: dict[tuple[str, ...], Mapper]) -> bool:
    """Whether composing makes another row of a row, or makes a bad row a good one."""
    kind = rules.kind
    if not row.keys() & kind.fields:
        return True
    if not kind.is_composed_by_columns:
        return False
    # Forms that only composing reads, whatever else the row holds.
    is_pair_of_messages = isinstance(row.get("chosen"), list)
    has_json = any(messages_in(row.get(name)) for name in TEXTS)
    if is_pair_of_messages or has_json:
        return True
    names = tuple(row)
    try:
        if names not in mappers:
            mappers[names] = Mapper(Rows(), kind.name, names, is_table=False)
        mapper = mappers[names]
    except Misfit:
        return True
    # Columns that composing adds to the conversation.
    pictured = [mapper.pictured] if mapper.pictured else []
    added = [*mapper.systems, *mapper.offers, *pictured, *kind.added_columns]
    if any(row.get(name) not in EMPTY for name in added if name != "tools"):
        return True
    # A row that is bad as it is, and good when composed.
    return rules.problem_of(row) is not None and _is_mended(row, rules, mapper)


def _is_mended(row: dict[str, Any], rules: Rules, mapper: Mapper) -> bool:
    try:
        return rules.problem_of(mapper.make(row)) is None
    except Misfit:
        return False
