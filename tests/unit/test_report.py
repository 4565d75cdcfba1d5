"""The report's pages say what the records say, escape what comes from data, and draw it for every eye."""

import base64
import html
import math
import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from scripts.errors import UserError
from scripts.files import read_json, sha256_text, write_json
from scripts.recipe.load import parse_config
from scripts.report.chart import MOST_POINTS, Line, figures_of, line_chart
from scripts.report.compare import compare, labels_of, read_run, write_comparison
from scripts.report.overview import Lineage, write_overview
from scripts.report.page import direction, short_name
from scripts.report.pages import colour, read_variants, write_environments_page, write_sweep_page
from scripts.report.rollouts import marked, sample_rollouts, worst_and_best
from scripts.report.scores import scores_of, scores_side_by_side
from scripts.report.stage_page import main as write_stage_page
from scripts.report.trained_stage import TrainedStage, cost_of, differing_settings
from scripts.stage.paths import StagePaths
from scripts.stage.training_folder import TrainingFolder
from tests import programs
from tests.report_files import (
    MATH,
    MCQA,
    evaluation,
    rollout,
    set_times,
    step,
    write_manifest,
    write_metrics,
    write_rollouts,
    write_stage,
)


@pytest.fixture
def results(tmp_path):
    """A run of two trained stages."""
    write_stage(tmp_path, "sft", algorithm="sft")
    write_stage(tmp_path, "rlvr1", "sft")
    return tmp_path


@pytest.fixture
def metrics(tmp_path):
    """metrics.parquet as the report reads it."""

    def read(*entries):
        write_metrics(tmp_path / "metrics.parquet", list(entries))
        return pd.read_parquet(tmp_path / "metrics.parquet")

    return read


def page_of(results, stage: str) -> str:
    write_stage_page(results / stage, write_manifest(results), results / "page.html")
    return (results / "page.html").read_text()


def overview_of(results, lineage: Lineage) -> str:
    write_overview(results, lineage, results / "overview.html")
    return (results / "overview.html").read_text()


def said_by(page: str) -> str:
    """The text of a page."""
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


def chart_of(*values: float | None) -> str:
    """A chart of one line."""
    return line_chart("t", "u", [Line("", list(range(len(values))), list(values))])


def drawn(text: str) -> ElementTree.Element:
    """A drawing as its elements, their names without SVG's namespace."""
    root = ElementTree.fromstring(text)  # noqa: S314  (our own)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def points_of(line: ElementTree.Element) -> list[tuple[float, float]]:
    """The points of a drawn line."""
    return [tuple(map(float, point.split(","))) for point in line.get("points").split()]


# Charts


def test_a_chart_is_well_formed_and_says_its_values_in_words():
    svg = drawn(line_chart("a < b", "unit & more", [Line("<i>", [1, 2, 3], [0.5, None, 1.5], [0.5, 0.1, 0.5])]))
    assert svg.get("aria-label") == "a < b: <i> from 0.5 at 1 to 1.5 at 3, between 0.5 and 1.5"
    assert "".join(svg.itertext()).count("<i>") == 1


@pytest.mark.parametrize("values", [[], [None, None], [math.nan, math.inf]])
def test_a_chart_without_a_value_is_none(values):
    assert chart_of(*values) == ""


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e-7, 3e-7], [-1e6, 1e6], [math.nan, 2.0]])
def test_a_chart_of_any_scale_stays_within_its_box(values):
    svg = drawn(chart_of(*values))
    _, _, width, height = map(float, svg.get("viewBox").split())
    points = points_of(svg.find("polyline"))
    assert len(points) == sum(map(math.isfinite, values))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)


def test_a_long_line_is_thinned_but_keeps_its_spike():
    values = [0.0] * 10_000
    values[7_777] = 1.0
    heights = [y for _, y in points_of(drawn(chart_of(*values)).find("polyline"))]
    assert len(heights) <= MOST_POINTS and heights.count(min(heights)) == 1 and min(heights) < max(heights)


def test_lines_differ_by_dash_as_well_as_by_colour():
    lines = [Line(name, [1, 2], [1, 2]) for name in "abcdef"]
    curves = drawn(line_chart("t", "u", lines)).findall("polyline")
    for aspect in ("stroke", "stroke-dasharray"):
        assert len({curve.get(aspect) for curve in curves}) == len(curves) == 6


def test_a_line_without_a_value_is_not_in_the_legend_and_the_others_keep_their_colours():
    some = Line("some", [1, 2], [1e-4, 3e-4])
    first, second = (drawn(line_chart("t", "u", [Line("none", [1], values), some])) for values in ([2e-4], [None]))
    texts = {text.text for text in second.iter("text")}
    assert "none" not in texts and "some" in texts and "2e-4" in texts
    assert second.find("polyline").get("stroke") == first.findall("polyline")[1].get("stroke")


def texts_of(chart: str) -> list[str]:
    """The texts of a drawing."""
    return ["".join(text.itertext()) for text in drawn(chart).iter("text")]


