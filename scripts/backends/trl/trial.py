"""One real batch before anything costs: a stage's model, cut to a few layers, trains, is saved, loaded and exported.

A process of its own (scripts.backends.trl.trial_run) does it, so that a crash, a hang or a lack of memory is a message.
What was tried once is noted in ``<results>/logs/tried``, and not tried again for the same config, model and code.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

from scripts.backends.protocol import StopRequest, TrainingJob, write_job
from scripts.backends.trl.placing import memory_of_machine
from scripts.errors import UserError
from scripts.files import canonical_json, read_json, sha256_file, sha256_text, temporary_directory, write_json
from scripts.finding import Finding
from scripts.installed import version_of
from scripts.model.bfloat16 import computes_bfloat16
from scripts.model.hugging_face import model_files
from scripts.processes import PARENT, end_session
from scripts.recipe.model import PretrainedModel
from scripts.recipe.site import Site
from scripts.recipe.yaml_file import installation
from scripts.records import Manifest, read_record
from scripts.stage.candidate import Candidate
from scripts.stage.stage import Stage

SECONDS = 300.0
"""A try of a minute on two free cores may take several on busy ones."""
THREADS = 2
MOST_TOKENS = 2048
"""Tokens of a row, at most; fewer where the model is large."""
SLOW_TOKENS = 64
"""Tokens of a row where the CPU is slow in the stage's precision."""
MEMORY_SHARE = 0.5
"""Of the machine's free memory."""
BYTES_OF_A_PARAMETER = {"all": 20, "adapters": 8}
"""Weights, gradients, moments and copies while they are saved; frozen weights of adapters with their copies."""
MOST_PARAMETERS = {"all": 50e6, "adapters": 120e6}
"""What is saved, hashed and loaded twice within a minute: all with both moments, or frozen weights once."""
CODE = [*sorted(Path(__file__).parent.glob("*.py"))]
LAST_LINES = 3
SWITCH = "or turn the try off (try_batch: false of the site)"
Outcome = Literal["passed", "failed", "not tried"]


@dataclass(frozen=True)
class Tried:
    """How a try ended, with what it came to for the stage's preflight.json."""

    outcome: Outcome
    says: str
    record: dict[str, Any]


def check_batch(candidate: Candidate) -> Iterator[Finding]:
    """Train one batch of a stage, where the site wants a try, and note the outcome.

    A failure by settings, rows or packages stops the stage. A try that takes too long, or that this machine cannot
    make, is a warning.
    """
    stage, site, python = candidate.stage, candidate.site, candidate.python
    if not _is_to_be_tried(stage, site):
        return
    if python in ("python", sys.executable) and find_spec("trl") is None:
        candidate.noted["batch"] = {"not_tried": "TRL is not installed here (envs/trl.txt)"}
        return
    kept = stage.results / "logs/tried" / f"{_key(stage, site, python)}.json"
    if kept.is_file():
        before = "before, with the same settings, model and code"
        candidate.noted["batch"] = read_record(kept, dict[str, Any]) | {"tried": before}
        return
    tried = _tried(stage, site, python)
    candidate.noted["batch"] = tried.record
    if tried.outcome == "failed":
        yield candidate.stops(tried.says)
    elif tried.outcome == "not tried":
        yield candidate.warns(f"one batch was not tried: {tried.says}")
    else:
        print(f"{stage.name}: {tried.says}", file=sys.stderr, flush=True)
        write_json(kept, tried.record)


def _is_to_be_tried(stage: Stage, site: Site | None) -> bool:
    """Whether the site wants a try, the stage has its start and its rows, and no step was trained before."""
    wanted = site.try_batch if site else None
    if wanted is None:
        wanted = isinstance(stage.recipe.model, PretrainedModel)
    records = [stage.parent_export_record, *(paths.export_record for paths in stage.roles.values())]
    are_there = all(record is None or record.is_file() for record in records)
    blend = stage.recipe.blends[stage.settings.blend]
    if not wanted or not are_there or blend.has_pictures:
        return False
    return not stage.training.checkpoints


