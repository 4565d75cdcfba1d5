"""The doctor finds what an earlier version trained on, scored or judged by wrong verdicts of NeMo-Gym, and nothing else."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from scripts.commands.gym_verdicts import check_verdicts
from scripts.commands.project import Project
from scripts.files import write_json
from scripts.recipe.gym_release import VERDICTS
from scripts.recipe.load import load_recipe
from scripts.recipe.recipe import Recipe
from scripts.recipe.site import Site
from scripts.sampling.judge import JUDGED
from scripts.stage.tables import write_table
from scripts.stage.training_folder import TrainingFolder
from tests import programs
from tests.conftest import ROOT, SHORT

GYM = {"version": "0.4.0", "servers": ["mcqa"]}
LOST = "RuntimeError: <asyncio.locks.Event object at 0x7f [unset]> is bound to a different event loop"
HUNG = "Gym's server mcqa, asked twice: no answer to a response within 120 s"


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    """A recipe in which Gym rewards rlvr1, from which another stage starts, and held-out rows."""
    written = yaml.safe_load(SHORT.read_text())
    written["stages"]["rlvr1"]["gym"] = GYM
    written["stages"]["rlhf"]["parent"] = "rlvr1"
    written["evaluation"]["gym"] = GYM
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(written))
    return load_recipe(tmp_path / "recipe.yaml")


def train(results: Path, stage: str, attempts: list[tuple[int, int, dict]], unjudged: dict[int, float]) -> None:
    """A training of a stage by attempts, each from a step to another, with what their begin notes besides."""
    run = results / "store" / stage
    run.mkdir(parents=True)
    (results / stage).mkdir()
    (results / stage / "run").symlink_to(run)
    for begun, ended, more in attempts:
        TrainingFolder(run).begin_attempt(begun, **more)
        (run / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"step": step, "unjudged_share": unjudged.get(step, 0.0)}) + "\n"
                for step in range(1, ended + 1)
            )
        )
        TrainingFolder(run).end_attempt(ended, "finished")


def doubtful(recipe, results):
    """What the doctor finds of the verdicts."""
    return [found.message for found in check_verdicts(Project(recipe, Site(name="here", threads=1), results))]


NOW = {"gym_verdicts": VERDICTS}


def test_steps_of_earlier_versions_with_unjudged_responses_are_named(recipe, tmp_path):
    train(tmp_path, "rlvr1", [(0, 5, {}), (5, 8, {}), (8, 10, NOW)], {1: 0.625, 6: 0.3, 9: 0.1})
    train(tmp_path, "rlhf", [(0, 5, {})], {1: 0.5})
    (found,) = doubtful(recipe, tmp_path)
    assert found.startswith("rlvr1: ") and "steps 1 (62%), 6 (30%) earned 0 unjudged" in found
    assert "so may rlhf, trained from it" in found and f"stagecoach discard {tmp_path}/store/rlvr1" in found


@pytest.mark.parametrize(
    ("attempts", "unjudged"),
    [
        ([(0, 5, NOW)], {1: 0.6}),
        ([(0, 5, {})], {}),
        ([(0, 5, {}), (0, 5, NOW)], {1: 0.6}),
        ([(0, 5, {}), (3, 8, NOW)], {4: 0.6, 6: 0.2}),
    ],
)
def test_steps_that_were_right_or_were_trained_again_are_not(recipe, tmp_path, attempts, unjudged):
    train(tmp_path, "rlvr1", attempts, unjudged)
    assert not [*doubtful(recipe, tmp_path)]


@pytest.mark.parametrize("file", ["eval.json", "test.json"])
def test_scores_of_earlier_versions_with_unjudged_responses_are_named(recipe, tmp_path, file):
    record = {"stage": "sft", "unjudged": {"responses": 7, "first": LOST}}
    write_json(tmp_path / "sft" / file, record)
    (found,) = doubtful(recipe, tmp_path)
    assert found.startswith(f"sft: {tmp_path}/sft/{file}: 7 responses count 0 unjudged") and "delete the file" in found
    for right in (record | NOW, {"stage": "sft"}):
        write_json(tmp_path / "sft" / file, right)
        assert not [*doubtful(recipe, tmp_path)]


def test_a_blend_with_responses_lost_by_earlier_versions_is_named(tmp_path):
    recipe = load_recipe(ROOT / "config/recipes/tiny-rft.yaml")
    (name,) = recipe.generated
    judged = tmp_path / "data" / name / "generated/judged.parquet"
    judged.parent.mkdir(parents=True)
    rows = [{field.name: None for field in JUDGED} | {"why": why} for why in (LOST, HUNG, None, LOST)]
    write_table(pa.Table.from_pylist(rows, schema=JUDGED), judged)
    (found,) = doubtful(recipe, tmp_path)
    assert found.startswith(f"blend {name}: {judged}: 2 of 4 responses were not judged")
    write_table(pa.Table.from_pylist(rows[1:3], schema=JUDGED), judged)
    assert not [*doubtful(recipe, tmp_path)]


def test_the_doctor_warns_of_them(recipe, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"recipe: {tmp_path}/recipe.yaml\nsite: config/sites/laptop.yaml\nrun: r\nresults: {tmp_path}/results\n"
    )
    train(tmp_path / "results/r", "rlvr1", [(0, 5, {})], {1: 0.625})
    out = programs.run("scripts.commands.__main__", "doctor", "--config", config).stdout
    assert "warning: rlvr1: may have learnt from wrong verdicts of NeMo-Gym" in out