def test_positive_values_over_more_than_two_decades_get_a_log_scale_that_the_axis_names():
    def chart(*values: float, log: bool = True) -> str:
        return line_chart("t", "loss", [Line("", list(range(len(values))), values)], log=log)

    svg = chart(1.0, 0.1, 0.001)
    assert "loss, log scale" in texts_of(svg) and {"0.001", "0.01", "0.1", "1"} <= {*texts_of(svg)}
    first, second, third = (y for _, y in points_of(drawn(svg).find("polyline")))
    assert third - second == pytest.approx(2 * (second - first), abs=0.2)
    for plain in (chart(1.0, 0.1, 0.02), chart(1.0, 0.001, 0.0), chart(1.0, -0.001), chart(1.0, 0.001, log=False)):
        assert "loss" in texts_of(plain)


def test_a_narrow_range_far_from_0_has_plain_ticks():
    assert {"5.8902", "5.8904"} <= {*texts_of(chart_of(5.8901, 5.8905))}


def test_a_chart_carries_its_values_for_the_pointer():
    assert drawn(chart_of(0.5, None, 0.25)).find("polyline").get("data-values") == "0:0.5 2:0.25"


def test_the_curves_show_what_was_measured_and_nothing_else_six_lines_a_chart(metrics):
    def titles(table: pd.DataFrame) -> list[str]:
        return [figure.title for figure in figures_of({"": table})]

    plain, asked = titles(metrics(step(1), step(2))), {"KL to the parent", "Sampler beside trainer"}
    assert {"Reward by environment", "Time of a step by phase"} <= {*plain} and not asked & {*plain}
    assert "Time of a step by phase" not in titles(metrics(step(1)).drop(columns=["timing", "masked_share"]))
    rewards = {f"environment{number}_simple_agent": 0.5 for number in range(14)}
    many = [title for title in titles(metrics(step(1, environment_rewards=rewards))) if "environment" in title]
    assert many == [f"Reward by environment ({place} of 3)" for place in (1, 2, 3)]
    measured = metrics(step(1, kl=0.1, token_mult_prob_error=1.02, gen_kl_error=1e-4, valid_samples=40.0))
    assert asked | {"KL of trainer to sampler", "Samples not masked out"} <= {*titles(measured)}
    rollouts = metrics(step(1, failed_share=0.1, mismatch_share=0.0, generating_share=0.6, training_share=0.3))
    new = {"Rollouts that failed", "Samples masked out for their probabilities", "Shares of a step's time"}
    assert new <= {*titles(rollouts)} and not new & {*plain}


def test_names_are_shortened_to_what_tells_them_apart():
    assert short_name(MATH) == "math_with_judge"
    assert short_name("swe_pivot_single_step_tool_use_with_argument_comparison_agent") == "swe_pivot"
    assert short_name("single_step_tool_use_with_argument_comparison_agent") == "single_step_tool_use"


# Hours


def test_hours_are_those_of_all_attempts_and_waiting_costs_nothing(tmp_path):
    TrainingFolder(tmp_path).begin_attempt(0, gpus=8)
    TrainingFolder(tmp_path).end_attempt(4, "unfinished")
    TrainingFolder(tmp_path).begin_attempt(4, nodes=0)
    TrainingFolder(tmp_path).end_attempt(4, "waited")
    TrainingFolder(tmp_path).begin_attempt(4, gpus=16)
    TrainingFolder(tmp_path).end_attempt(10, "finished")
    set_times(tmp_path, 0, 3600, 3600, 99_999, 100_000, 103_600)
    cost = cost_of(TrainingFolder(tmp_path), pd.Series([360.0] * 10))
    assert (cost.attempts, cost.hours, cost.step_hours, cost.gpu_hours, cost.at_least) == (2, 2.0, 1.0, 24.0, False)
    of_step_7, of_step_4 = (cost_of(TrainingFolder(tmp_path), pd.Series([360.0] * step)) for step in (7, 4))
    assert (of_step_7.attempts, of_step_7.hours, of_step_7.gpu_hours) == (2, 1.5, 16.0)
    assert (of_step_4.attempts, of_step_4.hours, of_step_4.gpu_hours) == (1, 1.0, 8.0)


def test_a_killed_attempt_counts_with_the_steps_it_left_and_makes_the_hours_a_bound(tmp_path):
    TrainingFolder(tmp_path).begin_attempt(0, gpus=8)
    TrainingFolder(tmp_path).begin_attempt(4, gpus=8)
    TrainingFolder(tmp_path).end_attempt(10, "finished")
    set_times(tmp_path, 0, 7200, 10_800)
    cost = cost_of(TrainingFolder(tmp_path), pd.Series([900.0] * 10))
    assert (cost.hours, cost.gpu_hours, cost.mark) == (2.0, 16.0, "≥ ")


