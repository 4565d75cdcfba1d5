"""Check a stage before it trains: its parent's gate, rows, disk, weights, chat format, row lengths and reward.

Rows have been held against their contract before (scripts.data.check).
"""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Annotated, Any

from scripts.backends.by_name import backend_of
from scripts.backends.tokens import text_of_rows, warn_of_rows, without_torch
from scripts.errors import LongError, UserError, warn
from scripts.evaluate.gate import words_of_stop
from scripts.files import amount, check_readable, read_json, write_json
from scripts.model.finite import refuse_export
from scripts.model.hugging_face import check_model, tensors_of
from scripts.model.lengths import LengthsOf, tokenizer_at_hand
from scripts.model.shape import fresh_parameters
from scripts.program import run_command_line
from scripts.recipe.load import load_site
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.recipe.site import Site
from scripts.recipe.stage_settings import Checkpointing
from scripts.recipe.stop_when import StopWhen
from scripts.records import CheckpointRecord, Manifest, read_if_there, read_record
from scripts.rewards.row_facts import FactsOf, SamplesOf
from scripts.rows.arrival import ArrivalOf, Reading
from scripts.rows.chat_format import ChatFormat, pin_date
from scripts.rows.drift import PARTS, DriftsOf
from scripts.rows.measures import measure_together, measured
from scripts.rows.parallel import default_workers
from scripts.stage.consistency import check_splits, exported_model
from scripts.stage.probe import report, sample_rows, try_rewards
from scripts.stage.stage import Name, Results, Stage, stage_of
from scripts.train.arrived import check_arrival, reading_of
from scripts.train.shown import ShownOf

SHOWN = 10
SHOWN_ROWS = 3


def check_stage(stage: Stage, site: Site | None = None, python: str = sys.executable) -> dict[str, Any]:
    """Check a stage and return the checked facts as a small deterministic record; print warnings.

    `python` trains the stage. Raise UserError with every problem; problems told by small records come first, before
    anything large is read.
    """
    settings, blend = stage.settings, stage.recipe.blends.get(stage.settings.blend)
    _refuse(stage, list(_known_problems(stage)))
    if stage.parent_export is not None and stage.parent_export.exists():
        check_readable(stage.parent_export)
        check_handover(stage)
    check_starts(stage)
    pin_date(stage.recipe.model.template_date)
    problems, backend = [], backend_of(settings.made_by)
    if blend is None:
        _refuse(stage, backend.preflight(stage, site, python))
        return {"stage": stage.name, "max_num_steps": stage.planned}
    try:
        check_splits(stage.manifest)
    except UserError as error:
        problems.append(str(error))
    chat_format = backend.chat_format(stage)
    reading = reading_of(stage, chat_format) if blend.format == "jsonl" else None
    if blend.format == "jsonl":
        _measure(stage, chat_format, reading)
    problems += (_memory_problems(stage, site) if site else []) + backend.preflight(stage, site, python)
    problems += changes_of_format(stage, chat_format)
    try:
        shown = measured(stage.train_split, ShownOf(stage, chat_format, SHOWN_ROWS))
        warn_of_rows(stage.name, shown.rows)
    except UserError as error:
        problems.append(str(error))
    tokens = _token_lengths(stage, chat_format, problems) if blend.format == "jsonl" else None
    arrival = check_arrival(stage, reading, problems) if reading is not None else None
    _refuse(stage, problems)
    if blend.format == "jsonl":
        _warn_of_order(stage)
    record = {
        "stage": stage.name,
        "train_rows": stage.rows,
        "rows_per_step": settings.rows_per_step,
        "max_num_steps": stage.planned,
        "epochs": math.ceil(stage.planned * settings.rows_per_step / stage.rows),
        "tokens": tokens,
    }
    if arrival is not None:
        record["arrival"] = arrival
    if evaluated := _evaluated(stage):
        record["evaluated_answers"] = evaluated
    if shown.reason is not None:
        record["rows_not_shown"] = shown.reason
        print(f"{stage.name}: rows are not shown: {shown.reason}", file=sys.stderr)
    else:
        record["rows"] = shown.rows
        print(text_of_rows(shown.rows, str(stage.train_split), coloured=False), file=sys.stderr)
    if probe := getattr(settings, "probe", None):
        samples = sample_rows(stage.train_split, probe.rows, frozenset(blend.allow))
        record["reward_probe"], faults = try_rewards(samples, probe)
        report(stage.name, faults, probe.action)
    if tried := backend.try_batch(stage, site, python):
        record["batch"] = tried
    return record


