"""Rows in folders of the user's own: an edit makes its blend anew and no other, and all else nothing."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from scripts.commands.checks import check_rows_there
from scripts.commands.project import Project
from scripts.contents import NOTES
from scripts.data import own_rows as own_rows_module
from scripts.data.download import fetch_source
from scripts.data.fill import main as fill
from scripts.data.source_record import files_below
from scripts.files import append_json
from scripts.recipe.load import load_recipe
from scripts.recipe.site import Site
from scripts.stage.data_to_come import data_to_be_made, gone_files, is_fetched
from scripts.stage.rule_settings import settings_files, write_settings
from tests.conftest import SHORT

RESULTS, RECIPE = Path("results"), Path("recipe.yaml")
LONG_AGO = 1_600_000_000
BLENDS = """
  sft:
    kind: demonstrations
    holdout: 2
    file: sft.jsonl
  rlvr1:
    file: ["questions/*.csv", more.parquet]
    environment: math_with_judge_simple_agent
    columns: {prompt: question, expected_answer: answer}
    holdout: 2
  rlhf:
    source: {kind: folder, path: sets}
    environment: genrm_simple_agent
    columns: {prompt: question, principle: answer}
    holdout: 2
"""


def ready_row(number: int) -> dict:
    question = {"role": "user", "content": f"What is {number} + 1?"}
    return {"messages": [question, {"role": "assistant", "content": str(number + 1)}]}


def questions(start: int) -> pa.Table:
    numbers = range(start, start + 8)
    return pa.table({"question": [f"{n} + 1?" for n in numbers], "answer": [str(n + 1) for n in numbers]})


def date(*files: Path) -> None:
    """Let files be older than what is made of them, and than any tick of a clock."""
    for file in files:
        os.utime(file, (LONG_AGO, LONG_AGO))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose three blends were fetched and split from the folders rows/ and sets/."""
    root, before = tmp_path_factory.mktemp("own") / "project", Path.cwd()
    root.mkdir()
    os.chdir(root)
    for folder in ("rows/questions", "sets/data"):
        Path(folder).mkdir(parents=True)
    Path("rows/sft.jsonl").write_text("".join(json.dumps(ready_row(n)) + "\n" for n in range(12)))
    pa.csv.write_csv(questions(0), "rows/questions/a.csv")
    pa.csv.write_csv(questions(10), "rows/questions/b.csv")
    pa.parquet.write_table(questions(20), "rows/more.parquet")
    pa.csv.write_csv(questions(30), "sets/data/train-1.csv")
    date(*(path for path in Path().rglob("*.*") if path.is_file()))
    text = SHORT.read_text()
    first, last = text[: text.index("blends:")], text[text.index("evaluation:") :]
    RECIPE.write_text(first.replace("{kind: synthetic}", "{kind: folder, path: rows}") + f"blends:{BLENDS}" + last)
    make()
    os.chdir(before)
    return root


@pytest.fixture
def tree(project, tmp_path, monkeypatch):
    """A copy of the project, as the working directory."""
    monkeypatch.chdir(shutil.copytree(project, tmp_path / "project"))


def make() -> None:
    """What the rules of the data do."""
    recipe = load_recipe(RECIPE)
    write_settings(recipe, RESULTS)
    source = RESULTS / "data/source"
    if not is_fetched(recipe, RESULTS):
        fetch_source(recipe, source)
        copy_settings("source", source)
    for name in data_to_be_made(recipe, RESULTS):
        splits = RESULTS / "data" / name
        fill(source / f"{name}.jsonl", 2, splits, unrewarded=name == "sft", workers=1)
        copy_settings(f"fill/{name}", splits)


def copy_settings(rule: str, folder: Path) -> None:
    shutil.copyfile(RESULTS / f"settings/{rule}.json", folder / "made_from.json")