def _key(stage: Stage, site: Site | None, python: str) -> str:
    """Return a hash of all that a try depends on; of the optimizer's numbers and of weights it does not."""
    values = stage.config.values()
    values["policy"] = {name: value for name, value in values["policy"].items() if name != "optimizer"}
    values["policy"]["optimizer"] = stage.config.policy.optimizer.name
    values.pop("seed", None)
    starts = {"": stage.parent_export} | stage.role_exports
    facts = {
        "config": values,
        "placing": stage.settings.policy.model_dump(mode="json", include={"train_micro_batch_size", "dtensor_cfg"}),
        "rows": read_record(stage.manifest, Manifest)["train"]["sha256"],
        "starts": {role: _files_of(folder) for role, folder in starts.items()},
        "accelerator": site.accelerator if site else "cpu",
        "python": python,
        "packages": [version_of(name) for name in ("trl", "transformers", "torch", "peft", "accelerate", "datasets")],
        "code": [sha256_file(file) for file in CODE],
    }
    return sha256_text(canonical_json(facts))[:16]


def _files_of(folder: Path | None) -> dict[str, str]:
    """Return the hashes of a model's small files."""
    if folder is None:
        return {}
    return {path.name: sha256_file(path) for path in model_files(folder) if path.suffix != ".safetensors"}


def _tried(stage: Stage, site: Site | None, python: str) -> Tried:
    """Let the program try the stage in a folder that is removed afterwards, and read how it ended."""
    log = stage.paths.logs / "batch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with temporary_directory(stage.paths.directory / "batch") as folder:
        write_job(folder / "job.pickle", TrainingJob.of(stage, max_num_steps=1, threads=THREADS, stop=StopRequest()))
        write_json(folder / "limits.json", _limits(stage, site))
        status = _run(python, folder.absolute(), log)
        outcome_file = folder / "outcome.json"
        outcome = read_json(outcome_file) if outcome_file.is_file() else None
    seconds = round(time.monotonic() - started, 1)
    return _judged(stage, status, outcome, seconds, log)


def _limits(stage: Stage, site: Site | None) -> dict[str, Any]:
    """Return what a try may take here: parameters and tokens of a row."""
    policy = stage.config.policy
    free = min(psutil.virtual_memory().available, memory_of_machine())
    kind = "all" if policy.lora is None else "adapters"
    on_cpu = site is None or site.accelerator == "cpu"
    is_slow = policy.precision == "bfloat16" and not on_cpu and not computes_bfloat16("cpu")
    return {
        "parameters": min(MOST_PARAMETERS[kind], MEMORY_SHARE * free / BYTES_OF_A_PARAMETER[kind]),
        "tokens": SLOW_TOKENS if is_slow else MOST_TOKENS,
        "on_cpu": on_cpu,
    }


def _run(python: str, folder: Path, log: Path) -> int | None:
    """Run the program in a session of its own; return its status, None after the time limit."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(installation()), os.environ.get("PYTHONPATH")])),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(THREADS),
        "TOKENIZERS_PARALLELISM": "false",
        PARENT: str(os.getpid()),
    }
    command = [python, "-m", "scripts.backends.trl.trial_run", str(folder)]
    try:
        with log.open("w") as output:
            process = subprocess.Popen(  # noqa: S603
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
    except OSError as error:
        raise UserError(
            f"{python}: {error.strerror}; name a working Python to train the stage (the site's vllm_python)"
        ) from None
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_session(process, grace=2)


def _judged(stage: Stage, status: int | None, outcome: dict[str, Any] | None, seconds: float, log: Path) -> Tried:
    """Return how a try ended, by its program's status and by what the program left."""
    left = outcome or {"doing": "starting", "failed": None, "not_tried": None, "remarks": [], "more": {}, "seconds": {}}
    doing = left["doing"]
    record = {"seconds": seconds, "parts": left["seconds"], **left["more"]}
    if left["remarks"]:
        record["not_shown"] = left["remarks"]
    if left["failed"] is not None:
        where = f"see {log}; correct the named setting, {SWITCH}"
        return Tried("failed", f"one batch was tried, and {doing} failed: {left['failed']} ({where})", record)
    if status is None:
        why = f"{doing} took longer than {SECONDS:g} s in all on this machine (see {log})"
        return Tried("not tried", why, record | {"not_tried": why})
    if left["not_tried"] is not None:
        return Tried("not tried", left["not_tried"], record | {"not_tried": left["not_tried"]})
    if status == -9:
        why = f"{doing} was killed, as for lack of memory on this machine (see {log})"
        return Tried("not tried", why, record | {"not_tried": why})
    if status != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = "; ".join(lines[-LAST_LINES:]) or f"status {status}"
        return Tried("failed", f"one batch was tried, and {doing} crashed ({last}); see {log}, {SWITCH}", record)
    says = f"one batch was trained, saved, loaded and exported in {seconds:.0f} s"
    if left["remarks"]:
        says += f"; not shown: {'; '.join(left['remarks'])}"
    return Tried("passed", says, record)