def test_hours_of_attempts_that_tell_no_gpus_have_no_gpu_hours(tmp_path):
    lines = '{"event": "begin", "step": 0, "nodes": 1, "time": 0}\n{"event": "end", "step": 1, "outcome": "finished", "time": 36}\n'
    (tmp_path / "attempts.jsonl").write_text(lines)
    assert cost_of(TrainingFolder(tmp_path), pd.Series([36.0])).gpu_hours is None
    assert cost_of(TrainingFolder(tmp_path / "none"), pd.Series([36.0])).at_least


# Pages


def test_the_page_of_a_stage_has_every_part(results):
    scored = evaluation("rlvr1")
    scored["mean"]["change_from_first"] = {"value": -0.0625, "low": -0.5, "high": 0.375}
    write_json(results / "rlvr1/eval.json", scored)
    page = page_of(results, "rlvr1")
    assert page == page_of(results, "rlvr1")
    assert "<td>-0.062</td><td>-0.500</td><td>+0.375</td>" in page
    assert 'aria-label="+0.250, from +0.125 to +0.375"' in page
    for part in ("curves", "held-out", "gate", "rollouts", "config", "data", "time"):
        assert f'<section id="{part}"' in page
    assert "12 min</p><p>10 steps, 0.8 GPU-hours" in page
    assert "held_out_change is 0.25, at least 0.5 was wanted" in page
    assert re.search(r'<th scope="row">algorithm</th><td class="long">sft</td><td class="long">grpo</td>', page)
    assert "<td>3</td><td>3</td><td>0.750</td>" in page


def test_a_stage_without_parent_scores_or_rollouts_has_a_page_without_these_parts(results):
    for name in ("eval.json", "rollouts.parquet", "criteria.json"):
        (results / "sft" / name).unlink()
    page = page_of(results, "sft")
    assert "All settings: the stage has no parent" in page
    assert not re.search(r'<section id="(held-out|gate|rollouts)"', page) and "None" not in page and "nan" not in page


def test_the_steps_of_a_stage_can_be_saved_as_csv(results):
    data = re.search(r'download="rlvr1-steps.csv" href="data:text/csv;base64,([^"]+)"', page_of(results, "rlvr1"))[1]
    table = pd.read_csv(pd.io.common.BytesIO(base64.b64decode(data)))
    assert table["step"].tolist() == list(range(1, 11)) and table[f"reward/{MCQA}"].tolist() == [0.25] * 10
    assert table["seconds/update"].tolist() == [10.0] * 10
    assert "kl" not in table


def test_the_page_has_the_texts_of_the_rows_with_the_shares_that_are_printed_and_learnt(results):
    found = {"texts": 20, "rendered": 0.5, "learnt": 0.25, "lost": 15, "lost_lines": [3, 7]}
    arrival = {"rows": 4000, "rendered_rows": 30, "forms": 9, "unread": 0, "refused": 2, "texts": {"reasoning": found}}
    write_json(results / "rlvr1/preflight.json", {"arrival": arrival})
    page = page_of(results, "rlvr1")
    cells = re.search(r'<th scope="row">reasoning</th>(.*?)</tr>', page)[1]
    assert re.findall(r"<td[^>]*>(.*?)</td>", cells) == ["20", "0.500", "0.250", "<strong>15</strong>", "3, 7"]
    assert "30 of 4000 rows were rendered, some of each of 9 forms of rows; the template refuses 2 rows." in page


def test_what_a_model_or_a_row_says_stays_text(results):
    evil = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
    rows = [rollout(1, prompt=evil, response_before=evil, response_after=None, environment=evil, split=evil)]
    write_rollouts(results / "rlvr1", rows)
    write_metrics(results / "rlvr1/metrics.parquet", [step(1, environment_rewards={evil: 1.0})])
    (results / "rlvr1/config.yaml").write_text(f"algorithm: grpo\nbackend: trl\nnote: {evil!r}\n".replace("\\'", "''"))
    part = {"name": "chosen", "is_learnt": True, "texts": [evil, "\n"]}
    write_json(results / "rlvr1/preflight.json", {"rows": [{"line": 4, "tokens": 2, "learnt": 2, "parts": [part]}]})
    page = page_of(results, "rlvr1")
    assert '<pre class="learnt">chosen: <span class="token">&lt;script&gt;' in page
    assert "Row 4: 2 tokens, 2 learnt" in page
    assert page.count("<script>") == 1 and "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 7 and "{{ 7 * 7 }}" in page


def test_rollouts_to_read_are_those_that_changed_most_of_each_kind_and_some_at_random():
    rows = [rollout(line, before=0.5, after=line / 100) for line in range(100)]
    rows += [rollout(line, environment=MCQA, before=0.0, after=0.0) for line in range(100, 110)]
    rows += [rollout(999, environment=MCQA, reward_before=None, response_before=None)]
    samples = sample_rollouts(pd.DataFrame(rows))
    chosen = [(sample["kind"], sample["line"]) for sample in samples[:14]]
    assert chosen[:6] == [("fell", 0), ("fell", 1), ("fell", 2), ("rose", 99), ("rose", 98), ("rose", 97)]
    assert chosen[6:11] == [("zero", 100), ("zero", 101), ("zero", 102), ("same", 50), ("new", 999)]
    drawn = [sample["line"] for sample in samples if sample["is_random"]]
    again = [sample["line"] for sample in sample_rollouts(pd.DataFrame(rows)) if sample["is_random"]]
    assert len(set(drawn)) == 20 and max(drawn) > 50 and drawn == again
    assert samples[10]["reward_before"] is None and samples[10]["environment"] == "mcqa"


