"""The prompts to which models respond for a generated blend: training rows, none of them held out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.files import canonical_json, sha256_text
from scripts.recipe.generated import GeneratedSource
from scripts.rewards.registry import environment_factory
from scripts.rows.jsonl import environment_named, read_rows
from scripts.rows.kinds import KINDS, Row


@dataclass(frozen=True)
class Prompt:
    """A training row's line in its split, its prompt's hash, and the row as an environment reads it."""

    line: int
    sha256: str
    row: Row


def prompts_in(split: Path, kind: str) -> Iterator[Prompt]:
    """Yield the prompts of a split whose rows are of a kind; rows of other kinds keep prompt and tools alone."""
    for line, _, row in read_rows(split):
        example = KINDS[kind].example(row)
        sha256 = sha256_text(canonical_json([example.prompt, example.tools]))
        if kind != "prompts":
            asked = {"input": example.prompt, **({"tools": example.tools} if example.tools else {})}
            row = {"responses_create_params": asked, **{key: row[key] for key in ("agent_ref",) if key in row}}  # noqa: PLW2901
        yield Prompt(line, sha256, row)


def prompts_of(
    source: GeneratedSource, split: Path, kind: str, held_out: dict[Path, str]
) -> tuple[list[Prompt], Counter[str]]:
    """Return the prompts of a source's part, and the number of left-out ones by reason.

    `held_out` are the kinds of the splits no prompt of which may come in. Rows of environments with tools are left out,
    since a response of several turns is no single message.
    """
    kept_out = {prompt.sha256 for path, its_kind in held_out.items() for prompt in prompts_in(path, its_kind)}
    (number, parts), kept, left_out = source.share, list[Prompt](), Counter[str]()
    for prompt in prompts_in(split, kind):
        if int(prompt.sha256[:15], 16) % parts != number:
            continue
        if prompt.sha256 in kept_out:
            left_out["prompts that are held out"] += 1
        elif environment_factory(environment_named(prompt.row) or ""):
            left_out["prompts of environments with tools"] += 1
        else:
            kept.append(prompt)
    return kept, left_out
