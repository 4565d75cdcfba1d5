"""Check a stage before it trains: its parent's gate, rows, disk, weights, chat format, row lengths and reward.

Rows have been held against their contract before (scripts.data.check).
"""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from pathlib import Path
from typing import Annotated, Any

from scripts.backends.by_name import backend_of
from scripts.backends.tokens import remarks_on, text_of_rows, without_torch
from scripts.errors import LongError, UserError, warn
from scripts.evaluate.gate import words_of_stop
from scripts.files import amount, check_readable, read_json, write_json
from scripts.finding import Check, Effort, Finding, Moment, ask, refusal_of
from scripts.model.finite import refuse_export
from scripts.model.hugging_face import check_model, tensors_of
from scripts.model.lengths import LengthsOf, tokenizer_at_hand
from scripts.model.shape import fresh_parameters
from scripts.program import run_command_line
from scripts.recipe.blend import Blend
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
from scripts.stage.candidate import Candidate
from scripts.stage.consistency import check_splits, exported_model
from scripts.stage.probe import sample_rows, try_rewards
from scripts.stage.stage import Name, Results, Stage, stage_of
from scripts.train.arrived import check_arrival, reading_of
from scripts.train.shown import Shown, ShownOf

SHOWN = 10
SHOWN_ROWS = 3


@dataclass(frozen=True)
class WithRows(Candidate):
    """A candidate with its rows."""

    @property
    def blend(self) -> Blend:
        """The blend of its rows."""
        return self.stage.recipe.blends[self.stage.settings.blend]

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        """The chat format of the training; None where not known yet."""
        return backend_of(self.stage.settings.made_by).chat_format(self.stage)

    @cached_property
    def reading(self) -> Reading | None:
        """How rows are given to the chat template; None where not known."""
        return reading_of(self.stage, self.chat_format)

    @cached_property
    def shown(self) -> Shown:
        """The first rows, or why no row can be shown; UserError where the trainer would refuse a row."""
        return measured(self.stage.train_split, ShownOf(self.stage, self.chat_format, SHOWN_ROWS))


def check_stage(stage: Stage, site: Site | None = None, python: str = sys.executable) -> dict[str, Any]:
    """Check a stage and return the checked facts as a small deterministic record; print warnings.

    `python` trains the stage. UserError names all findings of one effort that stop the stage, least effort first.
    """
    pin_date(stage.recipe.model.template_date)
    blend = stage.recipe.blends.get(stage.settings.blend)
    checks = backend_of(stage.settings.made_by).checks()
    if blend is None:
        candidate = Candidate(stage, site, python)
        _ask_all([*OF_STARTS, *checks], candidate)
        return {"stage": stage.name, "max_num_steps": stage.planned}
    candidate = WithRows(stage, site, python)
    before, after = (BEFORE_LINES, AFTER_LINES) if stage.settings.blend in stage.recipe.split_here else ([], [])
    _ask_all([*OF_STARTS, *OF_SPLITS, *before, *checks, *OF_ROWS, *after, *OF_ANSWERS], candidate)
    settings = stage.settings
    record = {
        "stage": stage.name,
        "train_rows": stage.rows,
        "rows_per_step": settings.rows_per_step,
        "max_num_steps": stage.planned,
        "epochs": math.ceil(stage.planned * settings.rows_per_step / stage.rows),
        "tokens": None,
    }
    return record | candidate.noted


def _ask_all(checks: Iterable[Check[Any]], candidate: Candidate) -> None:
    """Ask the checks of a preflight, print warnings, and raise UserError with all findings that stop the stage."""
    for finding in ask(checks, candidate, [Moment.PREFLIGHT]):
        candidate.found.append(finding)
        if not finding.stops:
            warn(finding.line)
    stopping = [finding.message for finding in candidate.found if finding.stops]
    if stopping:
        raise LongError(f"stage {candidate.name} is not ready to train:\n  " + "\n  ".join(stopping))


def check_gates(candidate: Candidate) -> Iterator[Finding]:
    """Find a start whose gate stops its descendants."""
    stage = candidate.stage
    for start in stage.node.starts:
        stopped = words_of_stop(stage.paths.sibling(start.name)) if start.trained else None
        if stopped:
            yield candidate.stops(stopped)


def check_rows_of_step(candidate: Candidate) -> Iterator[Finding]:
    """Find fewer rows than those of one step."""
    stage, least = candidate.stage, candidate.stage.settings.rows_per_step
    if stage.blend and stage.rows < least:
        yield candidate.stops(
            f"{stage.manifest}: {stage.rows} training rows are fewer than the {least} of one step; lower "
            f"stages.{stage.name}'s batch or its blend's holdout"
        )


