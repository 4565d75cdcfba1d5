"""A sweep, the best variant as a parent, and the best checkpoint, really trained."""

import json
import re

import pytest

from scripts.stage.training_folder import TrainingFolder

RATES = ("2.0e-3", "8.0e-3")
RLVR1 = "rlvr1: {algorithm: grpo, parent: sft, blend: rlvr1"


def swept(*rates: str) -> str:
    """The sweep of these learning rates, in YAML."""
    return f", sweep: {{policy.optimizer.lr: [{', '.join(rates)}]}}"


@pytest.fixture(scope="module")
def tree(finished, tmp_path_factory):
    """The finished chain, its rlvr1 swept, rlhf started from the best variant, trained to the report."""
    workflow = finished.copied_to(tmp_path_factory.mktemp("swept"))
    workflow.edit(RLVR1, RLVR1 + swept(*RATES))
    workflow.edit(
        "rlhf: {algorithm: grpo, parent: sft", "rlhf: {algorithm: grpo, parent: {stage: rlvr1, best: held_out_mean}"
    )
    workflow.output = workflow.snakemake()
    return workflow


def choice(tree, name: str) -> dict:
    """A record of what was chosen."""
    return json.loads((tree.results / name / "choice.json").read_text())


def steps(tree, variant: str) -> list[tuple[int, int]]:
    """From where to where each attempt at a variant trained."""
    return [(attempt["from"], attempt["to"]) for attempt in TrainingFolder(tree.results / variant / "run").attempts]


def variants(*rates: str) -> list[str]:
    return [f"rlvr1.lr-{float(rate):g}" for rate in rates]


def test_the_child_starts_from_the_best_and_the_report_shows_the_sweep(tree):
    best = choice(tree, "rlvr1.best-held_out_mean")["chosen"][0]
    parents = json.loads((tree.results / "rlhf/ckpt/record.json").read_text())["parents"]
    assert [(parent["stage"], parent["step"]) for parent in parents] == [(best, 3)]
    assert "Nothing to be done" in tree.snakemake("--dry-run")
    page = (tree.results / "rlvr1/sweep.html").read_text()
    assert all(name.removeprefix("rlvr1.") in page for name in variants(*RATES))
    assert {*map(str, (steps(tree, name) for name in variants(*RATES)))} == {"[(0, 3)]"}


def test_a_choice_made_again_with_more_variants_repeats_only_what_follows_from_another(tree):
    before = choice(tree, "rlvr1.best-held_out_mean")["chosen"]
    tree.edit(swept(*RATES), swept(*RATES, "1.0e-9"))  # which learns nothing
    planned = tree.snakemake("--dry-run")
    assert re.search(r"^rlhf +may train +3 of 3 .* rlvr1.best-held_out_mean comes first$", planned, re.M), planned
    assert re.search(r"^predicted, .*: rlhf$", planned, re.M)
    output = tree.snakemake()
    again = choice(tree, "rlvr1.best-held_out_mean")
    assert len(again["candidates"]) == 3 and again["chosen"] == before
    assert steps(tree, *variants("1.0e-9")) == [(0, 3)]
    assert "stage=rlhf" not in output, "nothing of what descends from it is made again"


def test_an_earlier_checkpoint_is_published_without_training(tree):
    name = choice(tree, "rlvr1.best-held_out_mean")["chosen"][0]
    tree.edit("parent: {stage: rlvr1, best: held_out_mean}", f"parent: {{stage: {name}, checkpoint: [1, 3]}}")
    before = steps(tree, name)
    tree.snakemake(f"results/short/{name}.checkpoints.best-held_out_mean/choice.json")
    found = choice(tree, f"{name}.checkpoints.best-held_out_mean")
    assert {(candidate["name"], candidate["step"]) for candidate in found["candidates"]} == {
        (f"{name}.step-1", 1),
        (f"{name}.step-3", 3),
    }
    assert steps(tree, name) == before
