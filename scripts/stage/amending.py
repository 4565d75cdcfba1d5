"""Amend a stage: let it go on from a training of other settings, pins or environments' files; or undo that."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

from scripts.credentials import credential_in
from scripts.errors import UserError
from scripts.files import write_json
from scripts.records import Amendment
from scripts.stage.amendment import Difference, amended, amendments_of, difference_of, start_in
from scripts.stage.owner import hold
from scripts.stage.paths import STORE
from scripts.stage.rundir import Checkpoint
from scripts.stage.stage import Stage
from scripts.stage.store import check_owners, identity_of
from scripts.stage.training_folder import TrainingFolder


@dataclass(frozen=True)
class Start:
    """A training to go on from, its newest checkpoint, and how it differs from the stage of today."""

    training: TrainingFolder
    checkpoint: Checkpoint
    difference: Difference


def amend(stage: Stage, because: str, group: str | None = None) -> Amendment:
    """Let a stage go on from the newest checkpoint of its earlier training, and return the amendment.

    A second call changes nothing, and finishes what a kill of the first left. `group` is the site's, whose members'
    files are trusted. UserError where nothing may be gone on from, or a process trains there.
    """
    reason = " ".join(because.split())
    if not reason:
        raise UserError("--because: give the reason in words; it stands in the checkpoint's record and the model card")
    if found := credential_in(reason):
        raise UserError(f"--because: holds a credential ({found}), and it stands in records; leave it out")
    known = stage.amendment
    if known is None:
        known = _note(stage, reason, group)
    with replace(stage).opened():
        return known


def undo(stage: Stage) -> Amendment:
    """Remove the amendment that is for a stage's facts of today, and return it; its training stays in the store."""
    found = stage.amendment
    if found is None:
        raise UserError(f"{stage.name}: is not amended as it is now")
    left = [each for each in amendments_of(stage.paths) if each != found]
    if left:
        write_json(stage.paths.amended, {"amendments": left})
    else:
        stage.paths.amended.unlink()
    return found


def _note(stage: Stage, because: str, group: str | None) -> Amendment:
    """Find the training to go on from, check it, and list its amendment."""
    start = _start_of(stage)
    training, step = start.training, start.checkpoint.step
    is_writable = os.access(training.path, os.W_OK)
    with hold(training.owner_file) if is_writable else nullcontext():
        check_owners(training, group)
        if start.checkpoint.is_elsewhere:
            raise UserError(
                f"{start.checkpoint.path}: its files are in the remote store alone; stagecoach store fetch {stage.name}"
            )
        if damage := start.checkpoint.damage():
            raise UserError(f"{start.checkpoint.path}: {damage}; delete it, and amend from the checkpoint before it")
        origin = {"from": training.identity, "step": step}
        amendment: Amendment = {
            "for": identity_of(stage.own_facts),
            **origin,
            "planned": stage.planned,
            "identity": identity_of(amended(stage.own_facts, origin)),
            "because": because,
            "changed": [*start.difference.changed.values()],
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_json(stage.paths.amended, {"amendments": [*amendments_of(stage.paths), amendment]})
    return amendment


def _start_of(stage: Stage) -> Start:
    """Return the training to go on from: the stage's last one, else the one of the store with most steps."""
    name, last, training = stage.name, stage.last_training, stage.training
    own = training.newest_step
    refused = ""
    if last != training:
        found = _start_in(last, stage)
        if isinstance(found, Start) and found.checkpoint.step > own:
            return found
        refused = found if isinstance(found, str) else ""
    others = [_start_in(each, stage) for each in _trainings(stage)]
    # Another setting is that of a variant or of another run as often as not; a file's text has one author. What the
    # stage was amended from before is its own, whatever it differs in.
    earlier = _origins_of(last)
    starts = [found for found in others if isinstance(found, Start)]
    own_starts = [each for each in starts if each.difference.is_of_environments or each.training.identity in earlier]
    best = max(own_starts, key=lambda each: each.checkpoint.step, default=None)
    if best is not None and best.checkpoint.step > own:
        return best
    if refused:
        raise UserError(f"{name}: {refused}")
    at = f"its own training is at step {own}" if own else "no training differs from it in what may be amended alone"
    raise UserError(f"{name}: there is nothing to amend: {at}")


def _origins_of(training: TrainingFolder) -> set[str]:
    """Return the identities of the trainings that an amended one went on from, whether or not it was undone."""
    found: set[str] = set()
    record = training.identity_record
    while record is not None and "amended" in record:
        identity = record["amended"]["from"]
        if identity in found:
            break
        found.add(identity)
        record = TrainingFolder(training.path.with_name(identity)).identity_record
    return found


def _start_in(training: TrainingFolder, stage: Stage) -> Start | str:
    """Return the training in a folder as one to go on from, or why it is none."""
    difference = difference_of(training, stage.own_facts, stage.config)
    if difference is None:
        return ""
    if difference.others:
        others = "; ".join(difference.others)
        return f"differs from the training in {training.path} in what may not be amended: {others}"
    if not difference.changed:
        return ""
    start = start_in(training, stage.planned)
    if start is None:
        step = training.newest_step
        done = f"has reached step {step} of {stage.planned}, so no step is left" if step else "has no checkpoint"
        return f"the training in {training.path} {done}; the stage trains from the start"
    return Start(training, start, difference)


def _trainings(stage: Stage) -> Iterator[TrainingFolder]:
    """Yield the folders of the store but for the stage's own."""
    own = stage.training
    for record in sorted(((stage.root or stage.results) / STORE).glob("[!.]*/identity.json")):
        training = TrainingFolder(record.parent)
        if training != own:
            yield training
