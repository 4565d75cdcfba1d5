"""Amendments: a training that goes on from an earlier checkpoint under a changed environment's file, pin or setting.

``<stage>/amended.json`` lists them. An amendment is for one set of facts. While the stage has these facts, the fact
`amended` (the training that it goes on from, and the step) is among them, so the stage has another identity than a
training that had the other file, pin or setting from its first step.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError
from scripts.files import (
    canonical_json,
    copy_file,
    filled_by_program,
    link_or_copy,
    replace_directory,
    sha256_text,
    write_text,
)
from scripts.recipe.stage_settings import StageSettings
from scripts.recipe.yaml_file import leaves
from scripts.records import Amendment, Amendments, Facts, RunIdentity, read_if_there, read_lines
from scripts.stage.again import folder_name
from scripts.stage.attempts import Attempt, carried
from scripts.stage.paths import StagePaths
from scripts.stage.progress import Step
from scripts.stage.rundir import Checkpoint
from scripts.stage.store import folder_of, identity_of
from scripts.stage.training_folder import TrainingFolder

FACTS = {
    "train_split": "training split",
    "validation_split": "validation split",
    "parent_export": "parent",
    "continues": "checkpoint to continue",
    "sampled": "generation_config.json of the start, which no longer counts",
    "amended": "amendment",
}
"""The facts of an identity, but for roles and config, in words."""
ENVIRONMENTS = "environments"
"""The key of a config with the hashes of the user's environments."""


@dataclass(frozen=True)
class Difference:
    """How a stage's facts of today differ from those of a training.

    `changed` describes, by dotted key, the settings, pins and environments' files that an amendment may change.
    `others` describes all other differences, with reasons.
    """

    changed: dict[str, str]
    others: tuple[str, ...]

    @property
    def is_amendable(self) -> bool:
        """Whether there are differences, all of which may be amended."""
        return bool(self.changed) and not self.others

    @property
    def is_of_environments(self) -> bool:
        """Whether only files of environments differ."""
        is_file = (key.startswith(f"{ENVIRONMENTS}.") for key in self.changed)
        return self.is_amendable and all(is_file)


def changed_facts(trained: RunIdentity, facts: Facts) -> list[str]:
    """Return in words the facts that differ from a training's, but for the config."""
    changed = [words for fact, words in FACTS.items() if trained.get(fact) != facts.get(fact)]
    before, now = trained.get("roles", {}), facts.get("roles", {})
    return changed + [role for role in sorted(before.keys() | now.keys()) if before.get(role) != now.get(role)]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two configs by dotted key, each with both values."""
    old, new = dict(leaves(dict(before))), dict(leaves(dict(now)))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return {key: (old.get(key), new.get(key)) for key in keys}


def difference_of(training: TrainingFolder, facts: Facts, config: StageSettings) -> Difference | None:
    """Return how a stage's facts (without an amendment) differ from the training in a folder; None without one.

    What the training itself was amended from is no difference.
    """
    trained = training.identity_record
    if trained is None:
        return None
    words = [each for each in changed_facts(trained, facts) if each != FACTS["amended"]]
    if trained["config"] == facts["config"]:
        return Difference({}, tuple(words))
    before, now = training.config_values, config.values()
    if sha256_text(canonical_json(before)) != trained["config"]:
        return Difference({}, (*words, f"{training.config_file}, which is not the config that was trained"))
    # A blend's environments follow from its rows: one that came or went is no file that was edited.
    rewarded = before.get(ENVIRONMENTS, {}).keys() & now.get(ENVIRONMENTS, {}).keys()
    edited = {f"{ENVIRONMENTS}.{name}" for name in rewarded}
    amendable: dict[str, str] = {}
    for key, (old, new) in changed_settings(before, now).items():
        if key in edited:
            amendable[key] = key
            continue
        told = f"{key} {old} -> {new}"
        is_other_environment = key.startswith(f"{ENVIRONMENTS}.")
        reason = "the rows name other environments" if is_other_environment else config.why_not_amended(key)
        if reason:
            words.append(f"{told} ({reason})")
        else:
            amendable[key] = told
    return Difference(amendable, tuple(words))


def amendments_of(paths: StagePaths) -> list[Amendment]:
    """Return the amendments of a stage, oldest first, whether or not they are for its facts of today."""
    return (read_if_there(paths.amended, Amendments) or {"amendments": []})["amendments"]


def amendment_for(paths: StagePaths, facts: Facts) -> Amendment | None:
    """Return the amendment that is for a stage's facts (without an amendment); None without one."""
    identity = identity_of(facts)
    return next((each for each in amendments_of(paths) if each["for"] == identity), None)


