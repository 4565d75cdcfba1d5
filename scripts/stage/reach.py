"""How far a stage can still train: noted in its run directory for each checkpoint from which it may go on.

NeMo-RL's asynchronous training loses rows at every resume, so its data can end before the planned step. What is noted
is read where nothing may be asked of a checkpoint: by Snakemake, the plan and the status.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.files import write_json
from scripts.records import ReachedStep, Reaches, read_if_there

RECORD = "reach.json"


@dataclass(frozen=True)
class Reach:
    """The step that an attempt trains up to; `is_end`: the data end there, before the planned step."""

    step: int
    is_end: bool = False


def noted_reach(run: Path, start: int) -> Reach | None:
    """How far an attempt from the checkpoint of step `start` gets (0: without one); None: nothing is noted."""
    noted = _noted(run).get(str(start))
    return Reach(noted["step"], noted["is_end"]) if noted else None


def note_reach(run: Path, start: int, reach: Reach) -> None:
    """Note how far an attempt from the checkpoint of step `start` gets."""
    write_json(run / RECORD, _noted(run) | {str(start): asdict(reach)})


def adopt_reach(run: Path, other: Path, step: int) -> None:
    """Note as well what another run directory has noted of its checkpoints up to that of a step."""
    if noted := {start: reach for start, reach in _noted(other).items() if int(start) <= step}:
        write_json(run / RECORD, _noted(run) | noted)


def forget_beyond(run: Path, start: int) -> None:
    """Forget what was noted of later checkpoints than that of step `start`, which are made again."""
    if noted := _noted(run):
        write_json(run / RECORD, {step: reach for step, reach in noted.items() if int(step) <= start})


def last_step(run: Path, start: int, planned: int) -> int:
    """The step that ends a stage whose newest checkpoint is of step `start`: where its data end, or the planned one."""
    reach = noted_reach(run, start)
    return min(planned, reach.step) if reach and reach.is_end else planned


def _noted(run: Path) -> dict[str, ReachedStep]:
    return read_if_there(run / RECORD, Reaches) or {}