def _memory_problems(stage: Stage, site: Site) -> list[str]:
    """Return the stages, of this and its descendants, that cannot fit the site; warn of those that may not."""
    problems = []
    for node in stage.recipe.graph.descendants(stage.node):
        descendant = replace(stage, name=node.name)
        says, fits = backend_of(descendant.settings.made_by).memory(descendant, site)
        if fits is False and site.refuse_over_memory:
            problems.append(says)
        elif not fits:
            warn(says)
    return problems


def _warn_of_order(stage: Stage) -> None:
    """Say how many rows are held out; warn of a file whose rows change along the way, with the settings that help."""
    blend = stage.recipe.blends[stage.settings.blend]
    held_out = read_record(stage.manifest, Manifest)["validation"].get("rows")
    if stage.rows is not None and held_out is not None:
        print(f"{stage.name}: {stage.rows:,} rows to train on, {held_out:,} held out", file=sys.stderr)
    said = []
    drifts = measured(stage.train_split, DriftsOf(stage.validation_split))
    found = drifts.between if blend.holdout_by is None else None
    if found is not None:
        words = found.words("the held-out rows", "the rows to train on")
        remedy = f"set blends.{stage.settings.blend}.holdout_by: random"
        said.append(f"held-out rows are unlike the rows to train on ({words}); {remedy}")
    found = None if stage.settings.shuffles_rows else drifts.along
    if found is not None:
        words = found.words(f"part {found.part + 1} of {PARTS}", "the other parts")
        remedy = f"set data.shuffle: true of stages.{stage.name}"
        said.append(f"the rows to train on change along the file ({words}); {remedy}")
    if said:
        warn(f"{stage.name}: {stage.train_split}: {'; '.join(said)}")


def _may_run_answers(stage: Stage) -> bool:
    """Whether rows may be of tasks whose scorers evaluate answers, as far as the manifest tells."""
    names = read_record(stage.manifest, Manifest)["train"].get("environments")
    return names is None or any(name.startswith("reasoning_gym") for name in names)


def _evaluated(stage: Stage) -> dict[str, int]:
    """Count the rows by task whose scorers evaluate a policy's answers, with a warning."""
    if not _may_run_answers(stage):
        return {}
    facts = measured(stage.train_split, _facts_of(stage), default_workers())
    counts = Counter(facts.tasks)
    if counts:
        tasks = ", ".join(f"{task} ({rows})" for task, rows in sorted(counts.items()))
        warn(
            f"{stage.name}: {stage.train_split}: {counts.total()} rows have scorers that run a policy's answers as "
            f"code: {tasks}; a server started here is confined, without network (SECURITY.md)"
        )
    return dict(sorted(counts.items()))


def _known_problems(stage: Stage) -> Iterator[str]:
    """Yield the problems that records tell: a start's gate, too few rows, too little room on the disk."""
    for start in stage.node.starts:
        stopped = words_of_stop(stage.paths.sibling(start.name)) if start.trained else None
        if stopped:
            yield stopped
    if stage.blend and stage.rows < (least := stage.settings.rows_per_step):
        yield (
            f"{stage.manifest}: {stage.rows} training rows are fewer than the {least} of one step; lower "
            f"stages.{stage.name}'s batch or its blend's holdout"
        )
    if lacking := shortage(stage):
        yield lacking


def _refuse(stage: Stage, problems: list[str]) -> None:
    if problems:
        raise LongError(f"stage {stage.name} is not ready to train:\n  " + "\n  ".join(problems))


def check_handover(stage: Stage) -> None:
    """Raise UserError where another backend's export is not a whole model of the shape that the parent started from."""
    for foreign in stage.node.foreign:
        start = replace(stage, name=foreign.name).parent_export or getattr(stage.recipe.model, "folder", None)
        check_model(exported_model(stage.parent_export_record), like=start if start and start.is_dir() else None)


