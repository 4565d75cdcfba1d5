"""What a stage is at right now: its state, and over that what its attempts, its last steps and its Slurm job tell.

Of two that contradict each other the later word counts: an attempt that began or ended after Slurm was last heard is
news, and so is a job of which Slurm spoke after the last attempt.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.slurm.client import ENDED_BY_SLURM, ENDED_STATES, epoch
from scripts.slurm.jobs import SLURM_LOGS, JobRecord, LatestJob
from scripts.stage.attempts import read_attempts, without_progress
from scripts.stage.owner import read_owner
from scripts.stage.paths import StagePaths, owner_of
from scripts.stage.progress import recent_steps, step_seconds, tokens_per_second
from scripts.stage.state import StageState

OLD_SECONDS = 300.0
QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
STARTING = {"CONFIGURING", "RUNNING"}


@dataclass(frozen=True)
class StageStatus:
    """What one stage is at.

    `state` is fresh, queued, starting, training, unfinished (it goes on from `step` when called for), trained (only to
    be published), cancelled, failed, waiting, stale, damaged or new. `reward` and `kl` are those of `step`,
    `left` the seconds to the planned step at the pace of the last steps, `nodes` and `job` those of the Slurm job that
    is at it.
    """

    stage: str
    state: str
    planned: int | None
    step: int = 0
    reward: float | None = None
    kl: float | None = None
    left: float | None = None
    nodes: int | None = None
    job: str | None = None
    note: str = ""


def status_of(state: StageState, paths: StagePaths, latest: LatestJob | None = None) -> StageStatus:
    """What a stage is at; `latest` is what Slurm last said of its job."""
    if state.state == "damaged":
        return _at(state, state.state, 0, [], note=state.note)
    run = paths.run if state.trains_other else state.run
    attempts = [attempt for attempt in read_attempts(run) if attempt["outcome"] != "waited"] if run else []
    if state.state == "training":
        return _training(state, run or paths.run, attempts, latest.job if latest else None)
    if latest is not None and not _is_news(latest, paths, attempts):
        latest = None
    entries = recent_steps(run) if run else []
    if latest is not None and (status := _of_job(state, paths, entries, latest)) is not None:
        return status
    if state.state in ("fresh", "waiting"):
        step = {"fresh": state.last, "waiting": 0}.get(state.state, state.start)
        return _at(state, state.state, step, entries, note=_joined(state.note, state.skipped))
    if note := _failure(state, paths, attempts, latest):
        return _at(state, "failed", state.start, entries, note=note)
    return _at_rest(state, entries, bool(attempts), latest)


def _at_rest(
    state: StageState, entries: list[dict[str, Any]], was_tried: bool, latest: LatestJob | None
) -> StageStatus:
    """A stage that nobody is at and that did not fail."""
    if state.publishes_again:
        note = _joined("to be published", state.note, state.skipped)
        return _at(state, "trained", state.start, entries, note=note)
    if state.state == "resumes" or was_tried:
        return _at(state, "unfinished", state.start, entries, note=_joined(state.note, state.skipped, _as_of(latest)))
    return _at(state, state.state, 0, entries, note=_joined(_shortened(state.changed), _as_of(latest)))


def _training(state: StageState, run: Path, attempts: list[dict[str, Any]], job: JobRecord | None) -> StageStatus:
    """A stage that a process holds: where its attempt is, once it has begun one; `job`: the stage's newest."""
    owner = read_owner(owner_of(run)) or {}
    since = owner.get("since", 0.0)
    begun = attempts[-1] if attempts and attempts[-1]["time"] >= since else None
    entries = recent_steps(run)
    step = begun["from"] if begun else state.start
    if begun and entries and _changed_at(run / "metrics.jsonl") >= begun["time"]:
        step = entries[-1]["step"]
    seconds, pace = step_seconds(entries), tokens_per_second(entries)
    last = next((entry for entry in reversed(entries) if entry["step"] == step), {})
    nodes = job.node_count if job and job.id == owner.get("slurm_job") else None
    loss = last.get("loss") if last.get("reward_mean") is None else None
    return StageStatus(
        stage=state.stage,
        state="training",
        planned=state.planned,
        step=step,
        reward=last.get("reward_mean"),
        kl=last.get("kl"),
        left=(state.last - step) * seconds if begun and state.last and seconds is not None else None,
        nodes=begun["nodes"] if begun else nodes,
        job=owner.get("slurm_job"),
        note=_joined(
            f"since {clock(since)} on {owner.get('host', 'an unknown host')}",
            f"loss {loss:.3f}" if loss is not None else "",
            f"{pace:,.0f} tokens/s" if begun and pace else "",
            "what the recipe said before" if state.trains_other else "",
        ),
    )