def test_what_only_one_response_says_is_marked_and_escaped_and_a_long_one_is_shortened():
    before, after = marked("the <b>sum</b> is 4", "the <b>sum</b> is 5!")
    assert before == "the &lt;b&gt;sum&lt;/b&gt; is <del>4</del>"
    assert after == "the &lt;b&gt;sum&lt;/b&gt; is <ins>5!</ins>"
    (sample,) = sample_rollouts(pd.DataFrame([rollout(1, response_before=None, response_after="x" * 99_999)]))
    assert len(sample["response_after"]) == 1500


def test_a_stages_page_folds_all_rollouts_but_six(results):
    write_rollouts(results / "rlvr1", [rollout(line, after=float(line % 2)) for line in range(40)])
    page = page_of(results, "rlvr1")
    shown, _, folded = page.partition("<details>")
    assert shown.count("<article") == 6 and folded.count("<article") == page.count("<article") - 6
    assert f"{folded.count('<article')} more rollouts" in folded


def test_the_worst_and_the_best_example_count_from_the_chains_start():
    first = pd.DataFrame([rollout(line, before=line / 10, after=0.5) for line in range(4)])
    last = pd.DataFrame([rollout(line, before=0.5, after=after) for line, after in enumerate((0.0, 0.9, 0.1, 0.3))])
    found = [
        (each["line"], each["reward_before"], each["reward_after"]) for each in worst_and_best(first, last, "before")
    ]
    assert found == [(2, 0.2, 0.1), (1, 0.1, 0.9)]
    assert [each["reward_before"] for each in worst_and_best(first, last, "after")] == [0.5, 0.5]
    assert len(worst_and_best(first[:1], last, "before")) == 1 and worst_and_best(first[:0], last, "before") == []


def test_settings_that_differ_are_told_with_both_values():
    differing = [("b", [[1], [2]]), ("c", [0, None]), ("d", [None, 3])]
    assert differing_settings([{"a": 1, "b": [1], "c": 0}, {"a": 1, "b": [2], "d": 3}]) == differing


def test_a_change_is_clear_when_its_interval_leaves_out_0():
    evaluations = (evaluation("a"), evaluation("a", spread=0.5), evaluation("a", None))
    clear, unclear, unknown = (scores_of(scored)[0].change for scored in evaluations)
    assert [*map(direction, (clear, unclear, unknown))] == [1, 0, 0] and unknown["value"] is None
    entry = {"before": 0.25, "after": 0.5}
    scores = scores_of({"environments": {MATH: {"rows": 1} | entry}, "mean": entry})
    assert [(score.change["value"], score.change["low"]) for score in scores] == [(0.25, None)] * 2


def test_the_heat_map_has_a_number_in_every_cell_and_marks_clear_changes(tmp_path):
    first, second = evaluation("sft", None, 0.25), evaluation("rlvr1", 0.25, 0.5)
    del second["environments"][MCQA]
    table = scores_side_by_side([first, second])
    assert list(table) == ["math_with_judge", "mcqa", "mean"] and table["mcqa"][1] is None
    costs = [{"stage": "sft", "hours": 0.5, "gpu_hours": 4.0}, {"stage": "rlvr1", "gate": "damaged"}]
    write_environments_page([first, second], tmp_path / "map.html", summary=costs)
    text = (tmp_path / "map.html").read_text()
    assert '<th scope="row">time</th><td>30 min</td><td></td>' in text
    assert '<th scope="row">GPU-hours</th><td>4</td><td></td>' in text
    assert text.count(">0.25</td>") == 3 and text.count(">0.50 ▲</td>") == 2
    assert 'title="+0.250 (+0.125 to +0.375)"' in text


def test_colours_of_the_heat_map_grow_lighter_with_the_score():
    def luminance(share: float) -> float:
        red, green, blue = bytes.fromhex(colour(share)[0][1:])
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    lights = [luminance(share / 20) for share in range(21)]
    assert lights == sorted(lights) and lights[-1] - lights[0] > 150
    assert colour(-1) == colour(0) and colour(9) == colour(1)


def test_the_overview_shows_chains_in_lines_and_where_one_branches_off(results):
    write_stage(results, "a", "sft")
    page = overview_of(results, Lineage({"sft": "", "rlvr1": "sft", "a": "sft", "c": "a"}))
    lines = [
        (re.findall(r"from (\w+)", line), re.findall(r'class="stage (\w+)" href="#stage-(\w+)"', line))
        for line in re.findall(r'<div class="chain">(.*?)</div>', page, re.DOTALL)
    ]
    assert lines == [([], [("warn", "sft"), ("warn", "rlvr1")]), (["sft"], [("warn", "a"), ("open", "c")])]
    assert 'aria-label="rlvr1: 10 steps, 12 min, 0.8 GPU-hours, gate warn, held-out change +0.25"' in page