def check_disk(candidate: Candidate) -> Iterator[Finding]:
    """Find too little room for the stage's checkpoints."""
    lacking = shortage(candidate.stage)
    if lacking is not None:
        yield candidate.stops(lacking)


def check_weights(candidate: Candidate) -> Iterator[Finding]:
    """Find starts that are unreadable, no whole model, or with weights that are no numbers."""
    return refusal_of(_check_weights, candidate.stage, about=candidate.name)


def _check_weights(stage: Stage) -> None:
    """Raise UserError for the first of these."""
    if stage.parent_export is not None and stage.parent_export.exists():
        check_readable(stage.parent_export)
        check_handover(stage)
    check_starts(stage)


def check_content(candidate: Candidate) -> Iterator[Finding]:
    """Find splits with another content than the manifest's."""
    return refusal_of(check_splits, candidate.stage.manifest, about=candidate.name)


def check_memory(candidate: Candidate) -> Iterator[Finding]:
    """Find stages, of this one and the descendants, too large for the site's memory."""
    stage, site = candidate.stage, candidate.site
    if site is None:
        return
    for node in stage.recipe.graph.descendants(stage.node):
        descendant = replace(stage, name=node.name)
        says, fits = backend_of(descendant.settings.made_by).memory(descendant, site)
        if not fits:
            yield Finding(says, stops=fits is False and site.refuse_over_memory)


def check_format(candidate: WithRows) -> Iterator[Finding]:
    """Find a difference from the parent's chat format."""
    for says in changes_of_format(candidate.stage, candidate.chat_format):
        yield candidate.stops(says)


def check_shown(candidate: WithRows) -> Iterator[Finding]:
    """Find first rows that the trainer would refuse, and pass on the backend's remarks."""
    try:
        remarks = remarks_on(candidate.shown.rows)
    except UserError as error:
        yield candidate.stops(str(error))
        return
    for says in remarks:
        yield candidate.warns(says)


def check_order(candidate: WithRows) -> Iterator[Finding]:
    """Find rows that change along the file, with the settings that help; print the number of held-out rows."""
    stage, blend = candidate.stage, candidate.blend
    held_out = read_record(stage.manifest, Manifest)["validation"].get("rows")
    if stage.rows is not None and held_out is not None:
        print(f"{stage.name}: {stage.rows:,} rows to train on, {held_out:,} held out", file=sys.stderr)
    said = []
    drifts = measured(stage.train_split, DriftsOf(stage.validation_split))
    found = drifts.between if blend.split_by is None else None
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
        yield candidate.warns(f"{stage.train_split}: {'; '.join(said)}")


def _may_run_answers(stage: Stage) -> bool:
    """Whether rows may be of tasks whose scorers evaluate answers, as far as the manifest tells."""
    names = read_record(stage.manifest, Manifest)["train"].get("environments")
    return names is None or any(name.startswith("reasoning_gym") for name in names)


def check_scorers(candidate: WithRows) -> Iterator[Finding]:
    """Find tasks with scorers that run a policy's answers as code, and note the number of rows."""
    stage = candidate.stage
    if not _may_run_answers(stage):
        return
    facts = measured(stage.train_split, _facts_of(stage), default_workers())
    counts = Counter(facts.tasks)
    if counts:
        candidate.noted["evaluated_answers"] = dict(sorted(counts.items()))
        tasks = ", ".join(f"{task} ({rows})" for task, rows in sorted(counts.items()))
        yield candidate.warns(
            f"{stage.train_split}: {counts.total()} rows have scorers that run a policy's answers as code: {tasks}; "
            "a server started here is confined, without network (SECURITY.md)"
        )


def show_rows(candidate: WithRows) -> Iterator[Finding]:
    """Print and note the first rows, or why there are none."""
    stage, shown = candidate.stage, candidate.shown
    if shown.reason is not None:
        candidate.noted["rows_not_shown"] = shown.reason
        print(f"{stage.name}: rows are not shown: {shown.reason}", file=sys.stderr)
    else:
        candidate.noted["rows"] = shown.rows
        print(text_of_rows(shown.rows, str(stage.train_split), coloured=False), file=sys.stderr)
    yield from ()


def check_reward(candidate: WithRows) -> Iterator[Finding]:
    """Find wrong answers with the reward of the expected one, in sampled rows; note the rewards."""
    stage, probe = candidate.stage, getattr(candidate.stage.settings, "probe", None)
    if not probe:
        return
    samples = sample_rows(stage.train_split, probe.rows, frozenset(candidate.blend.allow))
    candidate.noted["reward_probe"], paid = try_rewards(samples, probe)
    if paid and probe.action == "stop":
        yield candidate.stops("its reward cannot be trained on:\n    " + "\n    ".join(paid))
        return
    for says in paid:
        yield candidate.warns(f"reward probe: {says}")


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