def remade() -> set[str]:
    """The blends whose data would be made anew, as plan says, after a dry run as before it."""
    recipe = load_recipe(RECIPE)
    planned = data_to_be_made(recipe, RESULTS)
    write_settings(recipe, RESULTS)
    assert data_to_be_made(recipe, RESULTS) == planned
    assert newer() == {f"fill/{name}" for name in planned} | ({"source"} if planned else set())
    return planned


def newer() -> set[str]:
    """The rules whose settings are newer than what was made by them, as Snakemake compares them."""
    return {
        str(path.relative_to(RESULTS / "settings").with_suffix(""))
        for path, settings in settings_files(load_recipe(RECIPE), RESULTS).items()
        if any(path.stat().st_mtime_ns > output.stat().st_mtime_ns for output in settings.outputs if output.exists())
    }


def of_same_size_and_time(file: Path, old: str, new: str) -> None:
    written(file, file.read_text().replace(old, new))


def written(file: Path, text: str) -> None:
    file.write_text(text)
    date(file)


def replaced(file: Path, by: Path) -> None:
    shutil.copy(by, file)
    date(file)


EDITS = {
    "a row": ("sft", lambda: of_same_size_and_time(Path("rows/sft.jsonl"), "What is 3", "What is 4")),
    "a row more": ("sft", lambda: append_json(Path("rows/sft.jsonl"), ready_row(50))),
    "a cell": ("rlvr1", lambda: of_same_size_and_time(Path("rows/questions/b.csv"), "13 + 1", "19 + 1")),
    "a file of a glob": ("rlvr1", lambda: replaced(Path("rows/questions/c.csv"), Path("sets/data/train-1.csv"))),
    "a file less": ("rlvr1", lambda: Path("rows/questions/a.csv").unlink()),
    "a parquet file": ("rlvr1", lambda: pa.parquet.write_table(questions(60), "rows/more.parquet")),
    "a file of a data set": ("rlhf", lambda: replaced(Path("sets/data/train-1.csv"), Path("rows/questions/a.csv"))),
    "a shard more": ("rlhf", lambda: replaced(Path("sets/data/train-2.csv"), Path("rows/questions/a.csv"))),
}


@pytest.mark.parametrize(("blend", "edit"), EDITS.values(), ids=EDITS)
def test_an_edit_makes_its_blend_anew_and_no_other(tree, blend, edit):
    assert remade() == set()
    edit()
    assert remade() == {blend}


def test_data_made_anew_are_those_of_the_edited_rows(tree):
    EDITS["a row"][1]()
    EDITS["a shard more"][1]()
    assert remade() == {"sft", "rlhf"}
    make()
    assert remade() == set()


def linked() -> None:
    """Put the rows elsewhere, and links in their places."""
    Path("rows").rename("elsewhere")
    Path("rows").symlink_to("elsewhere")
    Path("rows/sft.jsonl").rename("sft.jsonl")
    Path("rows/sft.jsonl").symlink_to("../sft.jsonl")


def copied() -> None:
    shutil.copytree("rows", "copy")
    shutil.rmtree("rows")
    Path("copy").rename("rows")


def moved() -> None:
    """Move the rows, and name the new folder in the recipe."""
    Path("rows").rename("others")
    RECIPE.write_text(RECIPE.read_text().replace("path: rows", "path: ./others"))


