"""Gates judge by what was measured: steps in windows, held-out changes with their intervals."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from scripts.errors import UserError
from scripts.evaluate import gate
from scripts.evaluate.gate import criteria_record, judge, judge_steps, refuse_divergence
from scripts.evaluate.results import (
    Answer,
    beside_model,
    beside_parent,
    evaluation_record,
    format_mean,
)
from scripts.files import read_json, write_json
from scripts.recipe.criteria import Criterion
from scripts.recipe.load import load_recipe
from scripts.rows.prompts import prompt_for_reading
from scripts.stage.bootstrap import changes
from scripts.stage.tables import write_metrics, write_table
from scripts.stage.training_folder import TrainingFolder
from tests.cases import cases
from tests.conftest import ROOT, SHORT

EXPORT = {"stage": "rlvr1", "step": 10, "content": "abc"}
A, B = "a_simple_agent", "b_simple_agent"


def steps_of(**columns) -> list[dict]:
    length = len(next(iter(columns.values())))
    return [{"step": place + 1} | {name: each[place] for name, each in columns.items()} for place in range(length)]


def answers(**rewards) -> list[Answer]:
    """Rows of blend `rows`, by environment, with the rewards of the responses to them."""
    named = [(name, reward) for name, each in rewards.items() for reward in each]
    return [
        Answer(name, "rows", line, f"question {line}", float(reward), f"answer {line}", 3, False)
        for line, (name, reward) in enumerate(named, start=1)
    ]


def chain(*rewards: dict) -> list:
    """The tables of stages that start from each other; the first starts from a fresh model."""
    tables = [beside_model(answers(**rewards[1]), answers(**rewards[0]))]
    for each in rewards[2:]:
        tables.append(beside_parent(answers(**each), tables[-1]))
    return tables


# The bootstrap


@pytest.mark.slow
def test_intervals_hold_the_true_change_about_as_often_as_they_say():
    generator = np.random.default_rng(7)
    truth, rounds, held = 0.1, 300, Counter()
    for _ in range(rounds):
        rows = {name: generator.choice([-1.0, 0, 1], size=60, p=[0.2, 0.5, 0.3]) for name in (A, B)}
        found, mean = changes(rows)
        held["one"] += found[A]["low"] <= truth <= found[A]["high"]
        held["mean"] += mean["low"] <= truth <= mean["high"]
        held["joint"] += all(it["joint_low"] <= truth <= it["joint_high"] for it in found.values())
    assert all(0.91 <= held[name] / rounds <= 0.98 for name in ("one", "mean", "joint")), held


def test_swapping_before_and_after_mirrors_the_interval():
    rows = np.random.default_rng(1).choice([-1.0, 0.0, 0.25, 1.0], size=40)
    (there, mean_there), (back, mean_back) = changes({A: rows}), changes({A: -rows})
    for one, other in ((there[A], back[A]), (mean_there, mean_back)):
        assert (one["value"], one["low"], one["high"]) == (-other["value"], -other["high"], -other["low"])


def test_rows_that_all_change_alike_leave_no_doubt():
    found, mean = changes({A: np.full(10, 0.5), B: np.zeros(20)})
    assert (found[A]["low"], found[A]["high"], found[B]["joint_low"]) == (0.5, 0.5, 0.0)
    assert mean == {"value": 0.25, "low": 0.25, "high": 0.25}


def test_equal_rows_give_equal_intervals_and_more_rows_narrower_ones():
    rows = np.array([1.0, -1.0, 0.0, 1.0, 0.0] * 4)
    assert changes({A: rows}) == changes({A: rows})
    few, many = (changes({A: np.tile(rows, times)})[0][A] for times in (1, 16))
    ratio = (few["high"] - few["low"]) / (many["high"] - many["low"])
    assert ratio == pytest.approx(4, rel=0.15)


def test_bounds_for_all_environments_at_once_are_wider():
    rows = {f"e{place}": np.array([1.0, -1.0, 0.0, 0.0] * 10) for place in range(8)}
    for change in changes(rows)[0].values():
        assert change["joint_low"] < change["low"] < change["high"] < change["joint_high"]


def test_rows_too_few_for_an_interval_get_none():
    found, mean = changes({A: np.zeros(9), B: np.zeros(10)})
    assert found[A] is None and found[B] is not None and mean is not None
    assert changes({A: np.zeros(1), B: np.zeros(10)})[1] is None
    assert changes({A: np.zeros(5)})[1] is None
    assert changes({}) == ({}, None)


# rollouts.parquet and eval.json


def test_each_row_stands_beside_what_the_stage_started_from_and_the_first_stage_earned():
    first, second, third = chain({A: [0, 0]}, {A: [0, 1]}, {A: [1, 1]}, {A: [0, 0.5]})
    assert first.to_pylist()[1] == {
        **{"environment": A, "split": "rows", "line": 2, "prompt": "question 2"},
        **{"response_before": "answer 2", "response_after": "answer 2"},
        **{"reward_before": 0.0, "reward_after": 1.0, "reward_first": None},
        **{"tokens_before": 3, "tokens_after": 3, "cut_before": False, "cut_after": False, "tags": None},
        **{"metrics_before": None, "metrics_after": None},
    }
    assert second.column("reward_first").to_pylist() == [0.0, 1.0]
    assert third.column("reward_before").to_pylist() == [1.0, 1.0]
    assert third.column("reward_first").to_pylist() == [0.0, 1.0]


def test_an_environments_own_metrics_stand_beside_its_scores_before_and_after():
    def measured(**metrics: float) -> list[Answer]:
        return [answer._replace(metrics=metrics) for answer in answers(**{A: [0] * 12})]

    after = measured(words=3.0, capitals=0.5)
    after[0] = after[0]._replace(metrics={"words": 5.0})
    first = beside_model(after, measured(words=2.0))
    (entry,) = evaluation_record(EXPORT, first, {})["environments"].values()
    assert entry["after"] == 0.0 and entry["metrics"].keys() == {"words", "capitals"}
    words, capitals = entry["metrics"]["words"], entry["metrics"]["capitals"]
    assert (words["rows"], words["before"], words["after"]) == (12, 2.0, round(38 / 12, 6))
    assert words["change"]["low"] >= 1
    assert (capitals["rows"], capitals["before"], capitals["after"]) == (11, None, 0.5) and capitals["change"] is None
    second = beside_parent(measured(words=4.0), first)
    assert second["metrics_before"].to_pylist() == first["metrics_after"].to_pylist()
    assert dict(second["metrics_after"].to_pylist()[0]) == {"words": 4.0}
    assert "metrics" not in evaluation_record(EXPORT, chain({A: [0]}, {A: [1]})[0], {})["environments"][A]


def test_rows_that_the_parent_was_not_scored_on_stand_alone():
    (parent,) = chain({A: [0, 0]}, {A: [0, 1]})
    moved = answers(**{A: [1, 1]})
    moved[0] = moved[0]._replace(prompt="another question")
    table = beside_parent([*moved, *answers(**{A: [1, 1, 1]})[2:]], parent)
    assert table.column("reward_before").to_pylist() == [None, 1.0, None]
    assert beside_parent(moved, None).column("reward_before").null_count == 2
    record = evaluation_record(EXPORT, table, {})
    assert record["environments"][A] == {
        **{"rows": 3, "before": None, "after": 1.0, "change": None, "change_from_first": None}
    }
    assert format_mean(record["mean"]) == "held-out mean not measured -> 1.000"


def test_the_record_has_scores_and_changes_by_environment_and_for_their_mean():
    tables = chain({A: [0] * 20, B: [0] * 10}, {A: [0] * 20, B: [1] * 10}, {A: [1] * 20, B: [1] * 5 + [0] * 5})
    record = evaluation_record(EXPORT, tables[-1], {"seed": 0})
    one = record["environments"][B]
    assert (one["rows"], one["before"], one["after"], one["change"]["value"]) == (10, 1.0, 0.5, -0.5)
    assert one["change"]["low"] < -0.5 < one["change"]["high"] < 0
    assert one["change_from_first"] == one["change"]
    assert (record["mean"]["before"], record["mean"]["after"]) == (0.5, 0.75)
    assert record["mean"]["change"]["value"] == 0.25
    assert record["decoding"] == {"seed": 0}
    first = evaluation_record(EXPORT, tables[0], {})
    assert first["mean"]["change"]["value"] == 0.5 and first["mean"]["change_from_first"] is None
    assert re.fullmatch(
        r"held-out mean 0\.500 -> 0\.750 \(\+0\.250, 95 % \+0\.\d+ to \+0\.\d+\)", format_mean(record["mean"])
    )


@cases("gates.prompts", "messages", "text")
def test_the_prompt_for_reading_is_what_the_user_said_last(messages, text):
    assert prompt_for_reading({"responses_create_params": {"input": messages}}) == text


def test_splits_that_bear_the_same_name_are_refused(tmp_path):
    pytest.importorskip("torch")
    from scripts.evaluate.score import answer_rows

    splits = [tmp_path / f"{folder}/blend/val-split.jsonl" for folder in "ab"]
    with pytest.raises(UserError, match="two lie in folders of the same name"):
        answer_rows(None, None, splits, {})


# Steps


@cases("gates.windows", "criterion", "columns", "value", "step")
def test_a_bound_is_held_against_windows_of_steps(criterion, columns, value, step):
    """A column is told as runs: a value, and for how many steps."""
    columns = {name: [value for value, count in runs for _ in range(count)] for name, runs in columns.items()}
    found = judge_steps(Criterion(**criterion), steps_of(**columns))
    assert (found.value, found.step) == (pytest.approx(value), step)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_number_that_is_none_breaks_every_bound(broken):
    steps = steps_of(grad_norm=[1.0] * 12 + [broken] * 8)
    for bound in ({"max": 1e9}, {"min": -1e9}):
        result = judge(Criterion(metric="max_grad_norm", **bound), steps, None)
        assert (result.outcome, result.step) == ("stop", 13)
        assert "max_grad_norm is not finite" in result.says and result.value is None


def test_steps_that_were_not_measured_are_no_steps():
    kl = [None, 0.2, None, 0.2]
    assert judge_steps(Criterion(metric="max_kl", max=0.1), steps_of(kl=kl)).step == 2
    result = judge(Criterion(metric="max_kl", max=0.1), steps_of(kl=[None] * 4), None)
    assert (result.outcome, result.value) == ("not measured", None)
    assert "loads no reference model" in result.says and "entropy_ratio" in result.says


def running(tmp_path, **columns):
    """A run directory with these steps in its log."""
    with (tmp_path / "metrics.jsonl").open("w") as log:
        log.writelines(json.dumps(entry) + "\n" for entry in steps_of(**columns))
    return tmp_path


def test_a_running_stage_that_diverges_is_ended_with_its_curves_at_hand(tmp_path):
    run = running(tmp_path, kl=[0.01] * 8 + [0.5] * 6)
    bound = Criterion(metric="max_kl", max=0.1)
    refuse_divergence("rlvr1", [bound], TrainingFolder(run), last_step=8)
    told = r"rlvr1: stopped.*max_kl is 0\.304, max 0\.1 .*first at step 9; mend .* steps are in \S+/metrics\.jsonl$"
    with pytest.raises(UserError, match=told):
        refuse_divergence("rlvr1", [bound], TrainingFolder(run), last_step=11)


@cases("gates.going_on", "criterion")
def test_a_running_stage_goes_on_where_its_gate_may_still_let_it_pass(tmp_path, criterion):
    refuse_divergence(
        "s", [Criterion(**criterion)], TrainingFolder(running(tmp_path, kl=[0.5] * 12, reward_std=[0.3] * 12)), 12
    )


def test_a_running_stage_is_not_judged_before_its_windows_are_full(tmp_path):
    bound, run = Criterion(metric="min_reward_std", min=0.1), running(tmp_path, reward_std=[0.0] * 10)
    refuse_divergence("s", [bound], TrainingFolder(run), last_step=9)
    with pytest.raises(UserError, match=r"min_reward_std is 0, min 0\.1"):
        refuse_divergence("s", [bound], TrainingFolder(run), last_step=10)


def test_a_stage_in_training_has_the_default_bounds_on_rollouts_that_its_gate_leaves_open():
    stage = load_recipe(SHORT).graph["rlvr1"].settings
    bounds = [bound.metric for bound in stage.running_gate[len(stage.gate) :]]
    assert bounds == ["peak_gen_kl_error", "peak_mismatch_share", "max_failed_share", "max_unjudged_share"]
    own = stage.model_copy(update={"gate": [Criterion(metric="peak_gen_kl_error", max=9)]})
    assert [(bound.metric, bound.max) for bound in own.running_gate].count(("peak_gen_kl_error", 0.5)) == 0
    assert stage.model_copy(update={"default_gate": False}).running_gate == stage.gate
    sampling = stage.policy.generation.model_copy(update={"top_k": 5})
    renormalized = stage.model_copy(update={"policy": stage.policy.model_copy(update={"generation": sampling})})
    assert [bound.metric for bound in renormalized.running_gate[len(stage.gate) :]] == bounds[1:]


# Held-out changes


def record_of(changes_of: dict[str, tuple[float, float, float]], mean: tuple[float, float, float]) -> dict:
    """An eval.json with these changes (value, low, high); jointly each is 0.1 less sure on both sides."""

    def change(value, low, high):
        return {"value": value, "low": low, "high": high, "joint_low": low - 0.1, "joint_high": high + 0.1}

    def entry(values):
        return {"rows": 50, "before": 0.5, "after": 0.5, "change": change(*values), "change_from_first": None}

    return {"environments": {name: entry(each) for name, each in changes_of.items()}, "mean": entry(mean)}


@cases("gates.intervals", "interval", "bounds", "outcome", "undecided")
def test_a_bound_is_broken_when_the_whole_interval_lies_beyond_it(interval, bounds, outcome, undecided):
    result = judge(Criterion(metric="held_out_change", **bounds), [], record_of({A: interval}, interval))
    assert (result.outcome, "undecided" in result.says) == (outcome, undecided)
    assert [result.value, result.low, result.high] == interval
    of_one = judge(
        Criterion(metric="held_out_change", environment=A, **bounds), [], record_of({A: interval}, (0, 0, 0))
    )
    assert (of_one.outcome, of_one.environment) == (outcome, A)


def test_the_worst_environment_is_judged_by_bounds_that_hold_for_all():
    noisy, sure = (-0.3, -0.7, 0.1), (-0.2, -0.25, -0.15)
    evaluation = record_of({A: noisy, B: sure}, (0, 0, 0))
    regression = Criterion(metric="worst_environment_change", min=0)
    result = judge(regression, [], evaluation)
    assert (result.outcome, result.environment, result.high) == ("stop", B, pytest.approx(-0.05))
    both = judge(regression, [], record_of({A: sure, B: sure}, (0, 0, 0)))
    assert both.environment == A and both.says.endswith(f"; also broken by {B}")
    evaluation["environments"][B]["change"] |= {"joint_high": 0.01}
    result = judge(regression, [], evaluation)
    assert result.outcome == "pass" and "undecided" in result.says


@pytest.mark.slow
def test_of_many_environments_that_did_not_change_the_worst_seldom_looks_like_a_regression():
    generator, alarms, rounds = np.random.default_rng(3), 0, 60
    regression = Criterion(metric="worst_environment_change", min=0, action="warn")
    for _ in range(rounds):
        rows = {f"e{place}": generator.choice([0, 1], size=40) for place in range(12)}
        after = {name: generator.choice([0, 1], size=40) for name in rows}
        (table,) = chain(rows, after)
        alarms += judge(regression, [], evaluation_record(EXPORT, table, {})).outcome == "warn"
    assert alarms / rounds <= 0.1


@cases("gates.unknown", "criterion", "why")
def test_a_change_that_is_not_known_says_why(criterion, why):
    evaluation = record_of({A: (0, 0, 0), B: (0, 0, 0)}, (0, 0, 0))
    evaluation["mean"] |= {"before": None, "change": None}
    evaluation["environments"][B]["change"] = None
    result = judge(Criterion(metric="held_out_change", min=0, **criterion), [], evaluation)
    assert (result.outcome, result.value) == ("not measured", None) and result.says.endswith(why)
    assert judge(Criterion(metric="held_out_change", min=0), [], None).says.endswith("the stage has no held-out scores")


# The verdict


def test_the_verdict_is_the_gravest_and_what_was_not_measured_is_a_warning():
    outcomes = {"broken": {"max": 0.1}, "kept": {"max": 1}}

    def verdict(*criteria):
        given = [Criterion(metric="max_grad_norm", **outcomes[name], action=action) for name, action in criteria]
        return criteria_record("s", given, [judge(it, steps_of(grad_norm=[0.5] * 10), None) for it in given])["verdict"]

    assert verdict() == verdict(("kept", "stop")) == "pass"
    assert verdict(("broken", "warn"), ("kept", "stop")) == "warn"
    assert verdict(("broken", "warn"), ("broken", "stop")) == "stop"
    unknown = Criterion(metric="max_kl", max=1)
    assert criteria_record("s", [unknown], [judge(unknown, [], None)])["verdict"] == "warn"


def test_the_gate_writes_the_verdict_alone_and_beside_it_what_it_rests_on(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(
        SHORT.read_text().replace(
            "rlvr1: {algorithm: grpo,",
            "rlvr1: {gate: [{metric: max_grad_norm, max: 1}, {metric: held_out_change, min: -0.5, action: warn}],"
            " algorithm: grpo,",
        )
    )
    with (tmp_path / "metrics.jsonl").open("w") as log:
        log.writelines(json.dumps(entry) + "\n" for entry in steps_of(grad_norm=[0.5] * 10 + [4.0] * 2))
    write_metrics(tmp_path / "metrics.jsonl", tmp_path / "metrics.parquet", 12)
    (table,) = chain({A: [1] * 12}, {A: [0] * 12})
    write_table(table, tmp_path / "rollouts.parquet")
    write_json(tmp_path / "eval.json", evaluation_record(EXPORT, table, {}))
    files = (tmp_path / name for name in ("metrics.parquet", "criteria.json", "gate.json", "eval.json"))
    gate.main(tmp_path / "recipe.yaml", "rlvr1", *files)
    assert read_json(tmp_path / "gate.json") == {"stage": "rlvr1", "verdict": "stop"}
    record = read_json(tmp_path / "criteria.json")
    assert (record["stage"], record["verdict"]) == ("rlvr1", "stop")
    steps, held_out = record["criteria"]
    assert list(steps) == list(held_out)
    assert (steps["metric"], steps["value"], steps["max"], steps["outcome"]) == ("max_grad_norm", 1.9, 1, "stop")
    assert (steps["step"], steps["figure"], steps["low"]) == (11, "rlvr1/stage.html", None)
    assert (held_out["value"], held_out["low"], held_out["high"], held_out["outcome"]) == (-1, -1, -1, "warn")
    assert (held_out["step"], held_out["figure"]) == (None, "rlvr1/stage.html")
    said = capsys.readouterr().out
    assert "rlvr1: stop: max_grad_norm is 1.9, max 1 (means of 5 steps), first at step 11\n" in said
    assert said.endswith("rlvr1: the gate says stop\n")


UNIFORM = np.log(261)


@pytest.mark.parametrize(
    ("loss", "switch", "verdict"),
    [
        ([5.6 - 0.1 * step for step in range(12)], "", "pass"),
        ([2.0] * 6 + [UNIFORM] * 6, "", "stop"),
        ([2.0] * 11 + [float("nan")], "", "stop"),
        ([2.0] * 6 + [2.2] * 6, "", "warn"),
        ([2.0] * 6 + [UNIFORM] * 6, "default_gate: false, ", "pass"),
        ([2.0] * 6 + [UNIFORM] * 6, "gate: [{metric: final_loss, max: 9}, {metric: loss_ratio, max: 9}], ", "pass"),
        ([2.0] * 3 + [UNIFORM] * 6, "", "pass"),
    ],
    ids=["falls", "uniform", "nan", "rises", "off", "own bounds", "few steps"],
)
def test_sft_is_judged_by_its_loss_unless_the_recipe_says_otherwise(tmp_path, loss, switch, verdict):
    recipe = (ROOT / "config/recipes/tiny.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(recipe.replace("sft: {algorithm: sft", f"sft: {{{switch}algorithm: sft"))
    with (tmp_path / "metrics.jsonl").open("w") as log:
        log.writelines(json.dumps(entry) + "\n" for entry in steps_of(loss=loss))
    write_metrics(tmp_path / "metrics.jsonl", tmp_path / "metrics.parquet", len(loss))
    files = (tmp_path / name for name in ("metrics.parquet", "criteria.json", "gate.json"))
    gate.main(tmp_path / "recipe.yaml", "sft", *files)
    record = read_json(tmp_path / "criteria.json")
    assert record["verdict"] == read_json(tmp_path / "gate.json")["verdict"] == verdict
    assert all(criterion.get("default") for criterion in record["criteria"]) or "gate:" in switch


@cases("gates.meaningless", "criterion")
def test_a_criterion_that_means_nothing_is_refused(criterion):
    with pytest.raises((ValueError, UserError)):
        Criterion(**criterion)


def test_a_criterion_on_an_environment_that_is_not_scored_is_refused_by_its_place(tmp_path):
    gate_of_sft = "    gate: [{metric: held_out_change, environment: genrm_simple_agents, min: 0}]"
    (tmp_path / "recipe.yaml").write_text(
        SHORT.read_text().replace("    algorithm: sft\n", f"    algorithm: sft\n{gate_of_sft}\n", 1)
    )
    said = r"stages.sft.gate.0.environment: no held-out environment is named genrm_simple_agents; did you mean genrm_simple"
    with pytest.raises(UserError, match=said):
        load_recipe(tmp_path / "recipe.yaml")
