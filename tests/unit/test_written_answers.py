"""Recipes whose stages learn from written answers: what they need, and what their held-out rows are for."""

import json
import math

import pytest
import yaml

from scripts.errors import UserError
from scripts.evaluate.choose import rank, words_of
from scripts.evaluate.gate import judge
from scripts.files import read_json, write_json
from scripts.recipe.criteria import Criterion
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.stage_settings import Checkpointing
from scripts.recipe.stop_when import StopWhen
from scripts.report.card import model_card
from scripts.stage.measured import held_out_loss, trained_steps
from scripts.stage.paths import StagePaths
from scripts.stage.provenance import step_text
from scripts.stage.stopping import ending_of, words_of_selected
from scripts.stage.store import prune_checkpoints
from scripts.stage.tables import METRICS, read_table, write_metrics
from scripts.stage.training_folder import TrainingFolder
from scripts.train.preflight import checkpoints_at_once
from tests.conftest import ROOT, refusal
from tests.stages import checkpoint_record

ALONE = ROOT / "tests/alone.yaml"
SHORT = ROOT / "tests/short.yaml"


@pytest.fixture
def written(tmp_path):
    """Write a test's recipe with other keys, None to leave a key out; return the path."""

    def write(recipe=ALONE, **changes):
        values = yaml.safe_load(recipe.read_text()) | changes
        path = tmp_path / "recipe.yaml"
        kept = {key: value for key, value in values.items() if value is not None}
        path.write_text(yaml.safe_dump(kept, sort_keys=False))
        return path

    return write


@pytest.mark.parametrize("evaluation", [None, {}, {"tasks": []}])
def test_stages_that_learn_from_written_answers_need_no_evaluation_and_no_prompts(written, evaluation):
    recipe = load_recipe(written(evaluation=evaluation))
    assert not any(stage.is_scored for stage in recipe.graph.order) and not recipe.graph.scored_rows


@pytest.mark.parametrize("evaluation", [None, {}, {"tasks": []}])
def test_a_stage_that_samples_its_own_answers_is_refused_with_the_lines_that_judge_it(written, evaluation):
    says = refusal(load_recipe, written(SHORT, evaluation=evaluation))
    assert "rlvr1, rlhf would be judged by nothing held out" in says
    *_, section, key = says.splitlines()
    pasted = yaml.safe_load(f"{section}\n{key}")
    assert load_recipe(written(SHORT, **pasted)).graph["rlvr1"].is_scored


def test_responses_to_held_out_prompts_are_refused_where_no_blend_has_prompts(written):
    says = refusal(load_recipe, written(evaluation={"max_new_tokens": 8}))
    assert "no blend of prompts to take held-out rows from; leave max_new_tokens out" in says


def entries(*losses, **more):
    """Logged steps of these validation losses, None where a step measured none, the first from before the first step."""
    rows = [{"step": step, "validation_loss": loss, "validation_rows": 5} for step, loss in enumerate(losses)]
    return [rows[0] | more] + [row | {"seconds": 1.0, "loss": 2.0} | more for row in rows[1:]]


def test_the_figures_before_and_after_are_those_of_the_first_and_the_last_measured_step():
    found = held_out_loss(entries(3.0, None, 2.0, None, 1.5), last_step=4)
    assert found == {"rows": 5, "step": 4, "loss": {"before": 3.0, "after": 1.5, "change": -1.5}}
    assert held_out_loss(entries(3.0, None, 2.0, None, 1.5), last_step=3)["loss"]["after"] == 2.0
    assert held_out_loss(entries(3.0, None), last_step=1)["loss"] == {"before": 3.0, "after": None, "change": None}
    assert held_out_loss(entries(3.0, 2.0)[1:], last_step=1)["loss"]["before"] is None
    assert held_out_loss(entries(None, None), last_step=1) is None


def test_what_was_measured_before_the_first_step_is_no_training_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries(3.0, None, 2.0)))
    write_metrics(log, tmp_path / "metrics.parquet", 2)
    rows = read_table(tmp_path / "metrics.parquet", METRICS).to_pylist()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["step"] for row in trained_steps(rows)] == [1, 2]


GATES = [
    ("final_validation_loss", {"max": 2.1}, "pass", 2.0),
    ("validation_loss_change", {"max": 0}, "pass", -1.0),
    ("validation_loss_change", {"max": -1.5}, "stop", -1.0),
    ("validation_loss_ratio", {"max": 0.7}, "pass", 2 / 3),
    ("validation_margin_change", {"min": 0.1}, "stop", 0.0),
    ("validation_accuracy_change", {"min": 0.1}, "not measured", None),
]


