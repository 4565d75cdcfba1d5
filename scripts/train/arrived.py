"""Refuse a stage that would lose texts of its rows on the way to the model, with the templates that print them."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from scripts.backends.by_name import backend_of
from scripts.backends.tokens import without_torch
from scripts.errors import UserError
from scripts.files import read_json
from scripts.finding import Finding
from scripts.model import scratch
from scripts.model.lengths import BYTES, tokenizer_at_hand
from scripts.recipe.lost_texts import TextKind
from scripts.recipe.model import RandomModel
from scripts.rows.arrival import Arrival, ArrivalOf, Reading, RowCheck, Tally
from scripts.rows.chat_format import SHIPPED, ChatFormat, chat_template_of
from scripts.rows.jsonl import read_rows
from scripts.rows.measures import measured
from scripts.rows.messages import common_length
from scripts.rows.parallel import default_workers
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage

SHOWN_TEMPLATES = 6
TOKEN = re.compile(r"<\|?[a-z_]+\|?>", re.IGNORECASE)
"""What templates print as special tokens: <|im_start|>, <start_of_turn>."""


def template_beside(stage: Stage, chat_format: ChatFormat | None) -> tuple[str, Path] | None:
    """Return a stage's chat template and the folder of its tokenizer; None where neither is here."""
    if chat_format is not None:
        return (chat_format.chat_template, chat_format.folder) if chat_format.chat_template else None
    tokenizer = tokenizer_at_hand(stage.recipe.model)
    if tokenizer is None:
        return None
    own, folder = chat_template_of(Path(tokenizer).parent), Path(tokenizer).parent
    if tokenizer == BYTES:
        has_tools = isinstance(stage.recipe.model, RandomModel) and stage.recipe.model.tools
        own = scratch.TOOLS_TEMPLATE if has_tools else scratch.CHAT_TEMPLATE
    template = stage.config.chat_template or own
    return (template, folder) if template else None


def reading_of(stage: Stage, chat_format: ChatFormat | None) -> Reading | None:
    """Return how a stage's training rows are given to its chat template; None where that is not known."""
    found = template_beside(stage, chat_format)
    if found is None:
        return None
    reading = without_torch(backend_of(stage.settings.made_by).reading, stage, *found)
    if reading is None or reading.rows is None or stage.rows is None:
        return reading
    # stages that read all rows share what is measured of them, however long they train
    return replace(reading, rows=None) if reading.rows >= stage.rows else reading


def check_arrival(candidate: Candidate, reading: Reading) -> Iterator[Finding]:
    """Find texts of a stage's training rows that do not arrive in a reading, and rows that its template refuses.

    Note the shares (scripts.records.ArrivalRecord); a chat template that takes too long is a finding.
    """
    stage = candidate.stage
    try:
        arrival = measured(stage.train_split, ArrivalOf(reading), default_workers())
    except UserError as error:
        yield candidate.stops(str(error))
        return
    candidate.noted["arrival"] = arrival.describe()
    # a row that the template refuses ends TRL's training; NeMo-RL's own check names such a row
    key = f"stages.{stage.name}.policy.tokenizer.chat_template"
    line, says = arrival.refusals[0] if arrival.refusals else (0, "")
    is_named = any(finding.message.startswith(f"{stage.train_split}:") for finding in candidate.found if finding.stops)
    if line and stage.settings.backend == "trl" and not is_named:
        yield candidate.stops(
            f"{stage.train_split}:{line}: the chat template refuses {round(arrival.refused)} of {arrival.rows} rows, "
            f"the first with: {says}; name another template as {key}, or leave such rows out of the blend"
        )
    if lost := arrival.lost(stage.settings.max_lost_share):
        yield candidate.stops(words_of_loss(stage, arrival, reading, lost))


def words_of_loss(stage: Stage, arrival: Arrival, reading: Reading, lost: dict[TextKind, Tally]) -> str:
    """Say which texts are lost, of which rows, and what prints them."""
    says = [f"{stage.train_split}: texts of the rows do not reach the model (docs/templates.md):"]
    for kind, tally in lost.items():
        lines = ", ".join(str(line) for line, _, _ in tally.first)
        more = ", ..." if round(tally.rows) > len(tally.first) else ""
        unlearnt = "" if tally.rendered < tally.texts else " are printed, but not learnt"
        line, place, text = tally.first[0]
        says.append(
            f"    {kind}: {round(tally.lost)} of {round(tally.texts)}{unlearnt}, in {round(tally.rows)} of "
            f"{arrival.rows} rows (line {lines}{more}); the first is {text!r}, line {line}: {place}"
        )
    accepted = stage.settings.max_lost_share
    named = templates_that_print(stage.train_split, reading, lost, accepted)
    key = f"stages.{stage.name}.policy.tokenizer.chat_template"
    if not reading.passes_tools and all(kind.startswith("tool ") for kind in lost):
        remedy = (
            f"backend {stage.settings.backend} gives the template no tools of such rows; leave tools out of the rows"
        )
    elif named:
        by = "" if stage.settings.backend == "trl" else "a file with "
        remedy = f"of the templates that TRL ships, these print them: {', '.join(named)}; name {by}one as {key}"
        remedy += ", or as model.chat_template for the whole chain"
    else:
        remedy = f"none of the templates that TRL ships prints them all; name a file of another as {key}"
    shares = dict(accepted) | {kind: _rounded_up(tally.lost_share) for kind, tally in lost.items()}
    words = ", ".join(f"{kind}: {share:g}" for kind, share in shares.items())
    says.append(f"    {remedy}; or accept the loss by max_lost_share: {{{words}}} of stages.{stage.name}")
    return "\n".join(says)


def templates_that_print(
    split: Path, reading: Reading, lost: dict[TextKind, Tally], accepted: Collection[TextKind]
) -> list[str]:
    """Return the names of TRL's templates that print the lost texts of the first such rows, the fitting ones first.

    A template fits whose special tokens the tokenizer has. A named template may lose texts of the accepted kinds. The
    stage is refused, so its split is read for them.
    """
    wanted, last = {tally.first[0][0] for tally in lost.values()}, max(tally.first[0][0] for tally in lost.values())
    lines = [line for number, line, _ in islice(read_rows(split), last) if number in wanted]
    known, texts = special_tokens(reading.folder), {}
    for path in SHIPPED.glob("*.jinja"):
        texts[path.stem] = path.read_text(encoding="utf-8")
    own = next((name for name, text in texts.items() if text == reading.chat_template), "")
    found = []
    for name, text in texts.items():
        check = RowCheck(replace(reading, chat_template=text))
        if not all(check.prints_all(line, accepted) for line in lines):
            continue
        fits = {*TOKEN.findall(check.rendering_of(lines[0]))} <= known
        found.append((not fits, name.endswith("_training"), -common_length(name, own), name))
    # those that fit the tokenizer first, then relatives of the stage's template
    names = [name if is_foreign else f"{name} (this tokenizer's)" for is_foreign, _, _, name in sorted(found)]
    more = len(names) - SHOWN_TEMPLATES
    return [*names[:SHOWN_TEMPLATES], f"and {more} more"] if more > 0 else names


def special_tokens(folder: Path) -> set[str]:
    """Return the texts of a tokenizer's added tokens; empty without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return set()
    return {token["content"] for token in read_json(path).get("added_tokens") or []}


def _rounded_up(share: float) -> float:
    """Return a share to two digits that is no smaller."""
    return min(1.0, round(share + 0.005, 2)) if share < 1 else 1.0
