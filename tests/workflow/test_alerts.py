"""Alerts: each event of real short chains is told once, and a dead receiver costs seconds at most."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import yaml

from benchmarks.striking.chain import Chain
from benchmarks.striking.kinds import Kind, light_recipe
from scripts.controller.alerts import DEATH, LIMIT
from tests.programs import until
from tests.receiver import serving

LIGHT = Kind("a training without torch", light_recipe(1))
TITLE = f"Stagecoach on {socket.gethostname()}: results/struck"
TELL = ["sh", "-c", "mkdir -p told && cat > telling.$$ && mv telling.$$ told/$(date +%s%N)"]
CHILD = "child1: {<<: *stage, parent: base, blend: second, gate: [{metric: max_grad_norm, max: 1.0e+4}]}"
WATCHED = """
            refuse_divergence(job.stage, job.settings.gate, job.training, step)
            if step == 8 and not (job.run / "stood").exists():
                (job.run / "stood").touch()
                raise StalledError("no new step for 7 s")
            stops = """


class Told:
    """A chain whose calls tell a command."""

    def __init__(self, root: Path) -> None:
        self.chain, self.root, self.recipe = Chain(LIGHT, root, os.environ), root, root / "config/recipes/struck.yaml"
        self.results = root / "results/struck"
        self.configure(command=TELL)

    def configure(self, **alerts: list[str]) -> None:
        path = self.root / "config/config.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"alerts": alerts}))

    def change(self, stage: str, **settings: object) -> None:
        """Change settings of a stage of the recipe."""
        recipe = yaml.safe_load(self.recipe.read_text())
        recipe["stages"][stage] = recipe["stages"].get(stage, recipe["stages"]["child1"]) | settings
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))

    def call(self) -> int:
        """Call Snakemake for everything; its exit status."""
        (snakemake,) = self.chain.call()
        return snakemake.wait(600)

    def texts(self) -> list[str]:
        """The lines that the command was given, in order, without titles."""
        said = [path.read_text().splitlines() for path in sorted((self.root / "told").glob("*"))]
        assert all(title == TITLE for title, *_ in said)
        return [line for _, *lines in said for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A chain that has run to its end."""
    told = Told(tmp_path_factory.mktemp("alerts") / "whole")
    assert told.call() == 0, told.chain.output()[-3000:]
    return told


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole.root, tmp_path / "copied", symlinks=True, ignore=shutil.ignore_patterns("told"))
    return Told(tmp_path / "copied")


def ends(texts: list[str]) -> list[str]:
    return [text for text in texts if text.startswith("Snakemake ends, ")]


def test_each_published_stage_and_the_end_are_told_once(whole, copied):
    *published, end = whole.texts()
    assert published == [f"{stage}: trained and published, step 30" for stage in ("base", "child1")]
    done, total = end.removeprefix("Snakemake ends, ").removesuffix(" jobs done").split(" of ")
    assert done == total
    assert copied.call() == 0 and not copied.texts(), "there was nothing to do"
    shutil.rmtree(copied.results / "child1")
    assert copied.call() == 0
    assert len(copied.texts()) == 1 == len(ends(copied.texts())), "it was told of when it was trained"


def test_a_gate_that_stops_and_the_preflight_that_waits_for_a_person_are_told_once(copied):
    copied.change("child1", gate=[{"metric": "max_grad_norm", "max": 0.5}])
    copied.change("child2", parent="child1")
    assert [copied.call() for _ in range(2)] == [1, 1]
    texts = copied.texts()
    assert len(ends(texts)) == 2, "each call has its end"
    stop, waits = [text for text in texts if text not in ends(texts)]
    assert stop.startswith("child1: its gate says stop: max_grad_norm is 1, max 0.5")
    assert waits.startswith("preflight child2: failed, waits for a person: ") and "max_grad_norm is 1" in waits


def test_a_stall_and_a_divergence_are_told_once(copied):
    backend = copied.root / "scripts/backends/light/backend.py"
    code = "from scripts.errors import StalledError\nfrom scripts.evaluate.gate import refuse_divergence\n"
    text = backend.read_text().replace("\nSIZE =", f"{code}\nSIZE =").replace("\n            stops = ", WATCHED)
    backend.write_text(text)
    copied.change("child1", steps=33, gate=[{"metric": "max_grad_norm", "max": 0.5}])
    assert [copied.call() for _ in range(2)] == [1, 1]
    stall, diverged = [text for text in copied.texts() if text not in ends(copied.texts())]
    assert stall == "child1: no new step for 7 s; trying again from step 6"
    assert diverged.startswith("train child1: failed, waits for a person: child1: stopped, as its gate would stop")
    assert "max_grad_norm is 1, max 0.5" in diverged


def test_the_death_of_snakemake_is_told_and_the_next_call_goes_on(copied):
    copied.change("child1", steps=1_000_000)
    (snakemake,) = copied.chain.call()
    until(lambda: "train.run child1" in [name for _, name in copied.chain.working()], 60)
    os.kill(snakemake.pid, signal.SIGKILL)
    assert until(copied.texts, LIMIT) == [DEATH]
    for each in copied.chain.programs():
        each.kill()
    copied.change("child1", steps=30)
    assert copied.call() == 0
    assert len(copied.texts()) == 2 == len(ends(copied.texts())) + 1


def test_a_dead_receiver_neither_fails_nor_delays_a_call_beyond_its_limit(copied):
    pytest.importorskip("apprise", reason="envs/apprise.txt is not installed")

    def seconds() -> float:
        (copied.results / "report.html").unlink()
        began = time.monotonic()
        assert copied.call() == 0
        return time.monotonic() - began

    alone = seconds()
    with serving(hang=True) as server:
        copied.configure(urls=[server.url], command=["sleep", "60"])
        delayed = seconds()
        assert delayed < alone + LIMIT + 5
        said = until(lambda: [line for line in copied.chain.output().splitlines() if line.startswith("alerts: ")], 20)
        assert sorted(said) == [f"alerts: {name} took no alert within {LIMIT:g} s" for name in ("json", "sleep")]
        assert [text.partition(",")[0] for _, text in server.taken] == ["Snakemake ends"]
