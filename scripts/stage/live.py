"""A page of a stage's curves beside its checkpoints, which shows by itself what is new while the stage trains.

It is one static file, ``run/live.html``: no server, no library. A thread writes it from the run directory's log, so
every backend has it and no step waits for it; what goes wrong here is told once and hurts no training.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from scripts.chart import Line, line_chart
from scripts.files import write_text
from scripts.stage.metrics import read_log
from scripts.stage.progress import LIVE_PAGE, RECENT_STEPS, step_seconds

PERIOD_SECONDS = 10.0
CHARTS = (
    ("Reward", "reward", "reward_mean", "reward_std"),
    ("Loss", "loss", "loss", None),
    ("Response length", "tokens", "response_length_mean", None),
    ("Truncated responses", "share", "truncation_rate", None),
    ("KL to the parent", "nats a token", "kl", None),
    ("Entropy", "nats a token", "entropy", None),
    ("Groups without spread", "share", "zero_variance_share", None),
    ("KL of trainer to sampler", "nats a token", "gen_kl_error", None),
    ("Sampler beside trainer", "ratio", "token_mult_prob_error", None),
    ("Samples masked out", "share", "masked_share", None),
    ("Gradient norm", "norm", "grad_norm", None),
    ("Time of a step", "seconds", "seconds", None),
)
TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}
<title>{stage}: {state}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1em; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 1em; }}
figure {{ margin: 0; }}
svg {{ width: 100%; height: auto; }}
h2 {{ font-size: 1em; margin: 0; }}
</style>
</head>
<body>
<h1>{stage}: {state}</h1>
<p>{progress}</p>
<div class="charts">
{charts}
</div>
</body>
</html>
"""


@contextmanager
def live_page(stage: str, run: Path, planned: int, period: float = PERIOD_SECONDS) -> Iterator[None]:
    """Keep a run directory's live page up to date while the block runs; written at most once in `period` seconds."""
    over = threading.Event()
    writer = threading.Thread(target=_keep_writing, args=(stage, run, planned, period, over), daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join(timeout=period)


def _keep_writing(stage: str, run: Path, planned: int, period: float, over: threading.Event) -> None:
    seen, told = None, False
    while True:
        is_over = over.wait(period)
        try:
            changed = _changed_at(run / "metrics.jsonl")
            if changed is not None and (is_over or changed != seen):
                write_page(stage, run, planned, period, is_training=not is_over)
                seen = changed
        except Exception as error:
            if not told:
                print(f"{stage}: {run / LIVE_PAGE} is not written ({error}); training goes on", flush=True)
            told = True
        if is_over:
            return


def _changed_at(log: Path) -> int | None:
    return log.stat().st_mtime_ns if log.exists() else None


def write_page(stage: str, run: Path, planned: int, period: float, is_training: bool) -> None:
    """Write the page from what the run directory has logged; it refreshes itself only while the stage trains."""
    entries = read_log(run / "metrics.jsonl")
    state = "training" if is_training else "ended" if entries and entries[-1]["step"] == planned else "stopped"
    text = TEMPLATE.format(
        stage=escape(stage),
        state=state,
        refresh=f'<meta http-equiv="refresh" content="{max(1, round(period))}">' if is_training else "",
        progress=escape(_progress(entries, planned)),
        charts="\n".join(_charts(entries)),
    )
    write_text(run / LIVE_PAGE, text)


def _progress(entries: Sequence[dict[str, Any]], planned: int) -> str:
    if not entries:
        return f"No step of {planned} is done yet."
    last, now = entries[-1], time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"step {last['step']} of {planned}"]
    seconds = step_seconds(list(entries[-RECENT_STEPS:]))
    if seconds is not None and last["step"] < planned:
        parts.append(f"about {(planned - last['step']) * seconds / 60:.0f} min left at {seconds:.3g} s a step")
    named = (("reward", "reward_mean"), ("loss", "loss"), ("length", "response_length_mean"), ("KL", "kl"))
    parts += [f"{name} {last[key]:.4g}" for name, key in named if last.get(key) is not None]
    return f"{', '.join(parts)}. Written {now}."


def _charts(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    steps = [entry["step"] for entry in entries]
    for title, unit, column, spread in CHARTS:
        values = [entry.get(column) for entry in entries]
        low, high = (_edge(entries, column, spread, sign) for sign in (-1, 1))
        label = "mean, with ± std within a group" if low else ""
        if chart := line_chart(title, unit, [Line(label, steps, values, low, high)]):
            yield f"<figure><h2>{title}</h2>{chart}</figure>"


def _edge(entries: Sequence[dict[str, Any]], column: str, spread: str | None, sign: int) -> list[float | None] | None:
    """An edge of the band around a column; None where its spread is not measured."""
    if spread is None or all(entry.get(spread) is None for entry in entries):
        return None
    known = [(entry.get(column), entry.get(spread)) for entry in entries]
    return [None if value is None or std is None else value + sign * std for value, std in known]
