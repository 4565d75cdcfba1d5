"""Note how far a stage can train from each checkpoint, so that Snakemake, plan and status need not open checkpoints.

NeMo-RL's asynchronous training loses rows at every resume, so the data can end before the planned step.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.files import write_json
from scripts.records import ReachedStep, Reaches, read_if_there

RECORD = "reach.json"


@dataclass(frozen=True)
class Reach:
    """Name the step that an attempt trains to; with `is_end` the data end there, before the planned step."""

    step: int
    is_end: bool = False


def noted_reach(run: Path, start: int) -> Reach | None:
    """Return the noted reach of an attempt from step `start` (0: from none), or None."""
    noted = _noted(run).get(str(start))
    return Reach(noted["step"], noted["is_end"]) if noted else None


def note_reach(run: Path, start: int, reach: Reach) -> None:
    """Note the reach of an attempt from step `start`."""
    write_json(run / RECORD, _noted(run) | {str(start): asdict(reach)})


def adopt_reach(run: Path, other: Path, step: int) -> None:
    """Note as well what another run directory has noted of its checkpoints up to that of a step."""
    if noted := {start: reach for start, reach in _noted(other).items() if int(start) <= step}:
        write_json(run / RECORD, _noted(run) | noted)


def forget_beyond(run: Path, start: int) -> None:
    """Forget the reach of checkpoints after step `start`, which are trained again."""
    if noted := _noted(run):
        write_json(run / RECORD, {step: reach for step, reach in noted.items() if int(step) <= start})


def last_step(run: Path, start: int, planned: int) -> int:
    """Return the last step of a stage with newest step `start`: the end of its data, at most the planned step."""
    reach = noted_reach(run, start)
    return min(planned, reach.step) if reach and reach.is_end else planned


def _noted(run: Path) -> dict[str, ReachedStep]:
    return read_if_there(run / RECORD, Reaches) or {}
