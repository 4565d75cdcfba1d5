"""Own environments and tasks are known by content: an edit scores again, and a moved or touched file does not."""

import json
import os
import shutil
from pathlib import Path

import pytest

from scripts.commands.migrate import migrate
from scripts.contents import NOTES
from scripts.files import sha256_file
from scripts.recipe.evaluation import Task
from scripts.recipe.load import load_recipe
from scripts.recipe.task_files import data_of_task
from scripts.stage.rule_settings import settings_files, write_settings
from tests.conftest import ROOT

RESULTS, RECIPE = Path("results"), Path("recipe.yaml")
JUDGE, MODULE, WORDS = Path("judges/own.py"), Path("judges/shared.py"), Path("judges/words.txt")
TASK = Path("tasks/said.yaml")
QUESTIONS, RULES = Path("questions/rows.jsonl"), {"environments": "evaluate", "files": "tasks"}
SAID = """
task: said
dataset_path: json
doc_to_text: !function shown.question
dataset_kwargs: {data_files: {test: questions/*.jsonl}}
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The scored results of the recorded chain, with an own environment and an own task that no other commit knew."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    shutil.copytree(ROOT / "tests/recorded/results/recorded", RESULTS, symlinks=True)
    for folder in ("judges", "tasks", "questions"):
        Path(folder).mkdir()
    JUDGE.write_text("import shared\nWORDS = open('words.txt').read()\ndef verify(row, response): return 0.0\n")
    MODULE.write_text("BEST = 1.0\n")
    WORDS.write_text("good\n")
    TASK.write_text(SAID)
    QUESTIONS.write_text("{}\n")
    for path in (JUDGE, MODULE, WORDS, TASK, QUESTIONS):
        os.utime(path, (1, 1))
    text = (ROOT / "tests/recorded/recipe.yaml").read_text()
    text = text.replace("evaluation:", "environments: {own: judges/own.py}\nevaluation:", 1)
    text = text.replace("environments: [", "environments: [own, ")
    text = text.replace("max_new_tokens: 12", "max_new_tokens: 12\n  tasks: [{task: said, include_path: tasks}]", 1)
    RECIPE.write_text(text)
    shutil.copy(RESULTS / "sft/eval.json", RESULTS / "tasks.json")
    list(migrate(load_recipe(RECIPE), RESULTS, Path()))
    assert newer() == set()


def newer() -> set[str]:
    """The rules that score and whose settings are newer than what they made, after a call of this version."""
    recipe = load_recipe(RECIPE)
    write_settings(recipe, RESULTS)
    found = settings_files(recipe, RESULTS)
    paths = {name: RESULTS / f"settings/{name}.json" for name in RULES.values()}
    return {
        name
        for name, path in paths.items()
        if any(path.stat().st_mtime_ns > made.stat().st_mtime_ns for made in found[path].outputs if made.exists())
    }


@pytest.mark.parametrize(
    ("path", "rule"),
    [(JUDGE, "evaluate"), (MODULE, "evaluate"), (WORDS, "evaluate"), (TASK, "tasks"), (QUESTIONS, "tasks")],
)
def test_an_edit_scores_again(tree, path, rule):
    path.write_text(path.read_text() + "MORE = 1\n")
    os.utime(path, (1, 1))
    assert newer() == {rule}


def test_a_touched_copied_or_moved_file_scores_nothing_again(tree):
    for path in (JUDGE, MODULE, WORDS, TASK, QUESTIONS):
        path.touch()
    assert newer() == set()
    shutil.copytree(".", "../copy", symlinks=True)
    os.chdir("../copy")
    assert newer() == set()
    Path("../copy").rename("../moved")
    assert newer() == set()
    (Path("tasks") / "__pycache__").mkdir()
    (Path("tasks") / "__pycache__/shown.pyc").write_text("made by Python")
    assert newer() == set()


@pytest.mark.parametrize("is_edited", [False, True])
def test_scores_of_earlier_versions_stay_unless_a_file_is_newer_than_they_are(tree, is_edited):
    """Those versions had the files as inputs, which counted by time."""
    for key, name in RULES.items():
        path = RESULTS / f"settings/{name}.json"
        values, dated = json.loads(path.read_text()), path.stat().st_mtime_ns
        del values[key]
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        os.utime(path, ns=(dated, dated))
    (RESULTS / NOTES).unlink(missing_ok=True)
    if is_edited:
        JUDGE.write_text(JUDGE.read_text() + "BEST = 2\n")
        TASK.write_text(TASK.read_text() + "\n")
    assert newer() == (set(RULES.values()) if is_edited else set())


def test_an_environment_is_the_one_of_before_where_a_stage_was_trained_with_it(tree, monkeypatch):
    """A tree of an earlier version that was copied: all times are new."""
    path = RESULTS / "settings/evaluate.json"
    values = json.loads(path.read_text())
    del values["environments"]
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    os.utime(path, (1, 1))
    JUDGE.touch()
    config = (RESULTS / "rlvr/run/config.yaml").resolve()
    config.write_text(config.read_text() + f"environments: {{own: {sha256_file(JUDGE)}}}\n")
    assert "evaluate" not in newer()


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("questions/rows.jsonl", ["questions/rows.jsonl"]),
        ("[questions/rows.jsonl, questions/none.jsonl]", ["questions/rows.jsonl"]),
        ("{test: 'https://host/questions/rows.jsonl'}", []),
        ("{test: tasks/said.yaml}", []),
        ("{test: [1, null]}", []),
        ("[", []),
    ],
)
def test_local_data_of_a_task_are_found_outside_of_its_folder(tree, named, found):
    TASK.write_text(SAID.replace("{test: questions/*.jsonl}", named))
    assert data_of_task(Task(task="said", include_path="tasks")) == found
