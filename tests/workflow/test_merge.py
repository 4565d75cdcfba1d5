"""Merges of a chain's branches, by a grid of shares: published, scored, gated and reported like any stage."""

import json
import os
import shutil
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("torch")

from safetensors.torch import load_file

from scripts.report.chain import read_chain
from scripts.report.verify import verify
from scripts.stage.training_folder import TrainingFolder

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("mergekit") is None, reason="envs/trl.txt is not installed"),
]
PARTS = ("rlhf", "rlvr1")
SOUPS = ("soup.rlvr1-0.25.rlhf-0.75", "soup.rlvr1-0.75.rlhf-0.25")
MERGES = {
    "soup": {
        "algorithm": "merge",
        "sweep": [{"merge.rlvr1": share, "merge.rlhf": 1 - share} for share in (0.25, 0.75)],
    },
    "dare": {
        "algorithm": "merge",
        "parent": "sft",
        "merge": dict.fromkeys(PARTS, 0.5),
        "merging": {"merge_method": "dare_ties", "density": 0.5},
    },
}


@pytest.fixture(scope="module")
def tree(finished, tmp_path_factory):
    """The finished chain with merges of its branches."""
    workflow = finished.copied_to(tmp_path_factory.mktemp("merged"))
    path = workflow.root / "config/recipes/short.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["stages"] |= MERGES
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    printed = workflow.snakemake()
    assert (printed.count("rule merge:"), printed.count("rule train:")) == (3, 0)
    return workflow


STRUCK = """
import os, signal
from scripts.backends.merge import merge_weights
from scripts.program import run_command_line
from scripts.train.merge_stage import main
save = merge_weights.save_file
def saved(*arguments, **options):
    save(*arguments, **options)
    os.kill(os.getpid(), signal.SIGTERM)
merge_weights.save_file = saved
run_command_line(main)
"""
"""The program of rule merge, which SIGTERM strikes once weights are written."""


def read(tree, path: str) -> dict:
    return json.loads((tree.results / path).read_text())


def weights(tree, stage: str) -> dict:
    return load_file(tree.results / stage / "hf/model/model.safetensors")


def test_a_grid_of_shares_makes_a_model_of_each_point(tree):
    rlhf, rlvr1 = (weights(tree, part) for part in PARTS)
    for soup, share in zip(SOUPS, (0.25, 0.75), strict=True):
        for name, tensor in weights(tree, soup).items():
            wanted = share * rlvr1[name].double() + (1 - share) * rlhf[name].double()
            assert tensor.dtype == rlhf[name].dtype
            assert float((tensor.double() - wanted).abs().max()) < 1e-6, name


def test_a_merge_is_scored_beside_its_largest_part_or_its_base_and_gated(tree):
    for stage, before in ((SOUPS[0], "rlhf"), (SOUPS[1], "rlvr1"), ("dare", "sft")):
        assert read(tree, f"{stage}/eval.json")["mean"]["before"] == read(tree, f"{before}/eval.json")["mean"]["after"]
        assert read(tree, f"{stage}/gate.json")["verdict"] in ("pass", "warn")
        assert pq.read_table(tree.results / stage / "metrics.parquet")["step"].to_pylist() == [1]
        record = read(tree, f"{stage}/ckpt/record.json")
        assert {role: start["stage"] for role, start in record["roles"].items()} == {
            f"merge.{part}": part for part in PARTS
        }
        assert [
            (attempt["from"], attempt["to"]) for attempt in TrainingFolder(tree.results / stage / "run").attempts
        ] == [(0, 1)]
    assert (tree.results / "soup/sweep.html").is_file() and (tree.results / "report.html").is_file()
    assert "Nothing to be done" in tree.snakemake("--dry-run")


def test_the_lineage_of_a_merge_is_verified_through_its_parts(tree):
    chain = read_chain(tree.results / "dare")
    assert [link.name for link in chain] == ["sft", *PARTS, "dare"]
    assert verify(chain).problems == []


def test_a_merge_that_a_signal_ends_leaves_nothing_half_made_and_starts_again(tree):
    folder, before = (tree.results / "dare/run").resolve(), weights(tree, "dare")
    shutil.rmtree(folder)
    options = ("--recipe", "config/recipes/short.yaml", "--results", "results/short", "--root", "results")
    struck = tree.run("python", "-c", STRUCK, *options, "--stage", "dare", check=False)
    assert struck.returncode == os.EX_TEMPFAIL and "dare: SIGTERM ended the merge" in struck.stdout
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {"identity.json", "config.yaml", "attempts.jsonl"}, "no lock, no weights"
    assert [attempt["outcome"] for attempt in TrainingFolder(folder).attempts] == ["unfinished"]
    tree.run("python", "-m", "scripts.train.merge_stage", *options, "--stage", "dare")
    merged = load_file(TrainingFolder(folder).newest_checkpoint().path / "model.safetensors")
    assert merged.keys() == before.keys() and all(merged[name].equal(before[name]) for name in before)


def test_other_shares_are_merged_anew_and_nothing_trains(tree):
    before = {stage: read(tree, f"{stage}/ckpt/record.json")["identity"] for stage in (*PARTS, *SOUPS, "dare")}
    shares = "results/short/soup.rlvr1-0.5.rlhf-0.5/gate.json"
    tree.edit("- merge.rlvr1: 0.25\n      merge.rlhf: 0.75", "- merge.rlvr1: 0.5\n      merge.rlhf: 0.5")
    output = tree.snakemake(shares)
    assert "stage=soup.rlvr1-0.5.rlhf-0.5" in output and "stage=rlvr1" not in output
    assert {stage: read(tree, f"{stage}/ckpt/record.json")["identity"] for stage in before} == before


def test_shares_that_do_not_sum_are_refused_with_their_place(tree):
    tree.edit("- merge.rlvr1: 0.5\n", "- merge.rlvr1: 0.6\n")
    output = tree.snakemake("--dry-run", check=False)
    assert "stages.soup.rlvr1-0.6.rlhf-0.5.merge" in output and "the shares sum to 1.1; they are shares of 1" in output