def judged(stage: str, changes: dict[str, tuple[float, ...]]) -> dict:
    """An eval.json: by environment the score after the stage, and its change from the first with the interval."""

    def entry(after: float, value: float, low: float, high: float) -> dict:
        change = {"value": value, "low": low, "high": high}
        return {"before": None, "after": after, "change": None, "change_from_first": change}

    means = [sum(column) / len(changes) for column in zip(*changes.values(), strict=True)]
    environments = {name: {"rows": 8} | entry(*figures) for name, figures in changes.items()}
    return {"stage": stage, "environments": environments, "mean": entry(*means)}


def test_the_overview_begins_with_better_or_worse_where_by_how_much_and_at_what_cost(results):
    scores = {MATH: (0.75, 0.25, 0.2, 0.4), MCQA: (0.25, -0.25, -0.3, -0.2)}
    write_json(results / "rlvr1/eval.json", judged("rlvr1", scores))
    said = said_by(overview_of(results, Lineage({"sft": "", "rlvr1": "sft"})))
    assert "Verdict No clear change Worse in mcqa (-0.25). Better in 1 of 2, most in math_with_judge (+0.25)." in said
    assert "Mean held-out score 0.50 → 0.50 sft → rlvr1: +0.00" in said
    assert "2 of 2 stages trained, 20 steps. Gates: 2 warn." in said and "24 min 1.6 GPU-hours, 2 attempts" in said
    assert said.index("score, 2 environments") < said.index("0.50 → 0.25 ▼ -0.25") < said.index("0.50 → 0.75 ▲ +0.25")


def test_the_overview_counts_from_the_model_at_the_start_and_names_a_lone_environment(results):
    for stage, before, after in (("sft", 0.125, 0.375), ("rlvr1", 0.375, 0.75)):
        scores = evaluation(stage, before, after)
        del scores["environments"][MCQA]
        write_json(results / stage / "eval.json", scores)
        rewards = {"before": before, "after": after}
        write_rollouts(
            results / stage,
            [rollout(line, **{k: float(line < v * 16) for k, v in rewards.items()}) for line in range(16)],
        )
    page = overview_of(results, Lineage({"sft": "", "rlvr1": "sft"}))
    said = said_by(page)
    assert "Held-out score of math_with_judge 0.12 → 0.75 base model → rlvr1: +0.62 ▲95" in said
    assert "interval +0.40 to +0.87" in said and "Verdict Better" in said
    assert "base model 0.12, sft 0.38, rlvr1 0.75" in page and page.count("<figure") == 1
    assert "Mean held-out" not in said and "no environment" not in said
    assert "Worst example: math_with_judge, reward 0.00 → 0.00" in said and "Best example" in said


def test_the_overview_gives_the_reason_where_nothing_is_compared_or_rows_are_few(results):
    lineage = Lineage({"sft": "", "rlvr1": "sft"})
    for stage in ("sft", "rlvr1"):
        write_json(results / stage / "eval.json", evaluation(stage, None))
    said = said_by(overview_of(results, lineage))
    assert "No clear change An interval takes 10 held-out rows, and two of every environment." in said
    (results / "rlvr1/eval.json").unlink()
    said = said_by(overview_of(results, lineage))
    assert "Not compared Neither the start of sft nor another stage was scored." in said


def test_the_overview_tells_trained_and_untrained_stages_apart(results):
    (results / "rlvr2/run").mkdir(parents=True)
    (results / "rlvr2/run/metrics.jsonl").write_text('{"step": 7}\n{"st')
    text = overview_of(results, Lineage({"sft": "", "rlvr1": "sft", "rlvr2": "rlvr1", "rlhf": "rlvr2"}))
    assert "2 of 4 stages trained, 20 steps" in text and "1.6 GPU-hours" in text
    assert "rlvr2: unfinished, step 7" in text and "rlhf: not trained yet" in text
    assert "least gained: math_with_judge +0.250" in text and "nan" not in text


# Sweeps

GRID = {f"rlvr1.lr-{lr}.seed-{seed}": {"lr": lr, "seed": seed} for lr in (1e-4, 2e-4) for seed in (1, 2)}
SCORES = dict(zip(GRID, (0.25, 0.5, 0.75, 1.0), strict=True))  # by rate 0.375 and 0.875, by seed 0.5 and 0.75


def write_variant(results: Path, folder: str, score: float, steps: int) -> None:
    """A variant, or one as of a step, with twelve rows of which this share is right."""
    directory = write_stage(results, folder, "sft", steps=steps)
    write_json(directory / "eval.json", evaluation(folder, 0.25, score))
    rows = [rollout(line, reward_after=float(line < 12 * score)) for line in range(12)]
    write_rollouts(directory, rows)


