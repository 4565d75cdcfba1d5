"""Held-out scores of rows with plain columns: broken down by tags, and the same to the bit after a kill."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("trl")

from scripts.commands.plan import plan_text
from scripts.commands.project import Project
from scripts.commands.status import status_text
from scripts.data.compose import write_blend
from scripts.data.fill import fill_blend
from scripts.data.published import PublishedFile
from scripts.files import describe_files, read_json, write_json
from scripts.model.loading import make_model
from scripts.model.processor import make_tokenizer
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import sync_configs
from scripts.stage.publish import export_name
from scripts.stage.tables import ROLLOUTS, read_table
from tests.conftest import ROOT, SHORT

INSTRUCTIONS = [
    ("punctuation:no_comma", {}),
    ("length_constraints:number_words", {"num_words": 40, "relation": "less than"}),
]
HELD_OUT = 160


def published(number: int) -> dict:
    chosen = INSTRUCTIONS[: 1 + number % 2]
    return {
        "prompt": f"Say {number}." + " Briefly." * (number % 5),
        "instruction_id_list": [name for name, _ in chosen],
        "kwargs": [given for _, given in chosen],
    }


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A run whose stage's export and start are two models with random weights."""
    root = tmp_path_factory.mktemp("scoring")
    results, rows, recipe = root / "results/obey", root / "rows/rlvr.jsonl", root / "recipe.yaml"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps(published(number)) + "\n" for number in range(HELD_OUT + 8)))
    given = {"file": "rlvr.jsonl", "environment": "instruction_following_simple_agent", "holdout": HELD_OUT}
    grpo = {"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_num_steps": 2}}
    grpo["policy"] = {
        "max_total_sequence_length": 128,
        "optimizer": {"lr": 1.0e-3},
        "generation": {"max_new_tokens": 48},
    }
    recipe.write_text(
        yaml.safe_dump(
            {"name": "obey", "seed": 1, "source": {"kind": "folder", "path": str(rows.parent)}}
            | {"model": yaml.safe_load(SHORT.read_text())["model"], "blends": {"rlvr": given}}
            | {"evaluation": {"max_new_tokens": 48, "temperature": 1.0}}
            | {"stages": {"rlvr": {"algorithm": "grpo", "blend": "rlvr"} | grpo}}
        )
    )
    loaded = load_recipe(recipe)
    blend = results / "data/rlvr"
    write_blend(loaded.blends["rlvr"], [[[PublishedFile(rows, rows.name)]]], root / "source.jsonl")
    write_json(blend / "manifest.json", fill_blend(root / "source.jsonl", root / "tables", blend, HELD_OUT))
    sync_configs(loaded, results)
    tokenizer, fresh, stage = make_tokenizer(), root / "fresh", results / "rlvr"
    make_model(loaded.model, tokenizer, 256, seed=9).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    files = describe_files(fresh)
    content = export_name(files)
    (stage / "exports").mkdir(parents=True)
    fresh.rename(stage / "exports" / content)
    (stage / "hf").mkdir()
    (stage / "hf/model").symlink_to(f"../exports/{content}")
    facts = {"stage": "rlvr", "step": 2, "identity": "made", "content": content, "files": files}
    write_json(stage / "hf/record.json", facts)
    return root


def scoring(project: Path, folder: Path) -> subprocess.Popen:
    stage, blend = project / "results/obey/rlvr", project / "results/obey/data/rlvr"
    command = [sys.executable, "-m", "scripts.evaluate.score", "--recipe", str(project / "recipe.yaml")]
    command += ["--export", str(stage / "hf/record.json"), "--start", str(stage / "config.yaml")]
    command += ["--validation", str(blend / "val-split.jsonl"), "--rollouts", str(folder / "rollouts.parquet")]
    command += ["--output", str(folder / "eval.json")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(project, tmp_path_factory):
    """The folder of undisturbed scores."""
    folder = tmp_path_factory.mktemp("whole")
    undisturbed = scoring(project, folder)
    assert undisturbed.communicate()[0].startswith(f"held-out scores: {2 * HELD_OUT} responses, 0 of them")
    assert undisturbed.returncode == 0
    return folder


def test_a_killed_scoring_goes_on_to_the_bits_of_an_undisturbed_one(project, whole):
    killed = project / "results/obey/rlvr"
    first, sampled = scoring(project, killed), killed / "eval.sampled.jsonl"
    while not sampled.exists() or sampled.read_bytes().count(b"\n") < 7:  # five batches of the export, two of the start
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with sampled.open("ab") as file:
        file.write(b'{"of": "cut')
    recipe = load_recipe(project / "recipe.yaml")
    site = load_site(ROOT / "config/sites/laptop.yaml", recipe)
    under_way = Project(recipe, site, killed.parent, root=killed.parents[1])
    assert "held-out scores of rlvr take" in plan_text(under_way)
    assert not (killed / "eval.json").exists()
    second = scoring(project, killed)
    said = second.communicate()[0]
    kept = int(said.split("responses, ")[1].split()[0])
    assert second.returncode == 0 and 0 < kept < 2 * HELD_OUT and f"{2 * HELD_OUT} of {2 * HELD_OUT} responses" in said
    for name in ("eval.json", "rollouts.parquet"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert not sampled.exists() and read_json(killed / "logs/scoring.json")["responses"] == 2 * HELD_OUT
    assert "rlvr" in status_text(under_way)


def test_rows_with_a_column_prompt_are_scored_and_broken_down_by_instruction(whole, tmp_path):
    (entry,) = read_json(whole / "eval.json")["environments"].values()
    assert {tag: scores["rows"] for tag, scores in entry["tags"].items()} == {
        "1 instruction": HELD_OUT // 2,
        "2 instructions": HELD_OUT // 2,
        INSTRUCTIONS[0][0]: HELD_OUT,
        INSTRUCTIONS[1][0]: HELD_OUT // 2,
    }
    rows = read_table(whole / "rollouts.parquet", ROLLOUTS).to_pandas()
    two = rows[[len(tags) == 3 for tags in rows["tags"]]]
    assert entry["tags"]["2 instructions"]["after"] == pytest.approx(two["reward_after"].mean(), abs=1e-6)
    assert entry["tags"]["2 instructions"]["change"]["low"] <= entry["tags"]["2 instructions"]["change"]["value"]
    older = pq.read_table(whole / "rollouts.parquet").drop(["tags"])
    pq.write_table(older, tmp_path / "older.parquet")
    assert read_table(tmp_path / "older.parquet", ROLLOUTS)["tags"].null_count == HELD_OUT
