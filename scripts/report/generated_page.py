"""The page of a generated blend: pass rates, lengths, rows to read, and what was left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from scripts.model.generation_settings import words_of
from scripts.program import run_command_line
from scripts.recipe.sampling import words_of_decoding
from scripts.records import Manifest, SelectionShown, read_record
from scripts.report.chart import Line, line_chart
from scripts.report.page import short_name, write_page

BINS = 20


def main(
    manifest: Annotated[Path, "the blend's manifest.json"],
    selection: Annotated[Path, "what scripts.sampling.select found"],
    output: Annotated[Path, "HTML"],
) -> None:
    """Write the page of a generated blend."""
    known, found = read_record(manifest, Manifest), read_record(selection, SelectionShown)
    write_page(
        output,
        "generated.html",
        blend=manifest.parent.name,
        source=known["generated"],
        splits={name: known[name]["rows"] for name in ("train", "validation")},
        found=found,
        sampling=list(_sampling(found.get("sampling", {}))),
        figures=list(_figures(found)),
    )


def _sampling(known: dict[str, Any]) -> Iterator[str]:
    """Yield how the responses were sampled, and what of each model's folder did not count."""
    if "decoding" in known:
        yield words_of_decoding(known["decoding"])
    for name, unused in known.get("not_used", {}).items():
        yield f"{name}: {words_of(unused, 'source.*')}"


def _figures(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield title, chart and caption of each figure."""
    rates = [
        Line(short_name(name), [100 * place / (len(counts) - 1) for place in range(len(counts))], counts)
        for name, counts in found["pass_rates"].items()
    ]
    if chart := line_chart("Prompts by pass rate", "prompts", rates, "pass rate, %"):
        yield "Prompts by pass rate", chart, "Prompts that are never (0) or always (100) solved teach GRPO nothing."
    if found["lengths"]:
        pairs = np.array(found["lengths"])
        width = max(1, -(-pairs.max() // BINS))
        lines = [
            Line(label, range(0, width * (BINS + 1), width), np.bincount(tokens // width, minlength=BINS + 1).tolist())
            for label, tokens in zip(("chosen", "rejected"), pairs.T, strict=True)
        ]
        longer = f"{found['longer_chosen']:.0%}"
        says = f"The longer response is chosen in {longer} of the pairs: what length alone predicts."
        yield "Responses by length", line_chart("Responses by length", "responses", lines, "tokens"), says


if __name__ == "__main__":
    run_command_line(main)