def check_starts(stage: Stage) -> None:
    """Raise UserError where weights of a start are no numbers.

    An export is looked at when it is made; here are those of earlier commits, and those that came from elsewhere.
    """
    starts = {"the start": stage.parent_export} | stage.role_exports
    for role, export in starts.items():
        if export is not None and export.is_dir():
            folder = export.resolve()
            refuse_export(folder, f"stage {stage.name}: {role} ({folder})", "Train or fetch it again")


def changes_of_format(stage: Stage, trained: ChatFormat | None) -> list[str]:
    """Return in a line how a stage's chat format differs from its parent's; nothing where the recipe allows it."""
    if stage.settings.template_change:
        return []
    parent = stage.parent
    # without an export to start from, the parent trained with the tokenizer that it published
    before = parent and backend_of(parent.settings.made_by).chat_format(parent)
    if before is None and stage.parent_export is not None and stage.parent_export.exists():
        before = ChatFormat.of(stage.parent_export)
    if before is None or trained is None or not (changes := before.changes(trained)):
        return []
    start = f"its parent {parent.name} trained" if parent else "the model is made"
    return [
        f"it would train otherwise than {start}: {'; '.join(changes)}. What learnt one and is asked in another answers "
        f"worse, and nothing says why; keep the parent's, or say template_change: true of stages.{stage.name}"
    ]


def _measure(stage: Stage, chat_format: ChatFormat | None, reading: Reading | None) -> None:
    """Measure together what the checks of a stage ask of its splits and no record tells; each split is read once.

    What fails here fails again, with its message, where a check asks for it.
    """
    blend = stage.recipe.blends[stage.settings.blend]
    asked = backend_of(stage.settings.made_by).measures(stage)
    if _may_run_answers(stage):
        asked.append((stage.train_split, _facts_of(stage)))
    if lengths := _lengths_of(stage, chat_format):
        asked += [(stage.train_split, lengths), (stage.validation_split, lengths)]
    if reading is not None:
        asked.append((stage.train_split, ArrivalOf(reading)))
    if probe := getattr(stage.settings, "probe", None):
        asked.append((stage.train_split, SamplesOf(probe.rows, frozenset(blend.allow))))
    for split in (stage.train_split, stage.validation_split):
        measures = [measure for path, measure in asked if path == split]
        without_torch(measure_together, split, measures, default_workers())


def _facts_of(stage: Stage) -> FactsOf:
    """Return the measure of what a stage's rows say of their rewards."""
    blend = stage.recipe.blends[stage.settings.blend]
    return FactsOf(blend.kind, frozenset(blend.allow))


def _lengths_of(stage: Stage, chat_format: ChatFormat | None) -> LengthsOf | None:
    """Return the measure of a stage's row lengths; None where no tokenizer is at hand."""
    exported = stage.parent_export
    is_there = exported is not None and (exported / "tokenizer.json").is_file()
    tokenizer = str(exported / "tokenizer.json") if is_there else tokenizer_at_hand(stage.recipe.model)
    if tokenizer is None:
        return None
    kind = stage.recipe.blends[stage.settings.blend].kind
    template = chat_format.chat_template if chat_format else None
    return LengthsOf.by(kind, tokenizer, stage.config.longest_row, template)


def _token_lengths(stage: Stage, chat_format: ChatFormat | None, problems: list[str]) -> dict[str, Any] | None:
    """Describe the row lengths of each split, in tokens; None where no tokenizer is at hand.

    Print the number and the first rows that are too long or hold special tokens; add a problem for too large a share of
    long rows.
    """
    name, limit, lengths = stage.name, stage.config.longest_row, _lengths_of(stage, chat_format)
    if lengths is None:
        return None
    described: dict[str, Any] = {"limit": limit}
    for split, path in (("train", stage.train_split), ("validation", stage.validation_split)):
        found = measured(path, lengths, default_workers())
        described[split] = found.describe()
        lost = f", and {found.answers_cut} keep nothing of their answer" if found.answers_cut else ""
        too_long = [f"line {line}: {tokens}" for line, tokens in found.too_long]
        special = [f"line {line}" for line in found.special]
        faults = (
            (f"have more than {limit} tokens{lost} (docs/traps.md, trap 32)", found.long, too_long),
            ("hold texts that the tokenizer takes for special tokens", found.with_special, special),
        )
        for fault, count, rows in faults:
            if count:
                first = ", ".join(rows[:SHOWN]) + (", ..." if count > SHOWN else "")
                warn(f"{name}: {path}: {count} of {found.rows} rows {fault}: {first}")
        if split == "train" and found.share > stage.settings.max_truncated_share:
            lost = f"; {found.answers_cut} of them would keep nothing of their answer" if found.answers_cut else ""
            problems.append(
                f"{path}: {found.long} of {found.rows} rows ({found.share:.1%}) have more than the {limit} "
                f"tokens that the stage reads of a row, the longest {found.longest}{lost}; raise "
                f"policy.max_total_sequence_length of stages.{name}, leave long rows out of the blend, or allow a "
                f"larger share by its max_truncated_share (now {stage.settings.max_truncated_share:g})"
            )
    return described


