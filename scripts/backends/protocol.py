"""What a backend is asked for, and which backends there are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.files import read_json, write_json
from scripts.launch.slurm import Job
from scripts.recipe.criteria import Criterion
from scripts.recipe.judges import JudgeServer, Role
from scripts.recipe.models import Checkpointing, NemoRlStage
from scripts.recipe.resolve import is_asynchronous
from scripts.recipe.site import Site
from scripts.stage.reach import Reach
from scripts.stage.rundir import Checkpoint, step_of
from scripts.stage.stop import StopRequest


@dataclass(frozen=True)
class TrainingJob:
    """One attempt at a stage.

    The backend trains up to `max_num_steps` (the planned step, or the one where the data end before it), from the
    checkpoint `resume_from` where there is one; it seals checkpoints every ``checkpointing.save_period`` steps and at
    the last one, logs every step to
    ``run/metrics.jsonl``, and at the end of each step asks `stop`: once that is due, it seals the step and returns.
    `nodes` and `threads` (CPU threads on each node) are no part of what a stage trains: every step has the same rows on
    any number of them. Another number rounds otherwise, and of nodes draws other completions. `judge_servers` says
    where the config's judges answer, `environments` where the files lie of the user's own ones in it. `gate` holds the
    criteria, of which some can end a training early (scripts.stage.step_criteria).
    """

    stage: str
    config: dict[str, Any]
    train_split: Path
    parent_model: Path | None
    run: Path
    resume_from: Path | None
    max_num_steps: int
    checkpointing: Checkpointing
    threads: int
    stop: StopRequest
    nodes: int = 1
    judge_servers: dict[Role, JudgeServer] = field(default_factory=dict)
    environments: dict[str, Path] = field(default_factory=dict)
    gate: list[Criterion] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The step from which it trains; 0: a fresh start."""
        return step_of(self.resume_from) if self.resume_from else 0


@dataclass(frozen=True)
class Place:
    """Where a stage is started: its Slurm job, the site, and the recipe's word on what changes no weight."""

    job: Job
    site: Site
    stage: NemoRlStage


_PATHS = ("train_split", "parent_model", "run", "resume_from")


def write_job(path: Path, job: TrainingJob) -> None:
    """Write a job for a process that may run elsewhere: paths absolute, of `stop` its deadline and its file."""
    record = vars(job) | {
        "checkpointing": job.checkpointing.model_dump(mode="json"),
        "stop": {"deadline": job.stop.deadline, "file": _text(job.stop.file)},
        "judge_servers": {role: server.model_dump(mode="json") for role, server in job.judge_servers.items()},
        "environments": {name: _text(path) for name, path in job.environments.items()},
        "gate": [criterion.model_dump(mode="json") for criterion in job.gate],
    }
    write_json(path, record | {name: _text(record[name]) for name in _PATHS})


def read_job(path: Path) -> TrainingJob:
    """The job that `write_job` wrote."""
    record = read_json(path)
    record |= {name: _path(record[name]) for name in _PATHS}
    record["checkpointing"] = Checkpointing.model_validate(record["checkpointing"])
    servers = record["judge_servers"].items()
    record["judge_servers"] = {role: JudgeServer.model_validate(server) for role, server in servers}
    record["environments"] = {name: Path(path) for name, path in record["environments"].items()}
    record["gate"] = [Criterion.model_validate(criterion) for criterion in record["gate"]]
    record["stop"] = StopRequest(record["stop"]["deadline"], _path(record["stop"]["file"]))
    return TrainingJob(**record)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def load_backend(name: str) -> Callable[..., None]:
    """The `train` function of a backend; its module (and what that imports) is loaded only now.

    It takes a TrainingJob; that of nemo_rl takes the Place as well.
    """
    return import_module(f"scripts.backends.{name}.train").train


def load_cluster_backend(name: str) -> Callable[[TrainingJob, Callable[[list[str]], int]], None]:
    """The function of a backend that trains on several nodes, given what runs a driver's command on a Ray cluster."""
    return import_module(f"scripts.backends.{name}.cluster").train_on_cluster


def recognise_checkpoints(backend: str, run: Path) -> None:
    """Seal the whole checkpoints that a backend's own program left in a run directory."""
    if backend == "nemo_rl":
        import_module("scripts.backends.nemo_rl.checkpoints").seal_finished(run)


def reach_of(config: dict[str, Any], run: Path, newest: Checkpoint | None, planned: int, rows: int) -> Reach:
    """How far an attempt gets from a run directory's newest checkpoint: to the planned step, or where the data end."""
    if not is_asynchronous(config):
        return Reach(planned)
    return import_module("scripts.backends.nemo_rl.reach").reach_of(run, newest, planned, rows)


def check_nodes(stage: str, config: dict[str, Any], nodes: int) -> None:
    """UserError when a stage of this resolved config cannot train on so many nodes."""
    if nodes > 1 and config["backend"] == "trl":
        import_module(f"scripts.backends.{config['backend']}.cluster").check_nodes(stage, config, nodes)
