"""What a backend does for the stages it trains, and what it is asked for.

A backend is a package of scripts/backends with two modules: ``settings.py`` says what a recipe may say of its stages
(scripts.recipe.stage), ``backend.py`` holds its `BACKEND`. What it imports to train is loaded only when it trains.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import TypeAdapter

from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.installed import backend_module
from scripts.recipe.recipe import AnyStage
from scripts.recipe.resolve import own_environments, rows_of_manifest, training_config
from scripts.recipe.site import GYM_PYTHON, Site
from scripts.recipe.stage import StageSettings, TrainingConfig
from scripts.records import ShownRow
from scripts.rows.chat_format import ChatFormat
from scripts.slurm.client import Job
from scripts.stage.publish import export_checkpoint
from scripts.stage.reach import Reach
from scripts.stage.rundir import Checkpoint, step_of
from scripts.stage.stage import Stage
from scripts.stage.stop import StopRequest


@dataclass(frozen=True)
class TrainingJob:
    """All that a backend needs to train a stage.

    The backend trains up to step `max_num_steps` and seals that step; the learning rate's schedule ends at `planned`.
    It starts from checkpoint `resume_from`, else from `parent_model`, else (None) from the config's own model. It seals
    checkpoints with ``scripts.stage.rundir.seal_checkpoint`` and logs each step into ``run/metrics.jsonl``. At the end
    of each step it asks `stop`; once a stop is due, it seals the step and returns.

    `config` alone says how to train. `settings` adds what changes no weight: checkpoint periods, the gate's criteria
    that can end a training (scripts.evaluate.step_criteria). Every step has the same rows on any number of `nodes` and
    `processes` (of a node, each on a GPU of its own where `accelerator` is cuda) and CPU `threads`; another number
    rounds otherwise and, of processes, draws other completions. `environments` maps the user's own environments to
    their files.
    """

    stage: str
    settings: StageSettings
    config: TrainingConfig
    train_split: Path
    parent_model: Path | None
    run: Path
    resume_from: Path | None
    max_num_steps: int
    threads: int
    stop: StopRequest
    nodes: int
    environments: dict[str, Path]
    processes: int = 1
    accelerator: str = "cpu"
    directory: Path | None = None
    report_to: tuple[str, ...] = ()
    gym_python: str = GYM_PYTHON

    @classmethod
    def of(
        cls,
        stage: Stage,
        max_num_steps: int,
        threads: int,
        stop: StopRequest,
        resume_from: Path | None = None,
        nodes: int = 1,
    ) -> Self:
        """The job of training a stage up to a step."""
        return cls(
            stage=stage.name,
            settings=stage.settings,
            config=stage.config,
            train_split=stage.train_split,
            parent_model=stage.parent_export,
            run=stage.paths.run,
            directory=stage.paths.directory,
            resume_from=resume_from,
            max_num_steps=max_num_steps,
            threads=threads,
            stop=stop,
            nodes=nodes,
            environments=own_environments(stage.recipe, stage.name),
        )

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
        """The step at which the stage is done, though this job may end before it."""
        return self.config.planned_step(self.rows)

    @property
    def ranks(self) -> int:
        """The processes that train together, on all nodes."""
        return self.nodes * self.processes

    @property
    def start(self) -> int:
        """The step from which it trains; 0: a fresh start."""
        return step_of(self.resume_from) if self.resume_from else 0


@dataclass(frozen=True)
class Allocation:
    """Where a stage trains: its Slurm job (None: on this machine) and the site."""

    job: Job | None = None
    site: Site | None = None


@dataclass(frozen=True)
class Finding:
    """Something that would go wrong. `stops`: it surely would, so nothing is started; otherwise it is worth a look."""

    stage: str
    trap: int
    says: str
    stops: bool = True

    def __str__(self) -> str:
        """One line for people."""
        return f"{'error' if self.stops else 'warning'}: {self.stage}: {self.says} (trap {self.trap})"


class Backend:
    """What trains stages. Only `train` has to be there; the rest is for backends that differ from the plain case."""

    def train(self, job: TrainingJob, allocation: Allocation) -> None:
        """Train up to the job's last step, or until it is to stop.

        Afterwards `job.stop` has a reason where the training is to be continued. UserError: it failed for a reason of
        its own; CutOffError: the next attempt may go well; ExhaustedError: its data have ended.
        """
        raise NotImplementedError

    def check_nodes(self, stage: Stage, site: Site) -> None:
        """UserError when a stage cannot train on as many nodes and processes as it has on a site."""
        if site.resources_of(stage.name, stage.settings).nodes > 1:
            raise UserError(
                f"{stage.name}: backend {stage.config.backend} trains on one node; set resources.nodes to 1"
            )

    def findings(self, stage: Stage, site: Site) -> list[Finding]:
        """What would go wrong with a stage on a site, as far as files tell."""
        try:
            self.check_nodes(stage, site)
        except UserError as error:
            return [Finding(stage.name, 19, str(error))]
        return []

    def preflight(self, stage: Stage, site: Site | None, python: str) -> list[str]:
        """What keeps a stage whose data are there from training, a line each; what is worth a look is printed.

        `site` is given where it matters to the backend, `python` is what trains the stage.
        """
        return []

    def chat_format(self, stage: Stage) -> ChatFormat | None:
        """How a stage talks to its model: as what it starts from, but for the chat template that it names.

        None where it starts from no export, or that is not there.
        """
        folder = stage.parent_export
        if folder is None or not folder.exists():
            return None
        return ChatFormat.of(folder).with_template(stage.config.chat_template)

    def shown_rows(self, stage: Stage, count: int) -> list[ShownRow] | str:
        """The tokens of the first rows that a stage trains on, or why they cannot be told here.

        UserError where they cannot be trained on.
        """
        return f"backend {stage.config.backend} does not tell what it makes of rows"

    def seal_finished(self, run: Path) -> None:
        """Seal the whole checkpoints that a program of the backend's own left in a run directory."""

    def reach_of(self, config: TrainingConfig, run: Path, newest: Checkpoint | None, planned: int, rows: int) -> Reach:
        """How far an attempt gets from the newest checkpoint: to the step `planned`, or to where the data end."""
        return Reach(planned)

    def image_of(self, stage: Stage, site: Site | None) -> dict[str, Any] | None:
        """The container that trains a stage: its name, its digest in the registry, the SHA-256 of its file; or none."""
        return None

    def export(self, stage: Stage, site: Site | None, log: Path | None) -> None:
        """Export the published checkpoint in Hugging Face's format, for the next stage to start from.

        Where that takes a program, it runs on the site and prints into `log`.
        """
        export_checkpoint(stage.paths.ckpt, stage.paths.export_record.parent)

    def command_text(self, stage: Stage, site: Site) -> str:
        """What a program of the backend's own would be told of a stage; UserError where there is none."""
        raise UserError(
            f"stage {stage.name} on site {site.name}: NeMo-RL does not train it here, so there is no command"
        )

    def memory(self, stage: Stage, site: Site) -> tuple[str, bool]:
        """Return a sentence on the memory that a process needs ("": not reckoned), and whether it fits."""
        return "", True


def backend_of(name: str) -> Backend:
    """The backend of that name."""
    return backend_module(name, "backend").BACKEND


_STAGE = TypeAdapter(AnyStage)


def write_job(path: Path, job: TrainingJob) -> None:
    """Write a job for a process that may run elsewhere: paths absolute, of `stop` its deadline and its file."""
    write_json(path, msgspec.to_builtins(job, enc_hook=_plain))


def read_job(path: Path) -> TrainingJob:
    """The job that `write_job` wrote."""
    return msgspec.convert(read_json(path), TrainingJob, dec_hook=_typed)


def _plain(value: Path | StopRequest | StageSettings | TrainingConfig) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, StopRequest):
        return {"deadline": value.deadline, "file": value.file and str(value.file.absolute())}
    return value.values() if isinstance(value, TrainingConfig) else value.model_dump(mode="json")


def _typed(kind: type, value: Any) -> Path | StopRequest | StageSettings | TrainingConfig:
    if kind is StopRequest:
        return StopRequest(value["deadline"], value["file"] and Path(value["file"]))
    return {Path: Path, StageSettings: _STAGE.validate_python, TrainingConfig: training_config}[kind](value)
