"""Tell a stage's status: its state, and the news of its attempts, last steps and Slurm job.

The later news counts: an attempt that began or ended after Slurm was last heard, or a job's state after an attempt.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.records import Gate, read_if_there
from scripts.slurm.client import ENDED_BY_SLURM, ENDED_STATES, epoch
from scripts.slurm.jobs import JobRecord, LatestJob
from scripts.stage.measured import is_measured, words_of
from scripts.stage.paths import StagePaths
from scripts.stage.progress import step_seconds
from scripts.stage.state import StageState
from scripts.stage.training_folder import TrainingFolder

QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
AT_REST = ("fresh", "waiting", "damaged")


@dataclass(frozen=True)
class StageStatus:
    """Hold a stage's line of the status.

    `state` is a state of `StageState`, or unknown, queued, cancelled or failed. `reward` and `kl` are of `step`,
    `left` is in seconds at the pace of the last steps, `nodes` and `job` are of the Slurm job at work.
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
    """Return a stage's status; `latest` is Slurm's last word on its job."""
    if state.state == "training":
        return _training(state, paths, latest.job if latest else None)
    if latest is not None and not _is_news(latest, paths, state):
        latest = None
    training = state.training or TrainingFolder(paths.run)
    entries = training.recent_steps
    status = _at(state, state.last if state.state == "fresh" else state.start, entries)
    changes = _of_job(state, paths, latest) if latest and state.state != "damaged" else None
    if changes is None and state.state not in AT_REST and (failure := _failure(state, paths, latest)):
        changes = {"state": "failed", "note": failure}
    if changes is None and state.is_unknown:
        status = replace(status, state="unknown")
    measured = _validation(status.step, entries)
    return replace(status, **(changes or {"note": _joined(measured, _note(state, paths, latest))}))


def _at(state: StageState, step: int, entries: list[dict[str, Any]]) -> StageStatus:
    """Return the status at a step, with the figures that were logged there."""
    entry = next((entry for entry in reversed(entries) if entry["step"] == step), {})
    reward, loss = entry.get("reward_mean"), entry.get("loss")
    note = f"loss {loss:.3f}" if loss is not None and reward is None else ""
    note = _joined(note, _validation(step, entries))
    return StageStatus(state.stage, state.state, state.planned, step, reward, entry.get("kl"), note=note)


def _validation(step: int, entries: list[dict[str, Any]]) -> str:
    """Return in words what held-out rows gave last, up to a step; nothing where none of the entries measured any."""
    known = [entry for entry in entries if is_measured(entry) and entry["step"] <= step]
    if not known:
        return ""
    at = f" at step {known[-1]['step']}" if known[-1]["step"] != step else ""
    return ", ".join(words_of(known[-1])) + at


def _verdict(paths: StagePaths) -> str:
    """Return in words that a stage's gate says stop; nothing for another verdict, and before any."""
    verdict = read_if_there(paths.gate, Gate)
    return "its gate says stop, so nothing starts from it" if verdict and verdict["verdict"] == "stop" else ""


def _note(state: StageState, paths: StagePaths, latest: LatestJob | None) -> str:
    if state.state in AT_REST:
        return _joined(state.note, state.skipped, _verdict(paths) if state.state == "fresh" else "")
    if state.state == "trained":
        return _joined("to be published", state.note, state.skipped)
    heard = latest is not None and latest.job.state not in ("COMPLETED", "UNKNOWN")
    said = f"job {latest.job.id} {latest.job.state} as of {clock(latest.at)}" if heard else ""
    return _joined(state.note, state.skipped, *state.changed, said)


def _training(state: StageState, paths: StagePaths, job: JobRecord | None) -> StageStatus:
    """Return the status of a stage at work: the step of its attempt, once begun; `job` is the stage's newest."""
    training = TrainingFolder(paths.run) if state.trains_other or state.training is None else state.training
    owner, entries = training.owner() or {}, training.recent_steps
    since = owner.get("since", 0.0)
    begun = next((attempt for attempt in training.attempts[-1:] if attempt["time"] >= since), None)
    step = begun["from"] if begun else state.start
    if begun and entries and _changed_at(training.log) >= begun["time"]:
        step = entries[-1]["step"]
    status, seconds = _at(state, step, entries), step_seconds(entries)
    nodes = job.node_count if job and job.id == owner.get("slurm_job") else None
    where = f"since {clock(since)} on {owner.get('host', 'an unknown host')}"
    return replace(
        status,
        left=(state.last - step) * seconds if begun and state.last and seconds is not None else None,
        nodes=begun["nodes"] if begun else nodes,
        job=owner.get("slurm_job"),
        note=_joined(where, status.note, "with earlier settings or data" if state.trains_other else ""),
    )


def _of_job(state: StageState, paths: StagePaths, latest: LatestJob) -> dict[str, Any] | None:
    """Return the status that a stage's Slurm job decides, or None."""
    job = latest.job
    if job.state in QUEUED:
        reason = job.reason if job.reason not in ("", "None", "(null)") else "no reason told"
        note = f"since {_slurm_clock(job.submitted)}, {reason}, as of {clock(latest.at)}"
        return {"state": "queued", "nodes": job.node_count or None, "job": job.id, "note": note}
    if state.state in ("fresh", "waiting"):
        return None
    if job.state == "CANCELLED":
        note = f"{_slurm_clock(job.end)}; call snakemake again"
        return {"state": "cancelled", "job": job.id, "note": note}
    has_begun = any(attempt["slurm_job"] == job.id for attempt in state.attempts)
    if job.state in ("FAILED", "OUT_OF_MEMORY") and not has_begun:
        log = paths.attempts_log
        log = log if _changed_at(log) >= (epoch(job.submitted) or 0) else job.log
        return {"state": "failed", "job": job.id, "note": f"{job.state} before any step; see {log}"}
    return None


def _failure(state: StageState, paths: StagePaths, latest: LatestJob | None) -> str | None:
    """Say why a stage failed, with the log to read; None where it did not."""
    preflight, last = paths.logs / "preflight.log", state.attempts[-1] if state.attempts else None
    refused = not paths.preflight.exists() and preflight.exists() and preflight.stat().st_size > 0
    if refused and (last is None or _changed_at(preflight) > last["time"]):
        return f"preflight; see {preflight}"
    cut_off = latest is not None and latest.job.state in ENDED_BY_SLURM
    if last is None or state.is_trained or state.training != TrainingFolder(paths.run) or cut_off:
        return None
    if last["outcome"] == "failed":
        return f"see {paths.attempts_log}"
    if state.training.without_progress(last["call"] or 0, state.start):
        return f"two attempts without a new step; see {paths.attempts_log}"
    return None


def _is_news(latest: LatestJob, paths: StagePaths, state: StageState) -> bool:
    """Whether Slurm's last word is newer than the stage's; a job's end is, but for later attempts of another job."""
    last = state.attempts[-1] if state.attempts else None
    if latest.job.state in ENDED_STATES:
        return last is None or last["slurm_job"] == latest.job.id or last["time"] < (epoch(latest.job.end) or 0)
    recorded = (last.get("ended") or last["time"]) if last else 0.0
    return latest.at >= max(recorded, _changed_at(paths.record))


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _changed_at(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _slurm_clock(local: str) -> str:
    return clock(seconds) if (seconds := epoch(local)) else "an unknown time"


def clock(seconds: float) -> str:
    """Return a time, in seconds since the epoch, as hours and minutes; on another day with its day."""
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%m-%d %H:%M", then)