@pytest.mark.parametrize(("metric", "bounds", "outcome", "value"), GATES)
def test_a_gate_judges_the_figures_of_held_out_rows_and_their_change(metric, bounds, outcome, value):
    steps = entries(3.0, None, 2.0, validation_margin=0.5)
    found = judge(Criterion(metric=metric, **bounds), steps, None)
    assert found.outcome == outcome and found.value == (value if value is None else pytest.approx(value))


def test_a_change_of_rows_that_were_measured_once_is_not_measured():
    for metric in ("validation_loss_change", "validation_loss_ratio"):
        assert judge(Criterion(metric=metric, max=1), entries(3.0, None), None).outcome == "not measured"


def test_when_rows_are_measured_is_no_part_of_what_is_trained(written):
    plain = load_recipe(written())
    asked = {"val_period": 5, "val_batches": 2, "val_at_start": False, "val_at_end": False}
    stages = yaml.safe_load(ALONE.read_text())["stages"]
    for stage in stages.values():
        stage[stage["algorithm"]] |= asked
    other = load_recipe(written(stages=stages))
    for name in plain.stages:
        assert other.stages[name].section.val_period == 5
        assert resolve_stage(other, name).content == resolve_stage(plain, name).content


def test_nothing_is_measured_where_nothing_is_asked(written):
    stages = yaml.safe_load(ALONE.read_text())["stages"]
    stages["sft"]["sft"] |= {"val_at_start": False, "val_at_end": False}
    stages["dpo"]["dpo"] |= {"val_batches": 0}
    recipe = load_recipe(written(stages=stages))
    assert [name for name, stage in recipe.stages.items() if stage.validates] == ["kto", "rm"]


def ended(losses, **settings):
    """The end of a training whose held-out rows gave these losses at steps 2, 4 and so on, planned to step 20."""
    steps = [{"step": 0, "validation_loss": 0.1}]
    for number, loss in enumerate(losses, start=1):
        steps += [{"step": 2 * number - 1, "seconds": 1.0}]
        steps += [{"step": 2 * number, "seconds": 1.0, "validation_loss": loss}]
    found = ending_of(steps, StopWhen.of_config({"val_period": 2} | settings), 20)
    return found and (found.last, found.best, found.value)


ENDINGS = {
    "goes on while it improves": ([5, 4, 3], {"patience": 1}, None),
    "ends after so many without an improvement": ([5, 4, 4.5, 4.2], {"patience": 2}, (8, 4, 4)),
    "a later improvement begins the count anew": ([5, 6, 4, 6], {"patience": 2}, None),
    "an equal value is none, and the first is the best": ([5, 5, 5], {"patience": 2}, (6, 2, 5)),
    "a small improvement does not count, but is the best": (
        [5, 4.9, 4.8],
        {"patience": 2, "min_change": 0.5},
        (6, 6, 4.8),
    ),
    "NaN is no improvement": ([5, math.nan, math.nan], {"patience": 2}, (6, 2, 5)),
    "only NaN has no best": ([math.nan, math.nan], {"patience": 1}, None),
    "the planned step ends it": ([*range(20, 10, -1)], {"patience": 3}, (20, 20, 11)),
    "the best may lie before the planned step": ([9, 8, 1, 7, 6, 5, 4, 3, 2, 2], {"patience": 9}, (20, 6, 1)),
    "what came before the first step counts for nothing": ([5, 4], {"patience": 2}, None),
}


@pytest.mark.parametrize(("losses", "settings", "end"), ENDINGS.values(), ids=ENDINGS)
def test_a_training_ends_by_what_its_held_out_rows_gave(losses, settings, end):
    assert ended(losses, **settings) == end


def test_of_accuracy_the_highest_is_best_and_other_steps_count_for_nothing():
    rows = [(1, 0.9), (2, 0.5), (3, 1.0), (4, 0.4), (6, 0.3)]
    steps = [{"step": step, "seconds": 1.0, "validation_accuracy": value} for step, value in rows]
    stopping = StopWhen.of_config({"metric": "validation_accuracy", "val_period": 2, "patience": 2})
    found = ending_of(steps, stopping, 20)
    assert (found.last, found.best, found.value) == (6, 2, 0.5)


STOPPED = {"sft": {"max_num_steps": 12, "val_period": 3}, "stop_when": {"patience": 2}}


