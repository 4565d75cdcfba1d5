"""A page of a stage's curves beside its checkpoints, which shows by itself what is new while the stage trains.

It is one static file, ``run/live.html``: no server, no library. A thread writes it from the run directory's log, so
every backend has it and no step waits for it; what goes wrong here is said once and hurts no training.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from scripts.drawing.curves import figures_of
from scripts.files import write_text
from scripts.stage.progress import LIVE_PAGE, RECENT_STEPS, read_log, step_seconds

PERIOD_SECONDS = 10.0
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
    seen, has_failed = None, False
    while True:
        is_over = over.wait(period)
        try:
            changed = _changed_at(run / "metrics.jsonl")
            if changed is not None and (is_over or changed != seen):
                write_page(stage, run, planned, period, is_training=not is_over)
                seen = changed
        except Exception as error:
            if not has_failed:
                print(f"{stage}: {run / LIVE_PAGE} is not written ({error}); training goes on", flush=True)
            has_failed = True
        if is_over:
            return


def _changed_at(log: Path) -> int | None:
    return log.stat().st_mtime_ns if log.exists() else None


def write_page(stage: str, run: Path, planned: int, period: float, is_training: bool) -> None:
    """Write the page from what the run directory has logged; it refreshes itself only while the stage trains."""
    entries = read_log(run / "metrics.jsonl")
    state = "training" if is_training else "ended" if entries and entries[-1]["step"] == planned else "stopped"
    names = {name for entry in entries for name in entry}
    figures = figures_of({"": {name: [entry.get(name) for entry in entries] for name in names}})
    text = TEMPLATE.format(
        stage=escape(stage),
        state=state,
        refresh=f'<meta http-equiv="refresh" content="{max(1, round(period))}">' if is_training else "",
        progress=escape(_progress(entries, planned)),
        charts="\n".join(f"<figure><h2>{figure.title}</h2>{figure.svg}</figure>" for figure in figures),
    )
    write_text(run / LIVE_PAGE, text)


def _progress(entries: Sequence[dict[str, Any]], planned: int) -> str:
    if not entries:
        return f"No step of {planned} is done yet."
    last, now = entries[-1], time.strftime("%Y-%m-%d %H:%M:%S")
    parts = [f"step {last['step']} of {planned}"]
    seconds = step_seconds(entries[-RECENT_STEPS:])
    if seconds is not None and last["step"] < planned:
        parts.append(f"about {(planned - last['step']) * seconds / 60:.0f} min left at {seconds:.3g} s a step")
    named = (("reward", "reward_mean"), ("loss", "loss"), ("length", "response_length_mean"), ("KL", "kl"))
    parts += [f"{name} {last[key]:.4g}" for name, key in named if last.get(key) is not None]
    return f"{', '.join(parts)}. Written {now}."
