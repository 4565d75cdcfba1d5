"""What trains again after which edit. The test runs each; docs/edits.md is made from this: python -m tests.workflow.edits"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.data.source_record import describe_file
from scripts.files import read_json, write_json

DOCUMENT = Path(__file__).parents[2] / "docs/edits.md"


@dataclass(frozen=True)
class Edit:
    """An edit of the finished short chain (rlvr1 and rlhf both start from sft) and the stages that then really train.

    `planned` are the stages that dry run, plan, status and budget expect to train where these are more: data made anew
    may turn out the same. `is_trained`: also a short run trains after this edit.
    """

    name: str
    apply: Callable[[Any], None]
    trains: frozenset[str]
    why: str
    is_trained: bool = False
    more: frozenset[str] = frozenset()

    @property
    def planned(self) -> frozenset[str]:
        """The stages that are expected to train."""
        return self.trains | self.more


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


def _edit(old: str, new: str) -> Callable[[Any], None]:
    return lambda workflow: workflow.edit(old, new)


def _append(text: str) -> Callable[[Any], None]:
    def apply(workflow: Any) -> None:
        recipe = workflow.root / "config/recipes/short.yaml"
        recipe.write_text(recipe.read_text().rstrip() + "\n" + text + "\n")

    return apply


def _delete(name: str) -> Callable[[Any], None]:
    return lambda workflow: shutil.rmtree(workflow.root / name)


def _edit_and_forget(old: str, new: str) -> Callable[[Any], None]:
    """Edit, and delete Snakemake's notes: the trigger is a file of its own."""

    def apply(workflow: Any) -> None:
        workflow.edit(old, new)
        shutil.rmtree(workflow.root / ".snakemake")

    return apply


def _delete_export(workflow: Any) -> None:
    hf = workflow.results / "rlvr1/hf"
    shutil.rmtree((hf / "model").resolve().parent)
    shutil.rmtree(hf)


def _unlink(workflow: Any) -> None:
    (workflow.results / "rlvr1/run").unlink()
    shutil.rmtree(workflow.results / "rlvr1/ckpt")


def _delete_training(workflow: Any) -> None:
    shutil.rmtree((workflow.results / "rlvr1/run").resolve())
    shutil.rmtree(workflow.results / "rlvr1")


def _site(workflow: Any) -> None:
    path = workflow.root / "config/sites/laptop.yaml"
    path.write_text(path.read_text().replace("description: This machine", "description: Another machine"))


RLVR1 = "rlvr1: {algorithm: grpo, "
RLHF = "rlhf: {algorithm: grpo, "
EVERYTHING = frozenset({"sft", "rlvr1", "rlhf"})
NOTHING: frozenset[str] = frozenset()

