"""The store's folder of a training as one object, which reads each of its files when asked for, and once.

An object shows the folder as it was when it was first asked. `read_again` returns one that has read nothing yet: ask it
after a wait, after a training or a fetch, and in each turn of a loop. What an object writes itself, it shows.

Three answers are never kept, since a process that trains may change them at any moment: who holds the lock (`owner`),
which checkpoint is the newest whole one (`newest_checkpoint`), and the lines that an attempt ends with (`end_attempt`).
"""

import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from scripts.files import append_json, describe_files, fsync_directory, read_tail, sync_tree, write_json
from scripts.recipe.resolve import config_in, read_values
from scripts.recipe.stage_settings import StageSettings
from scripts.records import Reach, Reaches, RunIdentity, parse_lines, read_if_there, read_lines
from scripts.slurm.client import own_job_id
from scripts.stage.attempts import Attempt, attempts_from
from scripts.stage.owner import read_owner
from scripts.stage.paths import STORE
from scripts.stage.progress import REACH, RECENT_STEPS, Step, read_log, step_seconds
from scripts.stage.rundir import FILES, Checkpoint, step_of


@dataclass(frozen=True)
class TrainingFolder:
    """The folder of a training, whether or not it is there; two objects of one path are equal."""

    path: Path

    @classmethod
    def behind(cls, link: Path) -> Self:
        """Return the folder that a stage's ``ckpt/weights`` or ``hf/model`` leads into."""
        target = link.resolve()
        return cls(target.parents[1])

    @property
    def is_in_store(self) -> bool:
        """Whether the folder lies in the store; a run directory of an earlier commit and a model's export do not."""
        return self.path.parent.name == STORE

    def read_again(self) -> Self:
        """Return the folder as it is now: an object that has read nothing yet."""
        return type(self)(self.path)

    @property
    def name(self) -> str:
        """The folder's name, the identity in the store."""
        return self.path.name

    # --- what is written once ---

    @property
    def identity_file(self) -> Path:
        """The file of the identity and its facts."""
        return self.path / "identity.json"

    @cached_property
    def identity_record(self) -> RunIdentity | None:
        """The identity with its facts; None where the folder is missing or has no identity.json."""
        return read_if_there(self.identity_file, RunIdentity)

    @property
    def identity(self) -> str | None:
        """The identity that is trained here; None where the folder is missing or has no identity.json."""
        return self.identity_record["identity"] if self.identity_record else None

    @cached_property
    def config_values(self) -> dict[str, Any]:
        """The resolved config as plain values; UserError where it is missing or damaged."""
        return read_values(self.config_file)

    @cached_property
    def config(self) -> StageSettings:
        """The resolved config; UserError where it is missing, damaged or of an unknown kind."""
        return config_in(self.config_values, self.config_file)

    @property
    def config_file(self) -> Path:
        """The file of the resolved config."""
        return self.path / "config.yaml"

    @property
    def exports(self) -> Path:
        """The folder of the models exported from the checkpoints."""
        return self.path / "exports"

    # --- the lock ---

    @property
    def owner_file(self) -> Path:
        """The lock."""
        return self.path / "owner.json"

    def owner(self) -> dict[str, Any] | None:
        """Read who holds the lock, dead or alive; None for nobody, an empty record for a damaged one."""
        return read_owner(self.owner_file)

    # --- checkpoints ---

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The sealed checkpoints, oldest first, their content unchecked."""
        sealed = [path for path in self.step_folders if (path / FILES).is_file()]
        return [Checkpoint.at(path) for path in sealed]

    @property
    def newest_step(self) -> int:
        """The step of the newest sealed checkpoint, 0 without one."""
        return self.checkpoints[-1].step if self.checkpoints else 0

    @property
    def whole_step(self) -> int:
        """The newest step whose checkpoint has all its files, by name and size; else 0."""
        whole = [each.step for each in self.checkpoints if each.damage(content=False) is None]
        return max(whole, default=0)

    def checkpoint(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, there or not."""
        return Checkpoint(step, self.path / "checkpoints" / f"step_{step}")

    def newest_checkpoint(self, last_step: int | None = None, content: bool = True) -> Checkpoint | None:
        """Look for the newest checkpoint (of step `last_step` at most) whose files are as listed; None without one.

        A damaged checkpoint is named and passed over. Sizes are compared, and hashes where `content` is set.
        """
        for path in reversed(self.step_folders):
            checkpoint = Checkpoint.at(path)
            if last_step is not None and checkpoint.step > last_step:
                continue
            damage = checkpoint.damage(content)
            if damage is None:
                return checkpoint
            print(f"{path}: {damage}; passing it over for the checkpoint before it", flush=True)
        return None

    def seal(self, saved: Path, step: int) -> Checkpoint:
        """Make a saved folder the checkpoint of a step: list its files, sync, rename."""
        write_json(saved / FILES, describe_files(saved))
        sync_tree(saved)
        sealed = self.checkpoint(step)
        sealed.path.parent.mkdir(exist_ok=True)
        if sealed.path.exists():  # damaged, and passed over by the attempt that trained this step again
            shutil.rmtree(sealed.path)
        saved.rename(sealed.path)
        fsync_directory(sealed.path.parent)
        self._forget("checkpoints")
        return sealed

    @property
    def step_folders(self) -> list[Path]:
        """List the folders that are named as checkpoints are, oldest first, sealed or not; anew each time."""
        named = [path for path in (self.path / "checkpoints").glob("step_*") if step_of(path) >= 0]
        return sorted(named, key=step_of)

    # --- logged steps ---

    @property
    def log(self) -> Path:
        """The file of the logged steps."""
        return self.path / "metrics.jsonl"

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """All logged steps in order; for a step logged again after a resume the later line."""
        return read_log(self.log)

    @cached_property
    def recent_steps(self) -> list[dict[str, Any]]:
        """The last logged steps, in the order logged, whatever the log's size."""
        return list(parse_lines(read_tail(self.log)[-RECENT_STEPS:], Step))

    # --- attempts ---

    @cached_property
    def attempts(self) -> list[dict[str, Any]]:
        """The attempts with first step and outcome (killed without an end), oldest first; see `attempts_from`."""
        return attempts_from(read_lines(self.attempts_file, Attempt))

    def attempts_in(self, step: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the attempts whose steps the checkpoint of a step contains, newest first, with the last of each."""
        for attempt in reversed(self.attempts):
            if attempt["outcome"] != "waited" and attempt["from"] < step:
                yield attempt, step
                step = attempt["from"]

    def attempts_of(self, call: int) -> list[dict[str, Any]]:
        """Return the attempts of one call of Snakemake, oldest first."""
        return [attempt for attempt in self.attempts if attempt["call"] == call]

    def without_progress(self, call: int, step: int) -> str | None:
        """Describe how a call's last two attempts ended, if both began at the newest checkpoint's step; else None.

        An attempt that found where its data end does not count: the next one aims at an earlier step. Nor does `call`
        0, a person's own, nor an attempt that a sick node ended.
        """
        counted = [attempt for attempt in self.attempts_of(call) if attempt["outcome"] not in ("waited", "sick")]
        last = counted[-2:]
        if not call or len(last) < 2:
            return None
        if any(attempt["from"] != step or attempt["outcome"] == "exhausted" for attempt in last):
            return None
        outcomes = f"{last[0]['outcome']} and {last[1]['outcome']}"
        return f"two attempts in a row ({outcomes}) made no new step beyond {step}"

    def begin_attempt(self, step: int, call: int = 0, nodes: int = 1, gpus: int = 0, **more: Any) -> None:
        """Note that an attempt begins at a step; without an end line it was killed.

        `call` numbers the call of Snakemake, `gpus` counts the GPUs of all nodes; `more` are `code` and `image` as
        scripts.stage.provenance tells, the `gym_verdicts` of a stage that Gym's servers reward, a Slurm job's nodes as
        `hosts`, and `sniff` as scripts.slurm.nodes found them.
        """
        here = {"host": socket.gethostname(), "slurm_job": own_job_id()}
        self._note_attempt("begin", step, call=call, nodes=nodes, gpus=gpus, **more, **here)

    def end_attempt(self, step: int, outcome: str, blamed: Sequence[str] = ()) -> None:
        """Note an attempt's outcome, its newest checkpoint's step, its median seconds of a step, and `blamed` nodes.

        `outcome`: finished, unfinished (stopped on request), exhausted (its data ended; the next attempt aims no
        further), lost (a node), stalled (no new step for too long), sick (a node, before the first step), failed, or
        waited (trained nothing, for another job does). Attempts carried over to an amended training end as amended.
        """
        now = self.read_again()
        begun, logged = now.attempts[-1], now.recent_steps
        # File systems count more coarsely than the clock.
        is_own = logged and self.log.stat().st_mtime > begun["time"] - 1
        own = {each["step"]: each for each in logged if is_own and begun["from"] < each["step"] <= logged[-1]["step"]}
        self._note_attempt("end", step, outcome=outcome, blamed=[*blamed], step_seconds=step_seconds(own.values()))

    @property
    def attempts_file(self) -> Path:
        """The file with a line as each attempt begins and ends."""
        return self.path / "attempts.jsonl"

    def _note_attempt(self, event: str, step: int, **told: Any) -> None:
        append_json(self.attempts_file, {"event": event, "step": step, **told, "time": time.time()})
        self._forget("attempts")

    # --- where the data end ---

    @cached_property
    def reaches(self) -> dict[str, dict[str, Any]]:
        """The noted reach of attempts, by the step that they begin at."""
        return read_if_there(self.reach_file, Reaches) or {}

    @property
    def reach_file(self) -> Path:
        """The file that notes where the data of attempts end."""
        return self.path / REACH

    def noted_reach(self, start: int) -> Reach | None:
        """Return the noted reach of an attempt from step `start` (0: from none), or None."""
        noted = self.reaches.get(str(start))
        return Reach(**noted) if noted else None

    def note_reach(self, start: int, reach: Reach) -> None:
        """Note the reach of an attempt from step `start`."""
        self._write_reaches(self.read_again().reaches | {str(start): asdict(reach)})

    def forget_beyond(self, start: int) -> None:
        """Forget the reach of checkpoints after step `start`, which are trained again."""
        noted = self.read_again().reaches
        if noted:
            self._write_reaches({step: reach for step, reach in noted.items() if int(step) <= start})

    def last_step(self, start: int, planned: int) -> int:
        """Return the last step of a stage with newest step `start`: the end of its data, at most the planned step."""
        reach = self.noted_reach(start)
        return min(planned, reach.step) if reach and reach.is_end else planned

    def _write_reaches(self, reaches: dict[str, dict[str, Any]]) -> None:
        write_json(self.reach_file, reaches)
        self._forget("reaches")

    def _forget(self, name: str) -> None:
        """Forget what was read of a file that this object has just written."""
        self.__dict__.pop(name, None)
