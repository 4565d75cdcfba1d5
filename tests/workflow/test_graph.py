"""A graph of stages: several parents, branches beside each other, and a training that goes on; by the light backend."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.striking.chain import Chain
from benchmarks.striking.kinds import Kind, graph_recipe
from scripts.report.chain import chain_text, read_chain
from scripts.report.verify import verify

STOPS = [{"metric": "max_grad_norm", "max": 0.5, "action": "stop"}]


class Graph:
    """A tree in which the graph is made."""

    def __init__(self, root: Path) -> None:
        self.chain, self.root, self.results = (
            Chain(Kind("graph", graph_recipe()), root, os.environ),
            root,
            root / "results/struck",
        )

    def change(self, stage: str, **settings: object) -> None:
        """Change settings of a stage."""
        path = self.root / "config/recipes/struck.yaml"
        recipe = yaml.safe_load(path.read_text())
        recipe["stages"][stage] |= settings
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))

    def make(self) -> int:
        """Call Snakemake for everything."""
        (snakemake,) = self.chain.call()
        return snakemake.wait(180)

    def identities(self) -> dict[str, str]:
        """The identity of each stage that is published."""
        records = {
            path.parents[1].name: json.loads(path.read_text()) for path in self.results.glob("*/ckpt/record.json")
        }
        return {name: record["identity"] for name, record in records.items()}

    def attempts(self) -> int:
        """The attempts at any training."""
        logs = (self.root / "results/store").glob("*/attempts.jsonl")
        return sum('"event": "begin"' in line for log in logs for line in log.read_text().splitlines())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The graph, made to its end."""
    made = Graph(tmp_path_factory.mktemp("graph") / "whole")
    assert made.make() == 0, made.chain.output()[-3000:]
    return made


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole.root, tmp_path / "copied", symlinks=True)
    return Graph(tmp_path / "copied")


def test_a_teacher_made_anew_trains_itself_and_what_learns_from_it(copied):
    before, attempts = copied.identities(), copied.attempts()
    copied.change("second", seed=9)
    assert copied.make() == 0
    after = copied.identities()
    assert {name for name in before if before[name] != after[name]} == {"second", "student"}
    assert copied.attempts() == attempts + 2


def test_a_branch_that_fails_stops_what_needs_it_alone(copied):
    copied.change("first", seed=9)
    copied.change("second", gate=STOPS, seed=9)
    assert copied.make() == 1
    done = {name: read_chain(copied.results / name)[-1].record for name in ("first", "second", "student", "longer")}
    seeds = {name: record["seed"] for name, record in done.items()}
    assert seeds["first"] == seeds["second"] == 9
    assert done["longer"]["parents"][0]["identity"] == done["first"]["identity"]
    assert done["student"]["roles"]["teachers.one"]["identity"] != done["first"]["identity"], "not made again"
    assert "the gate of second says stop" in copied.chain.output()


def test_a_lineage_is_verified_through_all_parents(copied):
    chain = read_chain(copied.results / "student")
    assert [link.name for link in chain] == ["base", "first", "second", "student"]
    assert verify(chain).problems == []
    assert "teachers.two: second  step 30" in chain_text(chain)
    weights = copied.results / "second/hf/model/model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    assert any(str(weights) in problem for problem in verify(read_chain(copied.results / "student")).problems)


def test_a_training_goes_on_where_its_parent_ended(copied):
    first, longer = (read_chain(copied.results / name)[-1].record for name in ("first", "longer"))
    assert (first["step"], longer["step"]) == (30, 40)
    assert longer["facts"]["continues"]
    steps = [
        json.loads(line)["step"] for line in (copied.results / "longer/run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(31, 41))
    copied.change("first", checkpointing={"save_period": 5, "keep_last_k": 2})
    before, attempts = copied.identities(), copied.attempts()
    assert copied.make() == 0
    assert (copied.identities(), copied.attempts()) == (before, attempts)


def test_the_plan_tells_the_longest_path(whole):
    plan = (
        sys.executable,
        "-m",
        "scripts.commands",
        "plan",
        "--site",
        "config/sites/h100.yaml",
        "--run",
        "elsewhere",
        "--seed",
        "99",
    )
    said = subprocess.run(plan, cwd=whole.root, env=whole.chain.environment, capture_output=True, text=True, check=True)
    assert "longest path: base → first → student" in said.stdout