def stopped(written, name="sft", **changes):
    """The path of the recipe with a stage that may end early."""
    stages = yaml.safe_load(ALONE.read_text())["stages"]
    stages[name] |= STOPPED | changes if name == "sft" else changes
    return written(stages=stages)


def test_what_may_end_a_stage_is_part_of_its_identity_with_the_steps_that_are_measured(written):
    plain = resolve_stage(load_recipe(written()), "sft")
    assert "stop_when" not in plain.values()
    contents = {plain.content}
    for changes in ({}, {"stop_when": {"patience": 3}}, {"sft": {"max_num_steps": 12, "val_period": 4}}):
        config = resolve_stage(load_recipe(stopped(written, **changes)), "sft")
        assert config.stopping.val_period == config.values()["stop_when"]["val_period"] in (3, 4)
        contents.add(config.content)
    assert len(contents) == 4
    off = {"sft": {"max_num_steps": 12, "val_period": 3, "val_at_start": False}}
    same = resolve_stage(load_recipe(stopped(written, **off)), "sft")
    assert same.content == resolve_stage(load_recipe(stopped(written)), "sft").content


MISFITS = [
    ("sft", {"sft": {"max_num_steps": 12}}, "needs sft.val_period, the steps between two measurements"),
    ("sft", {"stop_when": {"metric": "validation_accuracy"}}, "sft measures validation_loss, not validation_accuracy"),
    ("kto", {"stop_when": {"metric": "validation_accuracy"}}, "kto measures validation_loss, validation_margin, not"),
    ("sft", {"stop_when": {"patiense": 2}}, "did you mean patience?"),
    ("sft", {"sft": {"max_num_steps": 12, "val_period": -2}}, "val_period"),
]


@pytest.mark.parametrize(("name", "changes", "says"), MISFITS)
def test_a_stage_that_could_not_end_early_is_refused(written, name, changes, says):
    assert says in refusal(load_recipe, stopped(written, name, **changes))


def test_an_earlier_checkpoint_of_a_stage_that_may_end_before_it_is_refused(written):
    stages = yaml.safe_load(ALONE.read_text())["stages"]
    stages["sft"] |= STOPPED | {"checkpointing": {"save_period": 3}}
    stages["dpo"]["parent"] = {"stage": "sft", "checkpoint": 9}
    assert "stop_when may end it before step 9" in refusal(load_recipe, written(stages=stages))


BEST = [
    ("sft", "validation_loss", None),
    (
        "sft",
        "validation_accuracy",
        "measures no validation_accuracy of held-out rows, by which to choose (it has: validation_loss)",
    ),
    ("rm", "validation_accuracy", None),
    ("sft", "held_out_mean", "by which the best is to be chosen; say best: validation_loss"),
    ("sft", "validation_los", "did you mean validation_loss?"),
]


@pytest.mark.parametrize(("name", "by", "says"), BEST)
def test_the_best_variant_is_chosen_by_a_figure_that_its_stage_measures(written, name, by, says):
    stages = yaml.safe_load(ALONE.read_text())["stages"]
    kept = {"sft": stages["sft"]} if name == "sft" else stages
    kept[name] |= {"sweep": {"seed": [1, 2]}, "best": by}
    path = written(stages=kept)
    if says is None:
        assert [choice.by for choice in load_recipe(path).choices.values()] == [by]
    else:
        assert says in refusal(load_recipe, path)


def test_checkpoints_are_kept_by_what_held_out_rows_gave_and_the_best_is_kept_besides(tmp_path):
    run = tmp_path / "store/0123"
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: None}
    lines = [{"step": step, "seconds": 1.0, "validation_loss": loss} for step, loss in losses.items()]
    for step in losses:
        write_json(run / f"checkpoints/step_{step}/files.json", {})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {"keep_last_k": 1, "keep_top_k": 2, "metric_name": "val:loss", "higher_is_better": False}
    assert prune_checkpoints(TrainingFolder(run), Checkpointing(**kept)) == [2, 8]
    assert prune_checkpoints(TrainingFolder(run), Checkpointing(keep_last_k=1), best=4) == [6]


