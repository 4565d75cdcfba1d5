"""Record a checkpoint's data, and the code and images of the attempts that trained its steps.

Provenance changes no weight: it is recorded and never compared. Attempts note code and image at their start, so
publishing a checkpoint again gives the same record.
"""

import subprocess
from base64 import urlsafe_b64encode
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from scripts.data.placeholders import TABLES
from scripts.files import canonical_json, sha256_file, sha256_text
from scripts.installed import DISTRIBUTION
from scripts.recipe.yaml_file import installation
from scripts.records import CheckpointRecord, ExportRecord, Origins, SourceRecord, read_if_there
from scripts.stage.amendment import chain_of
from scripts.stage.paths import StagePaths
from scripts.stage.stage import Stage
from scripts.stage.training_folder import TrainingFolder

CODE = ("Snakefile", "rules", "scripts", "envs")
PATIENCE = 30.0


def code_revision(root: Path | None = None) -> dict[str, Any]:
    """Return Stagecoach's commit, whether code was changed since (`dirty`), and a SHA-256 over the scripts.

    An installed package has a `version`. Without checkout and package, commit and `dirty` are None.
    """
    root = root or installation()
    hashes = {str(path.relative_to(root)): sha256_file(path) for path in sorted((root / "scripts").rglob("*.py"))}
    top, _, head = (git(root, "rev-parse", "--show-toplevel", "HEAD") or "").partition("\n")
    commit = head if head and Path(top).resolve() == root.resolve() else None
    changes = git(root, "status", "--porcelain", "--", *CODE) if commit else None
    code = {"commit": commit, "dirty": None if changes is None else bool(changes)}
    for package in distributions(name=DISTRIBUTION, path=[str(root.parent)]):
        installed = {str(file): file.hash.value for file in package.files or () if file.hash}
        ours = {name: urlsafe_b64encode(bytes.fromhex(sha256)) for name, sha256 in hashes.items()}  # as PEP 376 has it
        same = all(installed.get(f"{root.name}/{name}") == ours[name].decode().rstrip("=") for name in ours)
        code |= {"version": package.version, "dirty": not same}
    return code | {"scripts": sha256_text(canonical_json(hashes))}


def git(root: Path, *arguments: str) -> str | None:
    """Return git's answer on a folder; None without git or repository."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def trained_by(training: TrainingFolder, step: int) -> list[dict[str, Any]]:
    """Return code and image of the attempts up to a step, oldest first; `steps` are the first and the last.

    Neighbouring attempts of the same code and image are merged.
    """
    spans: list[dict[str, Any]] = []
    for attempt, end in training.attempts_in(step):
        how = {"code": attempt["code"], "image": attempt["image"]}
        if spans and spans[-1] == how | {"steps": spans[-1]["steps"]}:
            spans[-1]["steps"][0] = attempt["from"] + 1
        else:
            spans.append({"steps": [attempt["from"] + 1, end], **how})
    return spans[::-1]


def record_of(stage: Stage, step: int) -> dict[str, Any]:
    """Return the record of a stage's checkpoint, without its files.

    `data_ended` appears where the data ended early: planned step, rows of the missing steps, number of resumes.
    """
    ended, training = {}, stage.last_training
    if stage.config.is_asynchronous and step != stage.planned:
        skipped = (stage.planned - step) * stage.config.rows_per_step
        resumes = sum(attempt["from"] > 0 for attempt, _ in training.attempts_in(step))
        ended["data_ended"] = {"planned": stage.planned, "rows_skipped": skipped, "resumes": resumes}
    record = {
        "stage": stage.name,
        "step": step,
        "identity": stage.identity,
        "facts": stage.facts,
        "seed": stage.config.seed,
        "release": stage.config.release,
        **({"data": _data_of(stage)} if stage.blend else {}),
        **ended,
        "trained_by": trained_by(training, step),
        "parents": [parent_of(parent.paths, stage.start_record) for parent in stage.parents],
    }
    if stage.amendment:
        record["amended"] = chain_of(stage.trained_paths, stage.identity)
    if not record["parents"] and stage.start_record is not None:
        record["model"] = _model_of(stage.start_record)
    for role, exported in stage.role_records.items():
        if stage.node.roles[role].trained:
            record.setdefault("roles", {})[role] = parent_of(stage.roles[role], exported)
        else:
            record.setdefault("models", {})[role] = _model_of(exported)
    if stage.config.chat_template is not None:
        content = stage.config.template_sha256 or sha256_text(stage.config.chat_template)
        record["chat_template"] = {"name": stage.settings.chat_template, "sha256": content}
    return record


def step_text(record: dict[str, Any]) -> str:
    """Return a checkpoint's step; of the planned where its data ended early, and of the trained where it was chosen."""
    if "data_ended" in record:
        return f"{record['step']} of {record['data_ended']['planned']}"
    if "selected" in record:
        return f"{record['step']} of {record['selected']['last']}"
    return str(record["step"])


def words_of_skipped(record: dict[str, Any]) -> str:
    """Describe the rows skipped where the data ended early, else nothing."""
    if not (ended := record.get("data_ended")):
        return ""
    resumes = ended["resumes"]
    when = f" at {resumes} resume{'' if resumes == 1 else 's'}" if resumes else ""
    return f"{ended['rows_skipped']} rows skipped{when}"


def _data_of(stage: Stage) -> dict[str, Any]:
    """Return a blend's name, source, revisions of tables of placeholders, and the manifest's SHA-256."""
    splits, source = stage.splits, stage.manifest.parents[1] / "source/record.json"
    revisions = (read_if_there(source, SourceRecord) or {}).get("tables", {})
    tables = sorted({TABLES[name].repository for name in splits.get("placeholders", {}) if name in TABLES})
    return {
        "blend": stage.blend.name,
        "source": splits.get("source"),
        "tables": {name: revisions.get(name) for name in tables},
        "manifest": stage.manifest_sha256,
    }


def _model_of(exported: ExportRecord) -> dict[str, Any]:
    """Return the origin of a pretrained model's export."""
    return {**exported["source"], "content": exported["content"]}


def parent_of(paths: StagePaths, exported: ExportRecord) -> dict[str, Any]:
    """Return the stage behind an export, with ancestors.

    Facts are copied from the parent's ckpt/record.json where it describes the exported checkpoint.
    """
    published = read_if_there(paths.record, CheckpointRecord) or {}
    is_same = published.get("identity") == exported["identity"]
    origins = {key: published[key] for key in Origins.__annotations__ if key in published} if is_same else {}
    return {key: exported[key] for key in ("stage", "step", "identity", "content")} | origins