def checkpoint_bytes(stage: Stage) -> int:
    """Return the bytes of one checkpoint: as the parent's, or the parameters and AdamW's two moments in float32.

    A pretrained model of NeMo-RL takes 14 bytes a parameter: 2 for weights in bfloat16, 12 for the optimizer. 0: not
    known, as for adapters.
    """
    if getattr(getattr(stage.config, "policy", None), "lora", None) is not None:
        return 0
    for parent in stage.parents:
        files = read_record(parent.paths.record, CheckpointRecord)["files"]
        return sum(described["bytes"] for described in files.values())
    if stage.parent_export is not None:
        return 3 * 4 * sum(math.prod(shape) for _, shape in tensors_of(stage.parent_export).values())
    return _first_bytes(stage.recipe.model)


@singledispatch
def _first_bytes(model: PretrainedModel) -> int:
    """Return the bytes of a checkpoint of NeMo-RL's that starts from a model; 0 where no index tells its size."""
    index = Path(model.name, "model.safetensors.index.json")
    return 7 * read_json(index)["metadata"]["total_size"] if index.is_file() else 0


@_first_bytes.register
def _fresh_bytes(model: RandomModel) -> int:
    """Return the bytes of a checkpoint of a model made here."""
    return 3 * 4 * fresh_parameters(model)


def checkpoints_at_once(checkpointing: Checkpointing, planned: int, stopping: StopWhen | None = None) -> int:
    """Return the most checkpoints on the disk at one moment: the kept, and one being saved.

    A stage that may end early saves one at each measurement, and keeps the best.
    """
    taken = math.ceil(planned / checkpointing.save_period)
    if stopping is not None:
        taken += planned // stopping.val_period
    if checkpointing.keep_last_k is None:
        return taken
    best = 0 if stopping is None else 1
    kept = checkpointing.keep_last_k + checkpointing.keep_top_k + len(checkpointing.keep_steps) + best
    return min(taken, kept + 1)


def shortage(stage: Stage) -> str | None:
    """Say with sizes why a stage's checkpoints do not fit on the store's disk; None where they fit.

    Checkpoints of the same config and data are there already and need no room.
    """
    training = stage.last_training
    each = checkpoint_bytes(stage)
    most = checkpoints_at_once(stage.settings.checkpointing, stage.planned, stage.config.stopping)
    held, splits = training.identity_record, read_if_there(stage.manifest, Manifest)
    now = stage.config.content, splits["train"]["sha256"] if splits else None
    is_ours = held is not None and (held["config"], held["train_split"]) == now  # its parent may not be exported yet
    needed = each * max(0, most - (len(training.checkpoints) if is_ours else 0))
    free = shutil.disk_usage(next(folder for folder in training.path.parents if folder.exists())).free
    if needed <= free:
        return None
    return (
        f"{training.path}: {most} checkpoints of {amount(each)} need {amount(needed)}, but {amount(free)} are free; "
        "make room, or keep fewer (checkpointing.keep_last_k, save_period)"
    )


def main(
    recipe: Path,
    results: Results,
    stage: Name,
    output: Annotated[Path, "preflight.json"],
    site: Annotated[Path | None, "the site of the training"] = None,
    python: Annotated[str, "the Python of the training (default: the current)"] = sys.executable,
) -> None:
    """Check a stage, and write the findings."""
    checked = stage_of(recipe, results, stage)
    write_json(output, check_stage(checked, load_site(site, checked.recipe) if site else None, python))


if __name__ == "__main__":
    run_command_line(main)