def measure_splits(candidate: WithRows) -> Iterator[Finding]:
    """Measure together what the checks of a stage ask of its splits and no record tells; each split is read once.

    Nothing is found here. A measure that fails, fails again with its message in the check behind it.
    """
    stage, blend = candidate.stage, candidate.blend
    asked = backend_of(stage.settings.made_by).measures(stage)
    if _may_run_answers(stage):
        asked.append((stage.train_split, _facts_of(stage)))
    if lengths := _lengths_of(stage, candidate.chat_format):
        asked += [(stage.train_split, lengths), (stage.validation_split, lengths)]
    if candidate.reading is not None:
        asked.append((stage.train_split, ArrivalOf(candidate.reading)))
    if probe := getattr(stage.settings, "probe", None):
        asked.append((stage.train_split, SamplesOf(probe.rows, frozenset(blend.allow))))
    for split in (stage.train_split, stage.validation_split):
        measures = [measure for path, measure in asked if path == split]
        without_torch(measure_together, split, measures, default_workers())
    yield from ()


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


def check_lengths(candidate: WithRows) -> Iterator[Finding]:
    """Find rows that are too long or hold special tokens, and too large a share of long rows.

    Note the row lengths of each split, in tokens; nothing where no tokenizer is at hand.
    """
    stage, limit = candidate.stage, candidate.stage.config.longest_row
    lengths = _lengths_of(stage, candidate.chat_format)
    if lengths is None:
        return
    candidate.noted["tokens"] = described = {"limit": limit}
    for split, path in (("train", stage.train_split), ("validation", stage.validation_split)):
        found = measured(path, lengths, default_workers())
        described[split] = found.describe()
        lost = f", and {found.answers_cut} keep nothing of their answer" if found.answers_cut else ""
        too_long = [f"line {line}: {tokens}" for line, tokens in found.too_long]
        special = [f"line {line}" for line in found.special]
        marks = (
            (f"have more than {limit} tokens{lost} (docs/traps.md, trap 32)", found.long, too_long),
            ("hold texts that the tokenizer takes for special tokens", found.with_special, special),
        )
        for mark, count, rows in marks:
            if count:
                first = ", ".join(rows[:SHOWN]) + (", ..." if count > SHOWN else "")
                yield candidate.warns(f"{path}: {count} of {found.rows} rows {mark}: {first}")
        if split == "train" and found.share > stage.settings.max_truncated_share:
            lost = f"; {found.answers_cut} of them would keep nothing of their answer" if found.answers_cut else ""
            yield candidate.stops(
                f"{path}: {found.long} of {found.rows} rows ({found.share:.1%}) have more than the {limit} "
                f"tokens that the stage reads of a row, the longest {found.longest}{lost}; raise "
                f"policy.max_total_sequence_length of stages.{stage.name}, leave long rows out of the blend, or allow "
                f"a larger share by its max_truncated_share (now {stage.settings.max_truncated_share:g})"
            )


def check_texts(candidate: WithRows) -> Iterator[Finding]:
    """Find texts of rows that do not reach the model; note the shares."""
    if candidate.reading is not None:
        yield from check_arrival(candidate, candidate.reading)


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


OF_STARTS = [
    Check(Moment.PREFLIGHT, check_gates, Effort.RECORDS),
    Check(Moment.PREFLIGHT, check_rows_of_step, Effort.RECORDS),
    Check(Moment.PREFLIGHT, check_disk, Effort.RECORDS),
    Check(Moment.PREFLIGHT, check_weights, Effort.WEIGHTS),
]
"""Of every stage, before its rows are read."""
OF_SPLITS = [Check(Moment.PREFLIGHT, check_content)]
BEFORE_LINES = [Check(Moment.PREFLIGHT, measure_splits)]
"""Of splits in JSON lines, before the backend's checks."""
OF_ROWS = [
    Check(Moment.PREFLIGHT, check_memory),
    Check(Moment.PREFLIGHT, check_format),
    Check(Moment.PREFLIGHT, check_shown),
]
AFTER_LINES = [
    Check(Moment.PREFLIGHT, check_lengths),
    Check(Moment.PREFLIGHT, check_texts),
    Check(Moment.PREFLIGHT, check_order, Effort.ANSWERS),
]
"""Of splits in JSON lines, after the backend's checks."""
OF_ANSWERS = [
    Check(Moment.PREFLIGHT, check_scorers, Effort.ANSWERS),
    Check(Moment.PREFLIGHT, show_rows, Effort.ANSWERS),
    Check(Moment.PREFLIGHT, check_reward, Effort.ANSWERS),
]


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
