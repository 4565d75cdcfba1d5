"""Hold records against the files they describe, before anything is planned or trained from them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import AGAIN, check_readable, read_bytes
from scripts.recipe.model import MODEL
from scripts.recipe.recipe import Recipe
from scripts.records import (
    ADVICE,
    Benchmarks,
    CheckpointRecord,
    Choice,
    Criteria,
    Evaluation,
    ExportRecord,
    Gate,
    Manifest,
    Preflight,
    RunIdentity,
    SourceRecord,
    read_if_there,
    read_record,
)
from scripts.rows.measures import content_of
from scripts.stage.paths import StagePaths
from scripts.stage.publish import MEGATRON, export_name
from scripts.stage.rundir import differences, step_of, unlisted
from scripts.stage.store import facts_in, identity_of
from scripts.stage.training_folder import TrainingFolder

HASHED_BYTES = 16 << 20
PARQUET = b"PAR1"
EXPORTS = "Snakemake exports the checkpoint again"
SPLITS = {"train-split.jsonl": "train", "val-split.jsonl": "validation"}
SPLIT_AGAIN = "delete both, and Snakemake splits again"


def refuse_damage(recipe: Recipe, results: Path) -> None:
    """Raise UserError with a line for every damaged or contradictory record of a run."""
    damaged = damage_of_run(recipe, results)
    if damaged:
        raise UserError("\n".join(["records are damaged, so nothing is done:", *damaged]))


def damage_of_run(recipe: Recipe, results: Path) -> list[str]:
    """Return a line for every damaged or contradictory record of a run.

    Nothing large is read: names, links, sizes, and hashes of hashes.
    """
    lines = list(damage(results / "data/source/record.json", SourceRecord))
    for blend in recipe.blends:
        lines += told(of_blend, results / "data" / blend / "manifest.json")
    for stage in (*(start.name for start in recipe.graph.trained), MODEL, *recipe.models):
        lines += damage_of_stage(StagePaths(results / stage))
    return [*dict.fromkeys(lines)]


def damage_of_stage(paths: StagePaths) -> list[str]:
    """Return a line for every damaged or contradictory record of a stage."""
    others = {paths.evaluation: Evaluation, paths.benchmarks: Benchmarks, paths.gate: Gate}
    others |= {paths.criteria: Criteria, paths.preflight: Preflight, paths.choice: Choice, paths.test: Evaluation}
    problems = [line for path, kind in others.items() for line in damage(path, kind)]
    for contradictions in (_of_run, of_checkpoint, of_export, _of_metrics):
        problems += told(contradictions, paths)
    return problems


def damage(path: Path, kind: type) -> Iterator[str]:
    """Yield a line if a record is damaged; a missing record is not."""
    try:
        read_if_there(path, kind)
    except UserError as error:
        yield str(error)


def told(contradictions: Callable[[Any], Iterable[str]], of: Path | StagePaths) -> Iterator[str]:
    """Yield the contradictions of a path or stage, or a damaged record's message."""
    try:
        yield from contradictions(of)
    except UserError as error:
        yield str(error)


def _of_metrics(paths: StagePaths) -> Iterator[str]:
    """Yield a line if the table of metrics does not begin and end with Parquet's magic bytes."""
    content = read_bytes(paths.metrics) if paths.metrics.exists() else PARQUET * 3
    if len(content) < 12 or not (content.startswith(PARQUET) and content.endswith(PARQUET)):
        yield f"{paths.metrics}: damaged (no Parquet file); {AGAIN}"


def of_blend(manifest: Path) -> Iterator[str]:
    """Yield a line for every split of another size than its manifest says."""
    known = read_if_there(manifest, Manifest)
    for name, split in SPLITS.items() if known else ():
        path, size = manifest.with_name(name), known[split].get("bytes")
        if size is not None and path.is_file() and path.stat().st_size != size:
            yield f"{path}: has {path.stat().st_size} bytes, but {manifest} says {size}; {SPLIT_AGAIN}"


def check_splits(manifest: Path) -> None:
    """Raise UserError where a split has another hash than its manifest says.

    A split is hashed again only where its size or times are others than when it was hashed before.
    """
    known = read_record(manifest, Manifest)
    for name, split in SPLITS.items():
        path = manifest.with_name(name)
        if content_of(path) != known[split]["sha256"]:
            raise UserError(f"{path}: not the file that {manifest} describes; {SPLIT_AGAIN}")