def amended(facts: Facts, amendment: Amendment | None) -> Facts:
    """Return the facts with an amendment's."""
    if amendment is None:
        return facts
    return {**facts, "amended": {"from": amendment["from"], "step": amendment["step"]}}


def chain_of(paths: StagePaths, identity: str) -> list[Amendment]:
    """Return the amendments behind an amended identity, oldest first; none for another identity."""
    by_identity = {each["identity"]: each for each in amendments_of(paths)}
    chain: list[Amendment] = []
    while (found := by_identity.pop(identity, None)) is not None:
        chain.insert(0, found)
        identity = found["from"]
    return chain


def words_of_amendments(record: Mapping[str, Any]) -> list[str]:
    """Return each amendment of a checkpoint's record in words, oldest first."""
    return [
        f"at step {each['step']} of {each['planned']}: {', '.join(each['changed'])} changed, because {each['because']}"
        for each in record.get("amended", ())
    ]


def start_in(training: TrainingFolder, planned: int) -> Checkpoint | None:
    """Return the newest checkpoint of a training before the planned step, its content unchecked; None without one.

    A training that reached the planned step has no step left that an amendment could change.
    """
    found = training.checkpoints
    if not found or found[-1].step >= planned:
        return None
    return found[-1]


def link_start(root: Path, paths: StagePaths, training: TrainingFolder, amendment: Amendment) -> None:
    """Let an amended training's folder hold the checkpoints, logs and attempts that it goes on from.

    The caller holds the folder. Nothing is done where it is at the step already. Files are hard links where the file
    system allows, each checkpoint appears by one rename, and the step to go on from comes last. UserError where that
    step is gone or damaged.
    """
    step = amendment["step"]
    if training.read_again().newest_step >= step:
        return
    source = folder_of(root, folder_name(paths, amendment["from"]))
    found = [each for each in source.checkpoints if each.step <= step and not each.is_elsewhere]
    damage = found[-1].damage() if found and found[-1].step == step else "is not there"
    if damage:
        raise UserError(
            f"{source.checkpoint(step).path}: {damage}, and {paths.name} was amended to go on from it; "
            f"stagecoach amend {paths.name} --undo trains from the start"
        )
    _take_logs(source, training, step)
    for checkpoint in found:
        target = training.checkpoint(checkpoint.step).path
        if not target.exists():
            _link_checkpoint(checkpoint.path, target)


def _link_checkpoint(source: Path, target: Path) -> None:
    with replace_directory(target) as fresh:
        for path in sorted(source.rglob("*")):
            place = fresh / path.relative_to(source)
            if path.is_dir():
                place.mkdir()
            else:
                link_or_copy(path, place)


def _take_logs(source: TrainingFolder, training: TrainingFolder, step: int) -> None:
    """Copy what a training logged up to a step, and its attempts, which no longer speak of nodes."""
    logged = [each for each in read_lines(source.log, Step) if each["step"] <= step]
    _write_lines(training.log, logged)
    if source.reach_file.exists():
        with filled_by_program(training.reach_file) as fresh:
            copy_file(source.reach_file, fresh)
        training.forget_beyond(step)
    _write_lines(training.attempts_file, carried(read_lines(source.attempts_file, Attempt), step))


def _write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with a line of JSON for each record."""
    write_text(path, "".join(f"{json.dumps(each)}\n" for each in records))
