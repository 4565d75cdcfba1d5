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
    """An entry of edits.yaml, which says what the fields mean. Dry run, plan, status and budget expect the same to train."""

    edit: str
    why: str
    trains: frozenset[str] = frozenset()
    is_trained: bool = False
    replace: tuple[str, ...] = ()
    append: str = ""
    delete: tuple[str, ...] = ()
    do: str = ""

    def apply(self, workflow: Any) -> None:
        """Make the edit to a tree."""
        if self.replace:
            workflow.edit(*self.replace)
        if self.append:
            recipe = workflow.root / "config/recipes/short.yaml"
            recipe.write_text(f"{recipe.read_text().rstrip()}\n{self.append}\n")
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


DEEDS: dict[str, Callable[[Any], None]] = {
    "touch": _touch,
    "change_row": _change_row,
    "bump_revision": _bump_revision,
    "comments": _comments,
    "move": _move,
}
EDITS = [
    Edit(**entry | {"trains": frozenset(entry.get("trains", ()))})
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
]


def document() -> str:
    """The table for people."""
    lines = [
        "# What trains again after which edit",
        "",
        "The chain is `sft`, and from it both `rlvr1` and `rlhf`; the chain has run once. Each edit is made to a copy, and",
        "`snakemake` is asked for all checkpoints. *Planned* are the stages that train by the dry run, `stagecoach plan`,",
        "`stagecoach status` and the site's budget, *trains* the stages really trained. A test checks every row",
        "(`tests/workflow/test_edits.py`, which also makes the table: `python -m tests.workflow.edits`). `make test` asks",
        "for the plan after some edits, and `make long` after the rest. Snakemake really runs after an edit that trains nothing",
        "in `make slow`, after one that trains a stage in `make long`, and after all of them with `STAGECOACH_ALL_EDITS=1`.",
        "",
        "| edit | planned | trains | why |",
        "| --- | --- | --- | --- |",
    ]
    for edit in EDITS:
        trains = ", ".join(sorted(edit.trains)) or "nothing"
        lines.append(f"| {edit.edit} | {trains} | {trains} | {edit.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
