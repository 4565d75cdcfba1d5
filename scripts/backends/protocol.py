"""The interface between stages and backends.

A backend is a package of scripts/backends with two modules: ``settings.py`` holds its stages' settings
(scripts.recipe.stage_settings), ``backend.py`` its `BACKEND`. Training libraries are imported in `train` alone.
"""

import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from scripts.errors import UserError
from scripts.files import write_text
from scripts.finding import Check, Finding, Moment
from scripts.recipe.model import MODEL
from scripts.recipe.resolve import own_environments, rows_of_manifest
from scripts.recipe.site import GYM_PYTHON, Site
from scripts.recipe.stage_settings import StageSettings
from scripts.records import Reach, ShownRow
from scripts.rows.arrival import Reading
from scripts.rows.chat_format import ChatFormat
from scripts.rows.measures import BlockMeasure
from scripts.slurm.client import Job
from scripts.stage.candidate import Candidate
from scripts.stage.consistency import exported_model
from scripts.stage.publish import export_checkpoint
from scripts.stage.rundir import Checkpoint, step_of
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LATER_JOBS = "stages behind a choice are planned once the choice has fallen, after the start"


class StopRequest:
    """A request to stop, looked for after every step; the step is then saved and the training ends as unfinished.

    Processes of one training share the request by a file on their file system (another host may see it seconds late).
    The file's folder belongs to one attempt; without the folder the attempt is over.
    """

    def __init__(self, deadline: float | None = None, file: Path | None = None) -> None:
        """`deadline`: the allocation's end in seconds since the epoch, or None. `file`: the shared request."""
        self.deadline, self.file = deadline, file
        self.reason: str | None = None

    @property
    def signalled(self) -> bool:
        """Whether the reason is a signal."""
        return self.reason in {number.name for number in SIGNALS}

    def listen(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP as requests; a second Ctrl-C (SIGINT) interrupts at once."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def ask(self, reason: str) -> None:
        """Request a stop, here and in all processes that share the file; the first reason stays."""
        self.reason = self.reason or reason
        if self.file is not None and self.file.parent.is_dir() and not self.file.exists():
            write_text(self.file, self.reason)

    def is_due(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether to stop now: on request, or where another step and save may not end before the deadline.

        UserError where the attempt is over: a process that outlived it must not save into the next attempt's folder.
        """
        if self.file is not None and not self.file.parent.is_dir():
            raise UserError(f"{self.file.parent}: is gone, so the attempt is over; nothing was saved")
        self._look()
        if self.reason is None and self.deadline is not None:
            left = self.deadline - time.time()
            if left < step_seconds + save_seconds:
                self.ask(f"{max(left, 0):.0f} s are left before the deadline")
        return self.reason is not None

    @contextmanager
    def shared(self, file: Path) -> Iterator[None]:
        """Share requests through `file` while the block runs; remove an earlier attempt's."""
        file.unlink(missing_ok=True)
        self.file = file
        if self.reason is not None:
            self.ask(self.reason)
        try:
            yield
        finally:
            self._look()
            self.file = None

    def _look(self) -> None:
        if self.reason is None and self.file is not None and self.file.exists():
            self.reason = self.file.read_text(encoding="utf-8")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.reason is None:  # Snakemake may pass on a signal that all processes got
            print(f"{name}: saving at the end of the step", flush=True)
        try:
            self.ask(name)
        except (OSError, UserError) as error:
            print(f"{name} did not reach the training processes: {error}", flush=True)


@dataclass(frozen=True)
class TrainingJob:
    """The job of training a stage up to a step.

    The backend trains up to step `max_num_steps` and seals that step; the learning rate's schedule ends at
    `planned`. The start is checkpoint `resume_from`, else `parent_model`, else (None) the config's own model. A stage
    that continues its parent has a checkpoint of the parent, of step `begun`, after which the data start anew. With
    `is_amended` the checkpoint may be of a training with other settings, and those of `config` count from it on. The
    backend seals checkpoints with ``training.seal`` and logs steps into ``run/metrics.jsonl``. At the end of each
    step it asks `stop`; once a stop is due, it seals the step and returns.

    `config` alone decides the weights; `settings` adds checkpoint periods and the gate's criteria that end a
    training (scripts.evaluate.gate). Every step has the same rows on any number of `nodes`, `processes`
    (of a node, each with a GPU where `accelerator` is cuda) and CPU `threads`; another number rounds otherwise and,
    of processes, draws other completions. `environments` maps the user's environments to files.
    """

    stage: str
    settings: StageSettings
    config: StageSettings
    train_split: Path
    parent_model: Path | None
    run: Path
    resume_from: Path | None
    max_num_steps: int
    threads: int
    stop: StopRequest
    nodes: int
    environments: dict[str, Path]
    roles: dict[str, Path] = field(default_factory=dict)
    begun: int = 0
    is_amended: bool = False
    processes: int = 1
    accelerator: str = "cpu"
    directory: Path | None = None
    report_to: tuple[str, ...] = ()
    gym_python: str = GYM_PYTHON

    @classmethod
    def of(cls, stage: Stage, **more: Any) -> Self:
        """The job of training a stage, with the fields that the stage does not tell; by default fresh, on one node."""
        more = {"resume_from": None, "nodes": 1} | more
        return cls(
            stage=stage.name,
            settings=stage.settings,
            config=stage.config,
            train_split=stage.train_split,
            parent_model=stage.parent_export,
            run=stage.paths.run,
            directory=stage.paths.directory,
            environments=own_environments(stage.recipe, stage.name),
            roles=stage.role_exports,
            begun=stage.begun,
            **more,
        )

    @property
    def training(self) -> TrainingFolder:
        """Return the training's folder (`run`) as it is now: a fresh object each time."""
        return TrainingFolder(self.run)

    @property
    def stage_directory(self) -> Path:
        """Return the stage's folder, for logs and prepared rows; by default the folder around `run`."""
        return self.directory or self.run.parent

    @property
    def rows(self) -> int | None:
        """The rows of the training split; None where no manifest tells."""
        return rows_of_manifest(self.train_split.with_name("manifest.json"))

    @property
    def planned(self) -> int | None:
        """The stage's last step, possibly beyond this job's."""
        return self.config.planned_step(self.rows)

    @property
    def ranks(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.processes

    @property
    def start(self) -> int:
        """The step to train from; 0: a fresh start."""
        return step_of(self.resume_from) if self.resume_from else 0

    @property
    def continues(self) -> bool:
        """Whether the checkpoint to resume from is the parent's."""
        return 0 < self.begun == self.start

    @property
    def goes_on_by_config(self) -> bool:
        """Whether the config's rate, betas and decay replace those that the checkpoint to resume from holds."""
        return self.continues or self.is_amended


@dataclass(frozen=True)
class Allocation:
    """The place of a training: a Slurm job, of a site with a slurm section (None: this machine), and the site."""

    job: Job | None = None
    site: Site | None = None


def check_one_node(candidate: Candidate) -> Iterator[Finding]:
    """Find a stage with several nodes, for a backend on one."""
    stage, site = candidate.stage, candidate.site
    if site is not None and site.resources_of(stage.name, stage.settings).nodes > 1:
        yield candidate.stops(f"backend {stage.config.backend} trains on one node; set resources.nodes to 1", trap=19)


def chat_format_of_start(stage: Stage) -> ChatFormat | None:
    """Return the chat format of the export that a stage starts from, with the stage's template; None without one."""
    folder = stage.parent_export
    if folder is None or not folder.exists():
        return None
    return ChatFormat.of(folder).with_template(stage.config.chat_template)


class Backend:
    """Trains stages. Only `train` is required; defaults suit a backend on one node."""

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Train up to the job's last step or a stop.

        `job.stop` has a reason afterwards where the training is to be continued. Raise UserError for a failure
        of the training's own, CutOffError where the next attempt may succeed, ExhaustedError where the data
        have ended.
        """
        raise NotImplementedError

    def checks(self) -> Sequence[Check[Candidate]]:
        """Return the checks of a stage, each with its moment; by default a stage has one node."""
        return [Check(Moment.START, check_one_node, again=LATER_JOBS)]

    def chat_format(self, stage: Stage) -> ChatFormat | None:
        """Return the stage's chat format: the start's, with the stage's chat template; None without an export."""
        return chat_format_of_start(stage)

    def reading(self, stage: Stage, chat_template: str, folder: Path) -> Reading | None:
        """Return how rows are given to a stage's chat template, beside a tokenizer in `folder`; None: not known."""
        return None

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """Return the tokens of the first training rows, or the reason why they cannot be shown.

        Raise UserError where the rows cannot be trained on.
        """
        return f"backend {stage.config.backend} does not tell what it makes of rows"

    def measures(self, stage: Stage) -> list[tuple[Path, BlockMeasure]]:
        """Return what this backend's checks of a stage measure of splits, each with its split, to be read together."""
        return []

    def seal_finished(self, training: TrainingFolder) -> None:
        """Seal the whole checkpoints that a program of the backend left in a training's folder."""

    def begin_from(self, training: TrainingFolder, parent: Checkpoint, config: StageSettings) -> Checkpoint:
        """Return the checkpoint from which a stage goes on with its parent's training: the parent's own."""
        return parent

    def reach_of(
        self, config: StageSettings, training: TrainingFolder, newest: Checkpoint | None, planned: int, rows: int
    ) -> Reach:
        """How far an attempt gets from the newest checkpoint: to the step `planned`, or to where the data end."""
        return Reach(planned)

    def image_of(self, stage: Stage, site: Site | None) -> dict[str, Any] | None:
        """Return the container of a stage: name, registry digest, the file's SHA-256; or None."""
        return None

    def export(self, stage: Stage, site: Site | None, log: Path | None) -> None:
        """Export the published checkpoint in Hugging Face's format, as the next stage's start.

        A conversion program runs on the site and prints into `log`.
        """
        export_checkpoint(stage.paths.ckpt, stage.paths.export_record.parent)

    def export_as_it_is(self, stage: Stage) -> None:
        """Export the published checkpoint, whose files are in Hugging Face's format.

        Descendants of a pretrained model keep its config, tokenizer and generation settings, except a chat
        template that the stage names.
        """
        is_pretrained = MODEL in stage.recipe.graph.models and stage.parent_export_record is not None
        like = exported_model(stage.parent_export_record) if is_pretrained else None
        export_checkpoint(stage.paths.ckpt, stage.paths.export_record.parent, like, stage.config.chat_template)

    def command_text(self, stage: Stage, site: Site) -> str:
        """Return the command of the backend's program for a stage; UserError without a program."""
        raise UserError(
            f"stage {stage.name} on site {site.name}: NeMo-RL does not train it here, so there is no command"
        )

    def memory(self, stage: Stage, site: Site) -> tuple[str, bool | None]:
        """Return a sentence on a process's memory ("": not estimated), and whether the stage fits (None: perhaps)."""
        return "", True


def write_job(path: Path, job: TrainingJob) -> None:
    """Write a job, with absolute paths, for another process of the training."""
    absolute = {name: value.absolute() for name, value in vars(job).items() if isinstance(value, Path)}
    absolute["roles"] = {role: folder.absolute() for role, folder in job.roles.items()}
    path.write_bytes(pickle.dumps(replace(job, **absolute)))


def read_job(path: Path) -> TrainingJob:
    """Return the job of `write_job`."""
    return pickle.loads(path.read_bytes())  # noqa: S301 (written by this training)
