"""A plan says how many rows train and how many are held out, and warns of a default that takes many of few rows."""

import json

import pytest
import yaml

from scripts.commands.checks import check_data
from scripts.commands.project import Project
from scripts.files import sha256_file, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.site import Site
from scripts.stage.held_out import rows_held_out
from scripts.train.preflight import check_stage
from tests.conftest import ROOT
from tests.stages import ready_stage

ROW = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}


@pytest.fixture
def recipe(tmp_path):
    """A recipe of SFT on so many rows in a file, with settings of the blend and of the stage's data."""

    def load(rows=200, data=None, **blend):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows/chats.jsonl").write_text((json.dumps(ROW) + "\n") * rows + "\n")
        values = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
        values["source"] = {"kind": "folder", "path": str(tmp_path / "rows")}
        values["blends"] = {"chats": {"kind": "demonstrations", **blend}}
        stage = values["stages"]["sft"] | {"blend": "chats"} | ({"data": data} if data else {})
        values |= {"stages": {"sft": stage}}
        del values["evaluation"], values["defaults"]
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return load_recipe(path)

    return load


@pytest.mark.parametrize(
    ("blend", "rows", "counts"),
    [
        ({}, 200, (100, 100)),
        ({"holdout": 0.05}, 200, (190, 10)),
        ({"holdout": 20, "test": 30, "holdout_by": "random"}, 200, (150, 20)),
    ],
)
def test_rows_of_a_file_at_hand_are_counted_before_they_are_split(recipe, tmp_path, blend, rows, counts):
    assert rows_held_out(recipe(rows, **blend), tmp_path / "results") == {"chats": counts}


def test_what_a_plan_cannot_know_it_does_not_say(recipe, tmp_path):
    by = {"column": "split", "value": "dev"}
    assert rows_held_out(recipe(50), tmp_path / "results") == {}
    for loaded in (recipe(holdout_by=by), recipe(file="gone.jsonl"), recipe(file="chats*.jsonl")):
        assert rows_held_out(loaded, tmp_path / "results") == {}


@pytest.mark.parametrize(
    ("rows", "blend", "warns"), [(200, {}, True), (499, {}, True), (500, {}, False), (200, {"holdout": 100}, False)]
)
def test_a_default_holdout_that_takes_more_than_a_fifth_is_a_warning(recipe, tmp_path, rows, blend, warns):
    project = Project(recipe(rows, **blend), Site(name="here", threads=1), tmp_path / "results")
    said = [*map(str, check_data(project))]
    assert len(said) == warns
    if rows == 200 and warns:
        assert said[0].startswith("warning: blend chats: 100 rows to train on, 100 held out (50%), since")


def test_the_preflight_says_how_many_rows_are_held_out_and_warns_of_a_sorted_file(recipe, tmp_path, capsys):
    def messages(answer):
        return {"messages": [ROW["messages"][0], {"role": "assistant", "content": answer}]}

    rows = [messages("One apple is enough." if number < 150 else "Two pears are too many.") for number in range(300)]

    def told(**settings):
        stage = ready_stage(recipe(300, **settings), tmp_path / "results", "sft", rows)
        stage.validation_split.write_text("".join(json.dumps(row) + "\n" for row in rows[-40:]))
        described = {"rows": 40, "sha256": sha256_file(stage.validation_split)}
        write_json(stage.manifest, json.loads(stage.manifest.read_text()) | {"validation": described})
        check_stage(stage)
        return capsys.readouterr().err

    said = told()
    assert "sft: 300 rows to train on, 40 held out" in said
    assert "held-out rows are unlike the rows to train on (the word " in said
    assert "set blends.chats.holdout_by: random; the rows to train on change along the file (the word " in said
    assert "set data.shuffle: true of stages.sft" in said
    said = told(holdout_by="random", data={"shuffle": True})
    assert "300 rows to train on" in said and "unlike" not in said and "change along" not in said