CHANGES = {
    "touched": lambda: [os.utime(path) for path in Path("rows").rglob("*")],
    "copied": copied,
    "moved": moved,
    "linked": linked,
    "a file that no blend names": lambda: Path("rows/notes.txt").write_text("none"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_no_row_makes_nothing_anew(tree, change):
    change()
    assert remade() == set()


def test_an_edit_taken_back_makes_nothing_anew(tree):
    rows = Path("rows/sft.jsonl").read_text()
    EDITS["a row"][1]()
    assert remade() == {"sft"}
    Path("rows/sft.jsonl").write_text(rows)
    assert remade() == set()


def test_rows_edited_while_they_are_fetched_are_seen(tree):
    """The source's record says what was fetched, whatever the settings said before."""
    rows = Path("rows/sft.jsonl").read_text()
    EDITS["a row"][1]()
    write_settings(load_recipe(RECIPE), RESULTS)
    Path("rows/sft.jsonl").write_text(rows)
    fetch_source(load_recipe(RECIPE), RESULTS / "data/source")
    copy_settings("source", RESULTS / "data/source")
    assert remade() == set()
    EDITS["a row"][1]()
    assert remade() == {"sft"}


def test_tables_that_the_rows_turn_out_to_need_make_nothing_anew(tree):
    """Which tables there are is known once the source is fetched, and then the settings tell less of the rows."""
    record = RESULTS / "data/source/record.json"
    values, then = json.loads(record.read_text()), record.stat().st_mtime_ns
    values["tables"] = {"BytedTsinghua-SIA/DAPO-Math-17k": "main"}
    record.write_text(json.dumps(values))
    os.utime(record, ns=(then, then))
    recipe = load_recipe(RECIPE)
    assert "from" in json.loads((RESULTS / "data/sft/made_from.json").read_text())
    assert "from" not in settings_files(recipe, RESULTS)[RESULTS / "settings/fill/sft.json"].values
    assert remade() == set()


def test_results_of_earlier_versions_are_fresh_and_an_edit_since_is_seen(tree):
    """Their settings knew where files are and not what is in them; the source's record had the hashes."""
    (RESULTS / NOTES).unlink()
    for path in [*RESULTS.rglob("settings/source.json"), RESULTS / "data/source/made_from.json"]:
        values = json.loads(path.read_text())
        del values["contents"]
        values["source"]["path"] = "rows"
        values["blends"]["rlhf"]["source"]["path"] = "sets"
        written(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
    for path in [*RESULTS.rglob("settings/fill/*.json"), *RESULTS.glob("data/[rs]*/made_from.json")]:
        if path.parent.name != "source":
            values = json.loads(path.read_text())
            del values["from"]
            written(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
    shutil.copytree(".", "../later")
    assert remade() == set()
    EDITS["a cell"][1]()
    assert remade() == {"rlvr1"}
    os.chdir("../later")
    EDITS["a cell"][1]()  # before the first call of this version
    assert remade() == {"rlvr1"}


def lacking_rows(recipe):
    """What a start is refused for."""
    return [finding.line for finding in check_rows_there(Project(recipe, Site(name="here", threads=1), RESULTS))]


@pytest.mark.parametrize("gone", ["rows", "rows/sft.jsonl"])
def test_rows_that_are_gone_leave_what_was_made_of_them_and_are_told(tree, gone):
    Path(gone).rename("away")
    recipe = load_recipe(RECIPE)
    assert remade() == set() and lacking_rows(recipe) == []
    assert any(f"{gone}" in line and "sft" in line for line in gone_files(recipe, RESULTS))
    shutil.rmtree(RESULTS / "data/source")
    shutil.rmtree(RESULTS / "data/sft")
    assert any(f"{gone}" in line for line in lacking_rows(recipe))


def test_which_files_a_data_set_has_is_asked_of_datasets_once(tree, monkeypatch):
    remade()
    monkeypatch.setattr(own_rows_module, "_files_wanted", None)
    assert remade() == set()


@pytest.mark.parametrize("run", ["results/first", "results"])
def test_a_projects_results_and_tools_are_not_among_its_rows(tmp_path, run):
    own = {"train.jsonl", "store/train.jsonl", "more/results/train.jsonl"}
    made = {f"{run}/settings/source.json", f"{run}/data/sft/train-split.jsonl", ".venv/lib/train.jsonl", ".git/HEAD"}
    made |= {"results/store/0123456789abcdef/metrics.jsonl"}
    for name in own | made:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert files_below(tmp_path) == own