def _of_run(paths: StagePaths) -> Iterator[str]:
    """Yield a line if the training folder's identity is not the hash of its facts."""
    training = TrainingFolder(paths.run)
    path, held = training.identity_file, training.identity_record
    if held is not None and (identity := identity_of(facts_in(held))) != held["identity"]:
        says = f"its facts hash to {identity}, but it says {held['identity']}"
        yield f"{path}: {says}; {ADVICE[RunIdentity]}"


def of_checkpoint(paths: StagePaths) -> Iterator[str]:
    """Yield the contradictions between a checkpoint's record, its facts and the link beside it."""
    record = read_if_there(paths.record, CheckpointRecord)
    if record is None:
        return
    path, again, facts = paths.record, ADVICE[CheckpointRecord], record["facts"]
    if identity_of(facts) != record["identity"]:
        yield f"{path}: its facts hash to {identity_of(facts)}, but it calls itself {record['identity']}; {again}"
    last = record.get("amended", [])[-1:]
    if [{key: each[key] for key in ("from", "step")} for each in last] != [*filter(None, [facts.get("amended")])]:
        yield f"{path}: its facts have another amendment than it tells of; {again}"
    for parent in record["parents"]:
        if parent["content"] != facts["parent_export"]:
            names = f"names {parent['content']} as {parent['stage']}"
            yield f"{path}: starts from {facts['parent_export']}, but {names}; {again}"
    named = {role: start["content"] for kind in ("roles", "models") for role, start in record.get(kind, {}).items()}
    if named != facts.get("roles", {}):
        yield f"{path}: its facts have the roles {facts.get('roles', {})}, but it names {named}; {again}"
    weights = paths.ckpt / "weights"
    if weights.is_symlink() and step_of(weights.readlink()) not in (record["step"], -1):
        yield f"{path}: is of step {record['step']}, but {weights} is a link to {weights.readlink()}; {again}"


def of_export(paths: StagePaths, hashed_bytes: int = -1) -> Iterator[str]:
    """Yield the contradictions between an export's record, its files and the link beside it.

    Sizes are compared, and hashes of files up to `hashed_bytes`.
    """
    record = read_if_there(paths.export_record, ExportRecord)
    if record is not None:
        yield from contradictions_of(record, paths, hashed_bytes)


def contradictions_of(record: ExportRecord, paths: StagePaths, hashed_bytes: int = -1) -> Iterator[str]:
    """Yield what `of_export` does, of a record that was read before."""
    path, again, content = paths.export_record, ADVICE[ExportRecord], record["content"]
    if export_name(record["files"]) != content:
        yield f"{path}: its files do not hash to its content {content}; {again}"
    elif paths.export.is_symlink() and paths.export.readlink().name != content:
        target = paths.export.readlink()
        yield f"{paths.export}: a link to {target}, but {path} names {content}; delete both, and {EXPORTS}"
    folder = paths.exported(content)
    if not folder.is_dir():
        return
    for name, problem in differences(folder, record["files"], hashed_bytes):
        yield f"{folder / name}: {problem}, by {path}; delete {folder} and the record, and {EXPORTS}"
    for name in unlisted(folder, record["files"]):
        if name != MEGATRON:  # of earlier commits
            yield f"{folder / name}: is not among the export's files, by {path}; move the file away"


def exported_model(export_record: Path) -> Path:
    """Return the folder of an export, named by the record's content; UserError where files differ from the record.

    Sizes are compared, and hashes of files up to 16 MB; `stagecoach lineage` compares all.
    """
    paths = StagePaths(export_record.parents[1])
    record = read_record(export_record, ExportRecord)
    folder = paths.exported(record["content"])
    if folder.is_dir():
        check_readable(folder)
    if (folder / MEGATRON).exists():
        raise UserError(
            f"{folder}: links to Megatron weights, which no stage starts from any more; delete "
            f"{export_record}, and {EXPORTS}"
        )
    if problems := [*of_export(paths, HASHED_BYTES)]:
        raise UserError("\n".join(problems))
    if not folder.is_dir():
        raise UserError(f"{folder}: is missing, by {export_record}; delete the record, and {EXPORTS}")
    return folder