EDITS = (
    Edit("touch every file", _touch, NOTHING, "content counts, not time stamps"),
    Edit(
        "fetch the same data again", _delete("results/short/data/source"), NOTHING, "the splits have the same content"
    ),
    Edit("a new dataset revision under which no row changed", _bump_revision, NOTHING, "a revision is not content"),
    Edit(
        "change one row of blend rlhf", _change_row, frozenset({"rlhf"}), "the split's content is part of its identity"
    ),
    Edit(
        "hold out another row of blend rlvr1",
        _edit("    rows: 80\n    holdout: 20", "    rows: 80\n    holdout: 21"),
        frozenset({"rlvr1"}),
        "the splits' content",
        is_trained=True,
    ),
    Edit(
        "change the source's seed",
        _edit("source: {kind: synthetic", "source: {kind: synthetic, seed: 5"),
        EVERYTHING,
        "every blend's rows",
    ),
    Edit(
        "add a blend that no stage uses",
        _edit("blends:\n", "blends:\n  more: {rows: 30, holdout: 9, environments: [mcqa_simple_agent]}\n"),
        NOTHING,
        "the rows of the used blends are the same",
    ),
    Edit(
        "change lr of rlvr1",
        _edit(RLVR1, RLVR1 + "policy: {optimizer: {lr: 2.0e-3}}, "),
        frozenset({"rlvr1"}),
        "config",
    ),
    Edit(
        "change lr of sft",
        _edit("lr: 1.0e-2", "lr: 1.1e-2"),
        EVERYTHING,
        "config, and the export where rlvr1 and rlhf start",
    ),
    Edit("change the seed of rlvr1", _edit(RLVR1, RLVR1 + "seed: 9, "), frozenset({"rlvr1"}), "config"),
    Edit("change the recipe's seed", _edit("seed: 3", "seed: 4"), EVERYTHING, "config"),
    Edit(
        "train rlvr1 on another blend, and delete .snakemake",
        _edit_and_forget("blend: rlvr1}", "blend: rlhf}"),
        frozenset({"rlvr1"}),
        "the split's content",
    ),
    Edit(
        "start rlhf from rlvr1, and delete .snakemake",
        _edit_and_forget(RLHF + "parent: sft", RLHF + "parent: rlvr1"),
        frozenset({"rlhf"}),
        "the export at the stage's start",
    ),
    Edit(
        "train rlvr1 by SFT",
        _edit(
            "rlvr1: {algorithm: grpo, parent: sft, blend: rlvr1}",
            "rlvr1: {algorithm: sft, parent: sft, blend: sft, sft: {max_num_steps: 3}, policy: {max_total_sequence_length: 64, train_global_batch_size: 4, optimizer: {lr: 1.0e-3}}}",
        ),
        frozenset({"rlvr1"}),
        "config and data",
    ),
    Edit(
        "append a stage after rlhf",
        _append("  last: {algorithm: grpo, parent: rlhf, blend: rlvr1}"),
        frozenset({"last"}),
        "the stages before are unchanged",
    ),
    Edit(
        "add a branch from sft",
        _append("  branch: {algorithm: grpo, parent: sft, blend: rlvr1, seed: 8}"),
        frozenset({"branch"}),
        "rlvr1 and rlhf are unchanged",
    ),
    Edit(
        "remove rlhf",
        _edit(
            "  rlhf: {algorithm: grpo, parent: sft, blend: rlhf, loss_fn: {reference_policy_kl_penalty: 0.01}}\n", ""
        ),
        NOTHING,
        "no stage starts from rlhf; the files stay",
    ),
    Edit(
        "train rlvr1 for more steps",
        _edit(RLVR1, RLVR1 + "grpo: {max_num_steps: 4}, "),
        frozenset({"rlvr1"}),
        "config",
    ),
    Edit(
        "make the model larger",
        _edit("intermediate_size: 64", "intermediate_size: 96"),
        EVERYTHING,
        "config of sft, and its descendants",
    ),
    Edit(
        "change a gate's threshold",
        _edit(
            "    sft: {max_num_steps: 30}",
            "    sft: {max_num_steps: 30}\n    gate: [{metric: held_out_change, min: -1}]",
        ),
        NOTHING,
        "a gate judges, without effect on weights",
    ),
    Edit(
        "change nodes, time limit and memory",
        _edit(
            "checkpointing: {save_period: 1}",
            "checkpointing: {save_period: 1}\n    resources: {nodes: 4, runtime: 240, mem_mb: 9000}",
        ),
        NOTHING,
        "no effect on weights",
    ),
    Edit(
        "change the checkpoints' period and how many are kept",
        _edit("checkpointing: {save_period: 1}", "checkpointing: {save_period: 2, keep_last_k: 3}"),
        NOTHING,
        "no effect on weights",
    ),
    Edit("edit the site's description", _site, NOTHING, "no effect on weights"),
    Edit("edit comments in scripts and rules", _comments, NOTHING, "code is no rerun trigger"),
    Edit("delete .snakemake", _delete(".snakemake"), NOTHING, "identity, not Snakemake's memory, decides"),
    Edit("move the tree", _move, NOTHING, "no path is part of an identity"),
    Edit("delete rlvr1/ckpt", _delete("results/short/rlvr1/ckpt"), NOTHING, "published again from the store"),
    Edit("delete rlvr1/hf and what it links to", _delete_export, NOTHING, "exported again"),
    Edit("delete rlvr1/run and rlvr1/ckpt", _unlink, NOTHING, "published again from the store", is_trained=True),
    Edit("delete rlvr1 and its folder in the store", _delete_training, frozenset({"rlvr1"}), "the weights are gone"),
)


def document() -> str:
    """The table for people."""
    lines = [
        "# What trains again after which edit",
        "",
        "The chain is `sft`, and from it both `rlvr1` and `rlhf`; the chain has run once. Each edit is made to a copy, and",
        "`snakemake` is asked for all checkpoints. *Planned* are the stages that train by the dry run, `stagecoach plan`,",
        "`stagecoach status` and the site's budget, *trains* the stages really trained. A test checks every row",
        "(`tests/workflow/test_edits.py`, which also makes the table: `python -m tests.workflow.edits`). `make test` trains",
        "after some edits and asks for the plan after all; `STAGECOACH_ALL_EDITS=1` trains after all.",
        "",
        "| edit | planned | trains | why |",
        "| --- | --- | --- | --- |",
    ]
    for edit in EDITS:
        planned, trains = (", ".join(sorted(stages)) or "nothing" for stages in (edit.planned, edit.trains))
        lines.append(f"| {edit.name} | {planned} | {trains} | {edit.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