def write_choice(results: Path, name: str, *chosen: str, by_score: dict[str, float]) -> None:
    """choice.json among folders with these scores, the first of which are chosen."""
    ranked = sorted(by_score, key=lambda folder: -by_score[folder])
    common = {"identity": "i", "content": "c", "low": None, "high": None, "difference": None, "left_out": None}
    candidates = [
        common | {"name": each, "step": 4, "score": by_score[each], "tied": place == 1}
        for place, each in enumerate(ranked)
    ]
    choice = {"stage": "rlvr1", "by": "held_out_mean", "chosen": list(chosen), "candidates": candidates}
    write_json(results / name / "choice.json", choice)


def test_a_sweeps_page_has_the_variants_by_score_with_the_words_of_choices(tmp_path):
    untrained = {"rlvr1.lr-1.seed-1": {"lr": 1}}
    for name, score in SCORES.items():
        write_variant(tmp_path, name, score, 10)
    best = max(SCORES, key=SCORES.get)
    write_choice(tmp_path, "rlvr1.best", best, by_score=SCORES)
    as_of = {f"{name}.step-4": score for name, score in SCORES.items()}
    write_choice(tmp_path, "rlvr1.checkpoints.best", "another", by_score=as_of)
    variants = read_variants(tmp_path, GRID | untrained, ["rlvr1.best", "rlvr1.checkpoints.best", "not made yet"])
    assert [variant.name for variant in variants] == [*sorted(SCORES, key=lambda name: -SCORES[name]), *untrained]
    assert variants[0].is_chosen and variants[0].notes == ["chosen by held_out_mean"]
    assert variants[1].notes == ["tied with the chosen", "tied with the chosen at step 4"] and not variants[2].notes
    write_sweep_page(tmp_path, "rlvr1", GRID | untrained, ["rlvr1.best"], tmp_path / "rlvr1/sweep.html")
    page = (tmp_path / "rlvr1/sweep.html").read_text()
    said = said_by(page)
    tiles = f"Chosen by held_out_mean {best.removeprefix('rlvr1.')} Mean held-out score 1.000 The other variants: 0.250 to 0.750"
    assert tiles in said and "Change from the parent" in said
    assert "4 of 5 variants trained, 40 steps" in said and "not trained yet" in said and page.count("<figure>") > 1
    (tmp_path / best / "metrics.parquet").write_bytes(b"cut")
    (damaged,) = (each for each in read_variants(tmp_path, GRID, []) if each.name == best)
    assert "metrics.parquet: damaged" in damaged.notes[0]


def test_the_overview_shows_a_sweep_as_one_card_and_follows_what_was_chosen(tmp_path):
    write_stage(tmp_path, "sft")
    for name, score in SCORES.items():
        write_variant(tmp_path, name, score, 10)
    best = list(GRID)[1]
    write_choice(tmp_path, "rlvr1.best-held_out_mean", best, by_score=SCORES)
    write_stage(tmp_path, "rlvr2", best)
    parents = {"sft": "", **dict.fromkeys(GRID, "sft"), "rlvr2": "rlvr1.best-held_out_mean"}
    choices = {"rlvr1.best-held_out_mean": read_json(tmp_path / "rlvr1.best-held_out_mean/choice.json")}
    lineage = Lineage(parents, dict.fromkeys(GRID, "rlvr1"), choices)
    assert lineage.cards == {"sft": "", "rlvr1": "sft", "rlvr2": "rlvr1"}
    assert lineage.chains({}) == [["sft", best, "rlvr2"]]
    page = overview_of(tmp_path, lineage)
    assert "rlvr1: 4 of 4 variants trained, scores 0.25 to 1.00" in page and "rlvr1/sweep.html" in page
    assert "6 of 6 stages trained, 60 steps" in page and page.count("<figure") == 3
    assert "rlvr2 from rlvr1.lr-0.0001.seed-2" in page and next(iter(GRID)) not in page


@pytest.mark.parametrize(
    ("parents", "chains"),
    [
        ({"a.x": "", "a.y": ""}, [["a.y"]]),  # of a sweep's end the best
        ({"a.x": "", "a.y": "", "b.x": "a.x", "b.y": "a.y"}, [["a.y", "b.y"]]),  # each of them
        ({"a.x": "", "a.y": "", "c": "a.x"}, [["a.x", "c"]]),  # one of them
        ({"c": "", "d": "c.step-4"}, [["c.step-4", "d"]]),  # an earlier checkpoint
        ({"a.x": "", "a.y": "", "c": "a.best-held_out_mean"}, [["c"]]),  # nothing is chosen yet
    ],
)
def test_chains_lead_through_one_variant_of_each_sweep(parents, chains):
    lineage = Lineage(parents, {name: name[0] for name in parents if "." in name})
    assert lineage.chains({"a.x": 0.25, "a.y": 0.5, "b.x": 0.25, "b.y": 0.5}) == chains


