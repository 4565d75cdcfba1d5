"""What trains again after which edit. The test runs each; docs/edits.md is made from this: python -m tests.workflow.edits"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.data.source_record import describe_file
from scripts.files import read_json, write_json

DOCUMENT = Path(__file__).parents[2] / "docs/edits.md"


@dataclass(frozen=True)
class Edit:
    """An entry of edits.yaml, which says what the fields mean. All that is asked expects the same of an edit."""

    edit: str
    why: str
    tree: str = "short"
    trains: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()
    scores: frozenset[str] = frozenset()
    samples: frozenset[str] = frozenset()
    is_trained: bool = False
    replace: tuple[str, ...] = ()
    replaces: tuple[tuple[str, str], ...] = ()
    append: str = ""
    delete: tuple[str, ...] = ()
    do: str = ""
    config: tuple[str, ...] = ()

    def apply(self, workflow: Any) -> None:
        """Make the edit to a tree."""
        recipe = f"config/recipes/{self.tree}.yaml"
        if self.replace:
            old, new, *file = self.replace
            workflow.edit(old, new, *(file or [recipe]))
        for old, new in self.replaces:
            workflow.edit(old, new, recipe)
        if self.append:
            path = workflow.root / recipe
            path.write_text(f"{path.read_text().rstrip()}\n{self.append}\n")
        for name in self.delete:
            path = workflow.root / name
            path.unlink() if path.is_symlink() else shutil.rmtree(path.resolve())
        if self.do:
            DEEDS[self.do](workflow)


def _touch(workflow: Any) -> None:
    for path in workflow.results.rglob("*"):
        if path.is_file():
            path.touch()


def _change_row(workflow: Any) -> None:
    path = workflow.results / "data/source/rlhf.jsonl"
    first, rest = path.read_text().split("\n", 1)
    row = json.loads(first)
    row["reference"] += "!"
    path.write_text(json.dumps(row) + "\n" + rest)
    record = read_json(path.with_name("record.json"))
    record["files"][path.name] = describe_file(path)
    write_json(path.with_name("record.json"), record)


def _bump_revision(workflow: Any) -> None:
    path = workflow.results / "data/source/record.json"
    path.write_text(path.read_text().replace('"revision": "synthetic-0"', '"revision": "synthetic-0b"'))


def _comments(workflow: Any) -> None:
    for name in ("scripts/train/run.py", "scripts/backends/trl/train.py", "rules/train.smk"):
        path = workflow.root / name
        path.write_text(path.read_text() + "\n# a comment\n")


def _move(workflow: Any) -> None:
    moved = workflow.root.with_name("moved")
    workflow.root.rename(moved)
    workflow.root, workflow.results = moved, moved / "results/short"


def _replace_model(name: str) -> Callable[[Any], None]:
    def replace(workflow: Any) -> None:
        path = workflow.root / "models" / name / "config.json"
        write_json(path, read_json(path) | {"rms_norm_eps": 1e-5})

    return replace


def _run_elsewhere(workflow: Any) -> None:
    workflow.configure(run="other")


DEEDS: dict[str, Callable[[Any], None]] = {
    "touch": _touch,
    "change_row": _change_row,
    "bump_revision": _bump_revision,
    "comments": _comments,
    "move": _move,
    "replace_base": _replace_model("base"),
    "replace_tutor": _replace_model("tutor"),
    "run_elsewhere": _run_elsewhere,
}
ASKED = ("trains", "may", "scores", "samples")
EDITS = [
    Edit(**entry | {name: frozenset(entry.get(name, ())) for name in ASKED})
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
]


def document() -> str:
    """The table for people."""
    lines = [
        "# What trains again after which edit",
        "",
        "Each edit is made to a copy of a finished chain. The short one is `tests/short.yaml`: `sft`, and from it `rlvr1` and",
        "`rlhf`. The wide one is `tests/workflow/wide.yaml`: a sweep and its best, rows that a model makes, an earlier checkpoint,",
        "adapters, teachers, a training that continues, a merge. The list of jobs, the table below it, `stagecoach plan`,",
        "`stagecoach status` and the site's budget say the same. *Trains* are the stages that train. *May train* is a",
        "prediction: the store may have these trained, once what comes first is made. They count in the budget, so that it",
        "is an upper bound. *Scored* are the held-out scores to come, *sampled* the blends whose responses are.",
        "",
        "A test checks the rows (`tests/workflow/test_edits.py`, which also makes the table:",
        "`python -m tests.workflow.edits`). `make test` asks after some edits, and `make long` after the rest. Snakemake really",
        "runs after an edit that trains nothing in `make slow`, after one that trains a stage in `make long`, and after all of",
        "them with `STAGECOACH_ALL_EDITS=1`.",
        "",
        "| edit | of | trains | may train | scored | sampled | why |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for edit in EDITS:
        asked = [", ".join(sorted(getattr(edit, name))) or "–" for name in ASKED]
        lines.append(f"| {edit.edit} | {edit.tree} | {' | '.join(asked)} | {edit.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
