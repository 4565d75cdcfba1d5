"""A page of a stage's curves beside its checkpoints, which shows by itself what is new while the stage trains.

It is one static file, ``run/live.html``: no server, no library. A thread writes it from the run directory's log, so
every backend has it and no step waits for it; what goes wrong here is said once and hurts no training.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Template

from scripts.drawing.curves import figures_of
from scripts.files import write_text
from scripts.stage.progress import LIVE_PAGE, RECENT_STEPS, read_log, step_seconds

PERIOD_SECONDS = 10.0
LARGEST_SHARE = 0.02
TEMPLATE = Path(__file__).with_suffix(".html")


@contextmanager
def live_page(stage: str, run: Path, planned: int, period: float = PERIOD_SECONDS) -> Iterator[None]:
    """Keep a run directory's live page up to date while the block runs.

    It is written at most once in `period` seconds, and less often where that would take more than a fiftieth of the
    time: the page of a long training takes longer to draw.
    """
    over = threading.Event()
    writer = threading.Thread(target=_keep_writing, args=(stage, run, planned, period, over), daemon=True)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join(timeout=period)


def _keep_writing(stage: str, run: Path, planned: int, period: float, over: threading.Event) -> None:
    seen, has_failed, pause, log = None, False, period, run / "metrics.jsonl"
    while True:
        is_over = over.wait(pause)
        began = time.monotonic()
        try:
            changed = log.stat().st_mtime_ns if log.exists() else None
            if changed is not None and (is_over or changed != seen):
                write_page(stage, run, planned, period, is_training=not is_over)
                seen = changed
        except Exception as error:
            if not has_failed:
                print(f"{stage}: {run / LIVE_PAGE} is not written ({error}); training goes on", flush=True)
            has_failed = True
        if is_over:
            return
        pause = max(period, (time.monotonic() - began) / LARGEST_SHARE)


def write_page(stage: str, run: Path, planned: int, period: float, is_training: bool) -> None:
    """Write the page from what the run directory has logged; it refreshes itself only while the stage trains."""
    entries = read_log(run / "metrics.jsonl")
    state = "training" if is_training else "ended" if entries and entries[-1]["step"] == planned else "stopped"
    names = {name for entry in entries for name in entry}
    figures = figures_of({"": {name: [entry.get(name) for entry in entries] for name in names}})
    refresh, progress = max(1, round(period)) if is_training else None, _progress(entries, planned)
    page = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
    text = page.render(stage=stage, state=state, refresh=refresh, progress=progress, figures=figures)
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