def test_the_summary_has_a_row_a_stage_from_its_records(results):
    row = TrainedStage(StagePaths(results / "rlvr1")).row
    assert (row["stage"], row["parent"], row["steps"], row["gate"]) == ("rlvr1", "sft", 10, "warn")
    assert (row["training_seconds"], row["hours"], row["gpu_hours"]) == (360.0, 0.2, 0.8)
    assert row["worst_environment"] == "math_with_judge" and pd.isna(row["kl_last"])


def test_a_missing_file_is_one_message_that_says_what_to_ask_for(results):
    (results / "sft/metrics.parquet").unlink()
    with pytest.raises(UserError, match=r"sft/metrics\.parquet: no such file; ask Snakemake"):
        TrainedStage(StagePaths(results / "sft")).read("row")


# Runs side by side


def test_runs_are_compared_stage_by_stage_on_the_same_axes(tmp_path):
    for run, rate in (("a", 1e-4), ("b", 1e-3)):
        write_stage(tmp_path / run, "sft")
        write_stage(tmp_path / run, "rlvr1", "sft", lr=rate)
    record, files = tmp_path / "b/rlvr1/ckpt/record.json", {"model.safetensors": {"bytes": 1, "sha256": "1" * 64}}
    write_json(record, read_json(record) | {"identity": "another", "files": files})
    better = [rollout(line, reward_after=0.75 + 0.25 * (line % 2)) for line in range(12)]
    worse = [rollout(line, reward_after=0.5 * (line % 2)) for line in range(2, 16)]
    write_rollouts(tmp_path / "a/rlvr1", worse)
    write_rollouts(tmp_path / "b/rlvr1", better)
    write_stage(tmp_path / "b", "aside", "sft")
    sft, rlvr1, alone = compare({run: read_run(tmp_path / run) for run in "ab"})
    assert (sft.name, rlvr1.name, alone.name) == ("sft", "rlvr1", "aside") and list(alone.stages) == ["b"]
    assert [stage.is_identical for stage in (sft, rlvr1, alone)] == [True, False, False]
    assert sft.differing == [] and rlvr1.differing == [("evaluation: held-out rows", [14, 12]), ("lr", [1e-4, 1e-3])]
    assert rlvr1.apart == {"b": "10 of 14 held-out rows are common"}
    assert "a from" in rlvr1.figures[0].svg and "; b from" in rlvr1.figures[0].svg
    mean, math, _ = rlvr1.held_out
    assert (mean.name, math.name, math.scores) == ("mean", "math_with_judge", [0.5, 0.5])
    assert math.changes[0] is None and math.changes[1]["value"] == 0.625, "on the ten rows that both answered"
    assert math.changes[1]["low"] > 0.5


def asked_otherwise(results: Path, way: str) -> None:
    """Change a stage's rows, length or chat template."""
    stage = write_stage(results, "sft")
    record, scores = read_json(stage / "ckpt/record.json"), evaluation("sft", 0.25, 0.75)
    record["files"] = {"model.safetensors": {"bytes": 1, "sha256": "1" * 64}}
    scores["decoding"] = {"max_new_tokens": 8 if way == "length" else 32, "temperature": 0.0, "seed": 7}
    if way == "template":
        record["chat_template"] = {"name": "terse", "sha256": "a" * 64}
    if way == "rows":
        write_rollouts(stage, [rollout(line, prompt="3 + 3?") for line in range(12)])
    write_json(stage / "ckpt/record.json", record | {"facts": record["facts"] | {"validation_split": way}})
    write_json(stage / "eval.json", scores)


@pytest.mark.parametrize(
    ("way", "reason", "differs"),
    [
        ("rows", "0 of 12 held-out rows are common", "evaluation: held-out rows"),
        ("length", "max_new_tokens 8, not 32", "evaluation: max_new_tokens"),
        ("template", "chat template terse (aaaaaaaaaaaaaaaa), not the model's own", "evaluation: chat template"),
    ],
)
def test_scores_on_other_rows_lengths_or_templates_are_never_side_by_side(tmp_path, way, reason, differs):
    write_stage(tmp_path / "a", "sft")
    scores = evaluation("sft", 0.25, 0.5) | {"decoding": {"max_new_tokens": 32, "temperature": 0.0, "seed": 0}}
    write_json(tmp_path / "a/sft/eval.json", scores)
    asked_otherwise(tmp_path / "b", way)
    write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "compare.html")
    said = html.unescape(said_by((tmp_path / "compare.html").read_text()))
    assert f"Not comparable sft: b beside a: {reason}." in said
    assert said.index("Not comparable") < said.index("What differs") < said.index(f"sft: {differs}")
    assert "sft: data: validation split" in said and "0.500 0.750" not in said
    assert "not comparable with the other runs" in said and "No clear difference" not in said