def candidate(results, name, losses, section=None, **validated):
    """A published variant of SFT whose held-out rows gave these losses before the first step and at each step."""
    paths = StagePaths(results / name)
    last = len(losses) - 1
    write_json(paths.record, checkpoint_record(name, last))
    write_json(paths.export_record, {"stage": name, "step": last, "identity": name, "content": name, "files": {}})
    write_json(paths.gate, {"stage": name, "verdict": "pass"})
    log = paths.directory / "log.jsonl"
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries(*losses, **validated)))
    write_metrics(log, paths.metrics, last)
    policy = {"max_total_sequence_length": 64, "tokenizer": {}}
    config = {"backend": "trl", "algorithm": "dpo", "dpo": {"max_num_steps": last} | (section or {}), "policy": policy}
    paths.config.write_text(yaml.safe_dump(config))
    return paths


def test_the_lowest_validation_loss_is_best_and_the_highest_accuracy(tmp_path):
    folders = [
        candidate(tmp_path, "a", [3.0, 2.0, 1.5], validation_accuracy=0.5),
        candidate(tmp_path, "b", [3.0, 2.0, 1.0, 1.2], validation_accuracy=0.9),
        candidate(tmp_path, "c", [3.0, 1.2], validation_accuracy=0.7),
    ]
    found = rank(folders, "validation_loss")
    assert [(each["name"], each["score"], each["tied"]) for each in found] == [
        ("b", 1.2, False),
        ("c", 1.2, True),
        ("a", 1.5, False),
    ]
    choice = {"stage": "s", "by": "validation_loss", "chosen": ["b"], "candidates": found}
    assert words_of(choice) == "s: b chosen among 3 by validation_loss (lowest 1.200); tied: c"
    assert [each["name"] for each in rank(folders, "validation_accuracy")] == ["b", "c", "a"]


def test_a_candidate_with_another_loss_or_other_rows_or_none_at_its_checkpoint_is_left_out(tmp_path):
    folders = [
        candidate(tmp_path, "a", [3.0, 2.0]),
        candidate(tmp_path, "unmeasured", [3.0, 1.0, None]),
        candidate(tmp_path, "other-beta", [3.0, 1.0], section={"reference_policy_kl_penalty": 0.5}),
        candidate(tmp_path, "other-rows", [3.0, 1.0], validation_rows=3),
        candidate(tmp_path, "nan", [3.0, math.nan]),
    ]
    found = {each["name"]: each["left_out"] for each in rank(folders, "validation_loss")}
    assert found["a"] is None
    assert found["unmeasured"] == "its held-out rows were not measured at step 2"
    assert found["nan"] == "its validation_loss is not finite"
    assert "on other rows, or asked otherwise" in found["other-beta"] and "asked otherwise" in found["other-rows"]
    with pytest.raises(UserError, match="none of 1 candidates can be chosen by validation_accuracy"):
        rank(folders[:1], "validation_accuracy")


def test_what_is_published_of_a_stage_that_ended_early_is_told_in_words():
    selected = {"metric": "validation_loss", "publish": "best", "best": 4, "value": 1.25, "last": 8, "planned": 20}
    says = words_of_selected({"step": 4, "selected": selected})
    assert says == "step 4, the best by validation_loss (1.25); stopped at step 8 of 20"
    says = words_of_selected({"step": 8, "selected": selected | {"publish": "last"}})
    assert says == "step 8, the last; step 4 is the best by validation_loss (1.25); stopped at step 8 of 20"
    says = words_of_selected({"step": 4, "selected": selected | {"last": 20}})
    assert says.endswith("; trained to step 20")
    assert step_text({"step": 4, "selected": selected}) == "4 of 8" and words_of_selected({"step": 4}) == ""


def test_room_for_checkpoints_counts_those_of_each_measurement_and_the_best():
    few, stopping = Checkpointing(save_period=10, keep_last_k=1), StopWhen.of_config({"val_period": 5})
    assert (checkpoints_at_once(few, 100), checkpoints_at_once(few, 100, stopping)) == (2, 3)
    everything = Checkpointing(save_period=10)
    assert (checkpoints_at_once(everything, 100), checkpoints_at_once(everything, 100, stopping)) == (10, 30)


def test_the_card_of_a_stage_without_prompts_has_what_its_held_out_rows_gave(chain):
    paths = StagePaths(chain / "sft")
    record = {key: read_json(paths.export_record)[key] for key in ("stage", "step", "content")}
    figures = {"rows": 20, "step": record["step"], "loss": {"before": 5.5, "after": 1.25, "change": -4.25}}
    write_json(paths.evaluation, record | {"validation": figures})
    paths.rollouts.unlink(missing_ok=True)
    card = str(model_card(paths.directory / "hf"))
    assert "On 20 held-out rows of written answers" in card and "| validation loss | 5.500 | 1.250 |" in card
    assert "mean of the environments" not in card