def _of_job(
    state: StageState, paths: StagePaths, entries: list[dict[str, Any]], latest: LatestJob
) -> StageStatus | None:
    """The status of a stage whose Slurm job is the latest news of it; None: the job does not decide it."""
    job, on = latest.job, {"nodes": latest.job.node_count or None, "job": latest.job.id}
    is_old = time.time() - latest.at > OLD_SECONDS
    as_of = f"as of {clock(latest.at)}" if is_old else ""
    step = state.last if state.state == "fresh" else state.start
    if job.state in QUEUED:
        note = _joined(f"since {slurm_clock(job.submitted)}", _reason(job), as_of)
        return _at(state, "queued", step, entries, note=note, **on)
    if state.state in ("fresh", "waiting"):
        return None
    if job.state in STARTING and not is_old:
        return _at(state, "starting", step, entries, note=f"since {slurm_clock(job.start)} on {job.nodes}", **on)
    if job.state == "CANCELLED":
        return _at(state, "cancelled", step, entries, job=job.id, note=f"{slurm_clock(job.end)}; call snakemake again")
    if job.state in ("FAILED", "OUT_OF_MEMORY") and not _attempted(state, job):
        log = paths.attempts_log
        log = log if _changed_at(log) >= (epoch(job.submitted) or 0) else SLURM_LOGS / state.stage / f"{job.id}.log"
        return _at(state, "failed", step, entries, job=job.id, note=f"{job.state} before any step; see {log}")
    return None


def _failure(
    state: StageState, paths: StagePaths, attempts: list[dict[str, Any]], latest: LatestJob | None
) -> str | None:
    """How a stage failed and in which log that stands; None: it did not."""
    preflight = paths.logs / "preflight.log"
    last = attempts[-1] if attempts else None
    refused = not paths.preflight.exists() and preflight.exists() and preflight.stat().st_size > 0
    if refused and (last is None or _changed_at(preflight) > last["time"]):
        return f"preflight; see {preflight}"
    cut_off = latest is not None and latest.job.state in ENDED_BY_SLURM
    if last is None or state.publishes_again or state.run != paths.run or cut_off:
        return None
    log = paths.attempts_log
    if last["outcome"] == "failed":
        return f"see {log}"
    if without_progress(state.run, last["call"] or 0, state.start):
        return f"two attempts without a new step; see {log}"
    return None


def _at(state: StageState, word: str, step: int, entries: list[dict[str, Any]], **more: Any) -> StageStatus:
    """The status at a step, with what that step logged."""
    entry = next((entry for entry in reversed(entries) if entry["step"] == step), {})
    return StageStatus(state.stage, word, state.planned, step, entry.get("reward_mean"), entry.get("kl"), **more)


def _attempted(state: StageState, job: JobRecord) -> bool:
    """Whether a job came as far as to begin an attempt."""
    return state.run is not None and any(attempt["slurm_job"] == job.id for attempt in read_attempts(state.run))


def _as_of(latest: LatestJob | None) -> str:
    """What Slurm said of the job, where that adds to the attempts' own account."""
    if latest is None or latest.job.state in ("COMPLETED", "UNKNOWN"):
        return ""
    return f"job {latest.job.id} {latest.job.state} as of {clock(latest.at)}"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _reason(job: JobRecord) -> str:
    return job.reason if job.reason not in ("", "None", "(null)") else "no reason told"


def _shortened(changed: tuple[str, ...]) -> str:
    """What changed, the first in words and the rest counted."""
    return f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''}" if changed else ""


def _is_news(latest: LatestJob, paths: StagePaths, attempts: list[dict[str, Any]]) -> bool:
    """Whether Slurm's last state of the job is newer than what the stage itself last recorded.

    The end of a job concerns every attempt but a later one of another job.
    """
    last = attempts[-1] if attempts else None
    if latest.job.state in ENDED_STATES:
        return last is None or last["slurm_job"] == latest.job.id or last["time"] < (epoch(latest.job.end) or 0)
    recorded = (last.get("ended") or last["time"]) if last else 0.0
    return latest.at >= max(recorded, _changed_at(paths.record))


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def slurm_clock(local: str) -> str:
    """A time that Slurm wrote, for people."""
    return clock(seconds) if (seconds := epoch(local)) else "an unknown time"


def clock(seconds: float) -> str:
    """A time of today as hours and minutes, another with its day; `seconds` since the epoch."""
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%m-%d %H:%M", then)