def test_a_chat_template_that_an_ancestor_named_counts_as_the_stages(tmp_path):
    record = write_stage(tmp_path, "rlvr1", "sft") / "ckpt/record.json"
    known = read_json(record)
    known["parents"][0]["chat_template"] = {"name": "terse", "sha256": "a" * 64}
    assert TrainedStage(StagePaths(tmp_path / "rlvr1")).way == {"chat template": "the model's own"}
    write_json(record, known)
    assert TrainedStage(StagePaths(tmp_path / "rlvr1")).way == {"chat template": "terse (aaaaaaaaaaaaaaaa)"}


def test_seeds_and_scores_without_a_recorded_decoding_stay_comparable(tmp_path):
    for run, decoding in (
        ("a", {"max_new_tokens": 8, "seed": 0}),
        ("b", {"max_new_tokens": 8, "seed": 1}),
        ("c", None),
    ):
        write_stage(tmp_path / run, "sft")
        scores = evaluation("sft") | ({"decoding": decoding} if decoding else {})
        write_json(tmp_path / run / "sft/eval.json", scores)
    (sft,) = compare({run: read_run(tmp_path / run) for run in "abc"})
    assert sft.apart == {}


def test_scores_by_tag_stand_on_the_stages_page_and_are_compared_where_both_runs_have_them(tmp_path):
    for run, after in (("a", 0.25), ("b", 0.75)):
        write_stage(tmp_path / run, "sft")
        write_manifest(tmp_path / run)
        scores = evaluation("sft", 0.25, after)
        scores["environments"][MATH]["tags"] = {tag: {"rows": 12} | scores["mean"] for tag in ("sums", run)}
        write_json(tmp_path / run / "sft/eval.json", scores)
        write_rollouts(tmp_path / run / "sft", [rollout(n, after=after, tags=["sums", run]) for n in range(12)])
    record = tmp_path / "b/sft/ckpt/record.json"
    write_json(record, read_json(record) | {"files": {"model.safetensors": {"bytes": 1, "sha256": "1" * 64}}})
    (sft,) = compare({run: read_run(tmp_path / run) for run in "ab"})
    found = {row.name: (row.scores, row.changes[1] and row.changes[1]["value"]) for row in sft.by_tag}
    names = [f"math_with_judge: {tag}" for tag in ("sums", "a", "b")]
    assert found == dict(zip(names, [([0.25, 0.75], 0.5), ([0.25, None], None), ([None, 0.75], None)], strict=True))
    assert "math_with_judge: sums" in page_of(tmp_path / "a", "sft")
    write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "compare.html")
    assert "Held-out scores of sft by environment and tag" in (tmp_path / "compare.html").read_text()


@pytest.mark.parametrize(
    ("file", "damage"),
    [("metrics.parquet", None), ("config.yaml", b""), ("eval.json", b"{}"), ("rollouts.parquet", b"no table")],
)
def test_a_stage_that_cannot_be_read_is_left_out_and_told(tmp_path, file, damage, capsys):
    for run in "ab":
        write_stage(tmp_path / run, "sft")
        write_stage(tmp_path / run, "rlvr1", "sft")
    path = tmp_path / "b/rlvr1" / file
    path.unlink() if damage is None else path.write_bytes(damage)
    write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    assert f"left out: {path}" in capsys.readouterr().err
    assert "Left out: rlvr1 of b" in (tmp_path / "page.html").read_text()


def test_runs_are_named_by_what_tells_their_paths_apart():
    assert labels_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert labels_of([Path("/x/results/tiny"), Path("/y/results/tiny")]) == ["x/results/tiny", "y/results/tiny"]


def test_the_config_names_runs_below_the_root_or_by_path():
    tiny, config = "results/tiny", {"recipe": "r", "site": "s", "run": "tiny"}
    for named, folders in (
        ([], []),
        ("a", ["results/a", tiny]),
        (["../other/b", "a"], ["../other/b", "results/a", tiny]),
        (["tiny", "a"], [tiny, "results/a"]),
        (["./results/tiny", "a"], [tiny, "results/a"]),
    ):
        assert parse_config(config | {"compare": named}).compared == folders


def test_the_comparison_runs_alone_and_refuses_what_it_cannot_compare(tmp_path):
    call = partial(programs.run, "scripts.commands.__main__", "compare")
    for run in "ab":
        files = {"model.safetensors": {"bytes": 1, "sha256": sha256_text(run)}}
        record = write_stage(tmp_path / run, "sft") / "ckpt/record.json"
        write_json(record, read_json(record) | {"files": files})
    page = tmp_path / "compare.html"
    assert call(tmp_path / "a", tmp_path / "b", "--output", page).returncode == 0
    assert page.read_text().count("<figure") > 5
    write_stage(tmp_path / "b", "rlvr1", "sft")
    assert call(tmp_path / "a", tmp_path / "b", "--output", page).returncode == 0
    assert "In b alone: rlvr1." in page.read_text() and 'id="stage-rlvr1"' not in page.read_text()
    (tmp_path / "empty").mkdir()
    for folders, words in ((("a", "empty"), "no readable trained stage there"), (("a",), "two to 6 different folders")):
        done = call(*(tmp_path / name for name in folders), "--output", tmp_path / "no.html")
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "no.html").exists()
