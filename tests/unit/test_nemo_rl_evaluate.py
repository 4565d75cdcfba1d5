"""Held-out scores by NeMo-RL: what its programs are told, and what counts as a result."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from scripts.backends.nemo_rl import held_out as nemo_rl_score
from scripts.backends.nemo_rl.command import driver_command
from scripts.backends.nemo_rl.held_out import (
    RewardedRollout,
    RolloutTask,
    answers_of,
    is_comparable,
    read_trajectories,
    scoring_launch,
    write_tasks,
)
from scripts.backends.nemo_rl.releases import release_of
from scripts.backends.nemo_rl.runtime import Runtime
from scripts.errors import UserError
from scripts.evaluate.gate import judge
from scripts.evaluate.results import Answer, beside_parent, evaluation_record
from scripts.files import read_json, sha256_file, write_json
from scripts.recipe.criteria import Criterion
from scripts.recipe.load import load_recipe, load_site
from scripts.report.environments import write_environments_page
from scripts.report.summary import held_out
from scripts.stage.publish import export_name
from tests.conftest import ROOT

MATH, GENRM = "math_with_judge_simple_agent", "genrm_simple_agent"
KINDS = (("eval", "json"), ("rollouts", "parquet"))
EXPORT = {"stage": "rlvr1", "step": 50, "identity": "0", "content": export_name({}), "files": {}}


@pytest.fixture
def recipe_with(tmp_path):
    """One of the recipes with an `evaluation`."""

    def load(name: str = "super3", **evaluation):
        data = yaml.safe_load((ROOT / f"config/recipes/{name}.yaml").read_text())
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data | {"evaluation": evaluation}))
        return load_recipe(path)

    return load


def rows_of(*names: str) -> str:
    rows = [
        {"agent_ref": {"name": name}, "id": place, "responses_create_params": {"input": f"question {place}"}}
        for place, name in enumerate(names)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def asked_of(*names: str) -> list[RolloutTask]:
    return [RolloutTask(name, line, f"question {line}", 1) for line, name in enumerate(names, start=1)]


def records_of(*pairs: tuple[str | None, object]) -> str:
    lines = [{"reward": reward} | ({"agent_ref": {"name": name}} if name else {}) for name, reward in pairs]
    return "".join(json.dumps(line) + "\n" for line in lines)


# The recipe


def test_nothing_is_scored_unless_the_recipe_says_so(recipe_with):
    assert load_recipe(ROOT / "config/recipes/super3.yaml").scored_stages() == []
    assert recipe_with(tasks=["gsm8k"]).scored_stages() == []
    assert recipe_with(held_out=True).scored_stages() == ["rlvr1", "rlvr2", "rlvr3", "swe1", "swe2", "rlhf"]


@pytest.mark.parametrize(
    ("name", "evaluation", "message"),
    [
        ("super3", {"held_out": True, "taks": []}, "evaluation.taks: unknown key; did you mean tasks?"),
        ("super3", {"max_new_tokens": 8}, "evaluation: these keys are for backend trl"),
        ("tiny", {"held_out": True}, "evaluation: held_out is for NeMo-RL"),
        ("steps-dpo", {"held_out": True}, "evaluation: no stage of GRPO on Gym's environments"),
        (
            "super3",
            {"held_out": True, "nodes": 1},
            "evaluation.nodes: is gone: leave it out; a stage is scored on the nodes that train it",
        ),
    ],
)
def test_a_mistake_in_the_evaluation_is_one_message(recipe_with, name, evaluation, message):
    with pytest.raises(UserError, match=re.escape(message)):
        recipe_with(name, **evaluation)


# What the driver is told


def launch_of_scoring(recipe, folder: Path):
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    (folder / "hf").mkdir()
    (folder / "exports/0123abcd").mkdir(parents=True)
    (folder / "hf/model").symlink_to("../exports/0123abcd")
    export = folder / "hf/record.json"
    return scoring_launch(
        recipe, "rlvr1", site, export, folder / "val-split.jsonl", folder / "h", folder / "rows.jsonl"
    )


def test_the_driver_collects_on_the_export_and_neither_resumes_nor_saves(recipe_with, tmp_path):
    text = driver_command(launch_of_scoring(recipe_with(held_out=True), tmp_path))
    told = text[text.index("exec python") :].replace(" \\\n", "").split()
    assert f"policy.model_name={tmp_path}/exports/0123abcd" in told
    assert f"data.validation.data_path={tmp_path}/rows.jsonl" in told
    assert f"checkpointing.checkpoint_dir={tmp_path}/h/no-checkpoints" in told
    assert told[-3:] == [
        "++env.nemo_gym.is_trajectory_collection=true",
        "++grpo.val_at_start=true",
        "++checkpointing.enabled=false",
    ]


def runtime_on(recipe, release: str) -> Runtime:
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    return Runtime("rlvr1", recipe.stages["rlvr1"], release_of(release), site)


def test_rows_of_a_generative_reward_model_are_given_as_often_as_its_cohort_is_large(recipe_with, tmp_path):
    split, tasks = tmp_path / "val-split.jsonl", tmp_path / "rows.jsonl"
    split.write_text(rows_of(MATH, GENRM, MATH))
    requests, left_out = write_tasks(split, runtime_on(recipe_with(held_out=True), "v0.7.0"), tasks)
    assert [(request.environment, request.line, request.responses) for request in requests] == [
        (MATH, 1, 1),
        (GENRM, 2, 16),
        (MATH, 3, 1),
    ]
    assert left_out == {}
    given = [json.loads(line)["id"] for line in tasks.read_text().splitlines()]
    assert given == [0, *[1] * 16, 2]


def test_a_release_that_compares_in_training_alone_scores_the_other_rows(recipe_with, tmp_path):
    split, tasks = tmp_path / "val-split.jsonl", tmp_path / "rows.jsonl"
    split.write_text(rows_of(MATH, GENRM, GENRM))
    runtime = runtime_on(recipe_with(held_out=True), "super-v3")
    given = [RolloutTask(MATH, 1, "question 0", 1)]
    assert write_tasks(split, runtime, tasks) == (given, {GENRM: 2})
    split.write_text(rows_of(GENRM))
    tasks.unlink()
    with pytest.raises(UserError, match="only rows of a generative reward model"):
        write_tasks(split, runtime, tasks)
    assert not tasks.exists()


# What it wrote


def test_rewards_are_told_apart_by_their_agent(tmp_path):
    path = tmp_path / "trajectory_collection.jsonl"
    path.write_text(records_of(("b", 1), ("a", 0.5), ("a", True)))
    found = read_trajectories(path, asked_of("a", "b", "a"))
    assert found == {"a": [RewardedRollout(0.5, None), RewardedRollout(1.0, None)], "b": [RewardedRollout(1.0, None)]}


def test_records_without_an_agent_are_told_apart_by_the_drivers_order(tmp_path):
    path = tmp_path / "trajectory_collection.jsonl"
    path.write_text(records_of((None, 1), (None, 2), (None, 3)))
    found = read_trajectories(path, asked_of("b", "a", "b"))
    assert {name: [record.reward for record in each] for name, each in found.items()} == {"a": [3.0], "b": [1.0, 2.0]}


def test_each_row_gets_its_own_response_back_and_the_mean_of_several(tmp_path):
    path, split = tmp_path / "trajectory_collection.jsonl", tmp_path / "blend" / "val-split.jsonl"
    lines = [
        {"reward": 1.0, "response": {"output": [{"generation_str": "think"}, {"call": 1}, {"generation_str": "done"}]}},
        {"reward": 0.0, "response": {"output": [{"generation_str": "no"}]}},
        *({"reward": reward, "response": {"output": [{"generation_str": "x"}]}} for reward in (0.25, 0.75)),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = [RolloutTask("a", 1, "q1", 1), RolloutTask("b", 2, "q2", 2), RolloutTask("a", 3, "q3", 1)]
    assert answers_of(split, asked, read_trajectories(path, asked)) == [
        Answer("a", "blend", 1, "q1", 1.0, "think\ndone"),
        Answer("b", "blend", 2, "q2", 0.5),
        Answer("a", "blend", 3, "q3", 0.0, "no"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 records for 3 responses (found none; asked for a 2, b 1)"),
        (records_of(("a", 1), ("b", 1)), "2 records for 3 responses (found a 1, b 1; asked for a 2, b 1)"),
        (records_of(("a", 1), ("b", 1), ("b", 1)), "(found a 1, b 2; asked for a 2, b 1)"),
        (records_of(*[("a", 1)] * 2, *[("b", 1)] * 2), "4 records for 3 responses"),
        (records_of(("a", 1), ("a", None), ("b", 1)), ":2: reward is null, not a number"),
        (records_of(("a", 1), ("a", float("nan")), ("b", 1)), ":2: reward is NaN, not a number"),
        (records_of(("a", 1), ("a", 1)) + '{"rew', ":3: not valid JSON"),
    ],
)
def test_anything_but_one_record_a_response_is_no_score(tmp_path, text, message):
    path = tmp_path / "trajectory_collection.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_trajectories(path, asked_of("a", "a", "b"))


def test_the_parents_scores_count_only_on_the_same_rows_taken_the_same_way(tmp_path):
    path, rows, decoding = tmp_path / "eval.json", {"sha256": "1", "responses": 2, "left_out": {}}, {"seed": 1}
    table = beside_parent([Answer("a", "blend", 1, "q", 0.25)], None)
    write_json(path, evaluation_record(EXPORT, table, decoding) | {"validation": rows})
    assert is_comparable(path, rows, decoding)
    assert not is_comparable(path, rows | {"sha256": "2"}, decoding)
    assert not is_comparable(path, rows, {"seed": 2})
    assert not is_comparable(None, rows, decoding)


def test_a_stage_on_its_parents_rows_has_scores_before(recipe_with, tmp_path, monkeypatch):
    recipe_with(held_out=True)
    (tmp_path / "val-split.jsonl").write_text(rows_of(MATH, GENRM, MATH))
    write_json(tmp_path / "record.json", EXPORT)
    options = [f"--recipe={tmp_path}/super3.yaml", "--stage=rlvr1", f"--site={ROOT}/config/sites/h100.yaml"]
    options += [
        f"--export={tmp_path}/record.json",
        f"--validation={tmp_path}/val-split.jsonl",
        f"--folder={tmp_path}/f",
    ]
    monkeypatch.setattr(nemo_rl_score, "own_job", lambda: None)
    for name, reward, parent in (
        ("first", 0.25, []),
        ("second", 0.5, [f"--parent-{kind}={tmp_path}/first.{end}" for kind, end in KINDS]),
    ):
        records = {
            GENRM: [RewardedRollout(reward, "text")] * 16,
            MATH: [RewardedRollout(0.0, "no"), RewardedRollout(1.0, "yes")],
        }
        monkeypatch.setattr(nemo_rl_score, "collect", lambda *_, records=records: records)
        written = [f"--output={tmp_path}/{name}.json", f"--rollouts={tmp_path}/{name}.parquet"]
        monkeypatch.setattr("sys.argv", ["program", *options, *parent, *written])
        nemo_rl_score.main()
    record = read_json(tmp_path / "second.json")
    few = {"change": None, "change_from_first": None}
    assert record["environments"] == {
        GENRM: {"rows": 1, "before": 0.25, "after": 0.5, **few},
        MATH: {"rows": 2, "before": 0.5, "after": 0.5, **few},
    }
    assert record["mean"] == {"before": 0.375, "after": 0.5, **few}
    assert record["rollouts"] == sha256_file(tmp_path / "second.parquet")
    rollouts = pd.read_parquet(tmp_path / "second.parquet")
    assert rollouts["response_after"].tolist()[::2] == rollouts["response_before"].tolist()[::2] == ["no", "yes"]
    assert rollouts["response_after"].isna().tolist() == [False, True, False], "of several responses none is kept"
    assert record["validation"]["responses"] == 18


def test_gate_summary_and_figure_cope_without_scores_before(tmp_path):
    first = evaluation_record(EXPORT, beside_parent([Answer("a", "blend", 1, "q", 0.25)], None), {})
    unknown = {"before": None, "after": 0.25, "change": None, "change_from_first": None}
    assert (first["environments"], first["mean"]) == ({"a": {"rows": 1, **unknown}}, unknown)
    for metric in ("held_out_change", "worst_environment_change"):
        assert judge(Criterion(metric=metric, min=0), [], first).outcome == "not measured"
    assert held_out(first) == {
        "held_out_before": None,
        "held_out_after": 0.25,
        "worst_environment": None,
        "worst_change": None,
    }
    other = beside_parent([Answer("b", "blend", 1, "q", 0.5)], None)
    second = evaluation_record(EXPORT | {"stage": "rlvr2"}, other, {})
    write_environments_page([first, second], tmp_path / "page.html")
    assert "nan" not in (tmp_path / "page.html").read_text()


def test_a_stage_that_is_not_to_be_evaluated_is_refused(tmp_path, monkeypatch):
    paths = [f"--{option}=x" for option in ("site", "export", "folder", "validation", "rollouts")]
    recipe = f"--recipe={ROOT}/config/recipes/super3.yaml"
    monkeypatch.setattr("sys.argv", ["score", recipe, "--stage=rlvr1", *paths, f"--output={tmp_path}/out.json"])
    with pytest.raises(UserError, match=r"super3.yaml: .*evaluation\.held_out"):
        nemo_rl_score.main()
    assert not (tmp_path / "out.json").exists()
