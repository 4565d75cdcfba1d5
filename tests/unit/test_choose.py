"""The best of a sweep's variants is chosen by a score, ties are told as ties, and its folder is whole or not there."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.errors import UserError
from scripts.evaluate import choose
from scripts.evaluate.choose import publish, rank
from scripts.evaluate.results import evaluation_record
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import sync_configs
from scripts.records import Choice, read_record
from scripts.report.card import model_card
from scripts.report.overview import Lineage, write_overview
from scripts.report.pages import rows_of
from scripts.report.scores import selection_sentences
from scripts.stage.bootstrap import changes, interval, resample
from scripts.stage.paths import StagePaths
from scripts.stage.tables import ROLLOUTS, write_table
from tests.conftest import ROOT, SHORT
from tests.lm_eval_files import write_answers
from tests.stages import checkpoint_record

A, B = "a_simple_agent", "b_simple_agent"


def make(results: Path, name: str, after: dict, before: dict | None = None, verdict: str = "pass") -> StagePaths:
    """A published candidate whose held-out rows, by environment, earned these rewards."""
    paths, content = StagePaths(results / name), f"content-{name}"
    (paths.ckpt).mkdir(parents=True, exist_ok=True)
    (paths.directory / "hf").mkdir(exist_ok=True)
    for folder in (paths.exported(content), paths.run / "checkpoints/step_3"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(name)
    for link, target in (
        (paths.ckpt / "weights", "../run/checkpoints/step_3"),
        (paths.export, f"../exports/{content}"),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    record = checkpoint_record(name, 3, identity=f"identity-{name}")
    write_json(paths.record, record)
    export = {key: record[key] for key in ("stage", "step", "identity")} | {"content": content, "files": {}}
    write_json(paths.export_record, export)
    rows = [
        {"environment": environment, "split": "rows", "line": line, "prompt": f"{environment} {line}"}
        | {"reward_after": float(reward), "reward_before": float(before[environment][line] if before else 0)}
        for environment, rewards in after.items()
        for line, reward in enumerate(rewards)
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    write_table(table, paths.rollouts)
    write_json(paths.evaluation, evaluation_record(export, table, {}))
    write_json(paths.gate, {"stage": name, "verdict": verdict})
    write_json(paths.criteria, {"criteria": []})
    paths.metrics.write_text(f"metrics of {name}")
    paths.config.write_text(f"name: {name}\n")
    return paths


def benchmarked(paths: StagePaths, score: float, stderr: float | None = 0.1, key: str = "k") -> StagePaths:
    """The candidate with a score on the task `larger`."""
    entry = {"score": score, "stderr": stderr, "samples": 40, "key": key, "metric": "acc,none"}
    content = f"content-{paths.name}"
    write_json(paths.benchmarks, {"stage": paths.name, "content": content, "benchmarks": {"larger": entry}})
    return paths


def names(candidates: list) -> list[str]:
    return [each["name"] for each in candidates]


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=4))
def test_a_ranking_is_what_a_plain_reading_of_the_rows_says(tmp_path, rewards):
    made = [make(tmp_path, f"v{place}", {A: a, B: b}) for place, (a, b) in enumerate(rewards)]
    found = rank(made, "held_out_mean")
    means = {f"v{place}": round((sum(a) / 12 + sum(b) / 12) / 2, 6) for place, (a, b) in enumerate(rewards)}
    assert [each["score"] for each in found] == pytest.approx(sorted(means.values(), reverse=True), abs=2e-6)
    for first, second in pairwise(found):
        assert first["score"] > second["score"] or first["name"] < second["name"]
    best = found[0]
    assert best["difference"] is None and not best["tied"] and best["low"] <= best["score"] <= best["high"]
    for each in found[1:]:
        rows = [rewards[int(name[1:])] for name in (each["name"], best["name"])]
        alone = changes({name: np.array(rows[0][i]) - np.array(rows[1][i]) for i, name in enumerate((A, B))})[1]
        difference = each["difference"]
        assert difference["value"] == pytest.approx(alone["value"], abs=2e-6)
        assert difference["low"] <= alone["low"] + 2e-6 and alone["high"] <= difference["high"] + 2e-6
        assert each["tied"] == (difference["high"] >= 0)
        if len(found) == 2:  # nothing else to hold at once
            assert (difference["low"], difference["high"]) == pytest.approx((alone["low"], alone["high"]), abs=2e-6)


def test_what_chance_explains_is_a_tie_and_what_it_does_not_is_none(tmp_path):
    good = [1, 1, 1, 1, 0] * 8
    near, far = [0, *good[1:]], [0] * 40
    made = [make(tmp_path, name, {A: rewards}) for name, rewards in (("far", far), ("near", near), ("good", good))]
    found = rank(made, "held_out_mean")
    assert [(each["name"], each["tied"]) for each in found] == [("good", False), ("near", True), ("far", False)]
    assert found[2]["difference"]["high"] < 0


def test_of_equal_candidates_the_first_is_chosen_and_all_are_tied(tmp_path):
    made = [make(tmp_path, name, {A: [1, 0] * 10}) for name in ("second", "first", "third")]
    found = rank(made, "held_out_mean")
    assert names(found) == ["second", "first", "third"]
    assert [each["tied"] for each in found] == [False, True, True]
    assert found[1]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.slow
def test_the_truly_best_is_chosen_or_tied_about_as_often_as_is_said():
    generator, held, rounds = np.random.default_rng(3), 0, 150
    for _ in range(rounds):
        easy = generator.random(60)
        rows = [(generator.random(60) < 0.3 + 0.4 * easy).astype(float) for _ in range(4)]  # all alike; call 0 the best
        means = [resample({A: each})[A] for each in rows]
        best = max(range(4), key=lambda place: rows[place].mean())
        held += best == 0 or interval(means[0] - means[best], 3)[1] >= 0
    assert held / rounds >= 0.94


def test_the_best_of_several_equals_scores_as_much_too_high_as_the_docs_say():
    generator, page = np.random.default_rng(1), (ROOT / "docs/evaluation.md").read_text()
    cases = {
        (6, 100, 0.06): "The best of 6 scores 0.06 too high on 100 rows",
        (6, 400, 0.03): "and 0.03 on 400 rows.",
        (50, 100, 0.11): "The best of 50 scores 0.11 too high on 100 rows",
    }
    for (candidates, rows, said), words in cases.items():
        easy = generator.random((500, 1, rows))
        rewards = generator.random((500, candidates, rows)) < 0.2 + 0.5 * easy
        assert (rewards.mean(axis=2).max(axis=1) - 0.45).mean() == pytest.approx(said, abs=0.006)
        assert words in " ".join(page.split())


def test_too_few_rows_bear_no_interval_and_set_nobody_apart(tmp_path):
    made = [make(tmp_path, name, {A: [0] * zeros + [1] * (5 - zeros)}) for name, zeros in (("x", 5), ("y", 0))]
    found = rank(made, "held_out_mean")
    assert names(found) == ["y", "x"] and found[0]["low"] is None
    assert found[1]["difference"] is None and found[1]["tied"]


def test_a_task_is_paired_by_document_where_they_are_kept_and_else_tells_nobody_apart(tmp_path):
    documents = [float(place % 2) for place in range(40)]
    better = [1.0] * 8 + documents[8:]
    made = []
    for name, scores in (("low", documents), ("high", better)):
        made.append(benchmarked(make(tmp_path, name, {A: [0] * 10}), sum(scores) / 40, stderr=0.08))
        write_answers(tmp_path / "store" / f"content-{name}" / "k", {"larger": scores})
    paired, alone = (rank(made, "larger", store)[1]["difference"] for store in (tmp_path / "store", None))
    assert paired["value"] == -0.1 and paired["low"] < -0.1 < paired["high"] <= 0
    assert alone is None and rank(made, "larger")[1]["tied"]
    without = [benchmarked(each, 0.5, stderr=None) for each in made]
    assert rank(without, "larger")[1]["tied"] and rank(without, "larger")[0]["low"] is None


def test_who_may_not_or_cannot_be_compared_is_left_out_with_the_reason(tmp_path):
    rewards = {A: [1, 0] * 10}
    good = benchmarked(make(tmp_path, "good", rewards), 0.5)
    stopped = benchmarked(make(tmp_path, "stopped", {A: [1] * 20}, verdict="stop"), 0.9)
    moved = benchmarked(make(tmp_path, "moved", {B: [1] * 20}), 0.9, key="another")
    unscored = make(tmp_path, "unscored", rewards)
    unscored.evaluation.unlink()
    other = make(tmp_path, "other", rewards)
    write_json(other.evaluation, read_json(other.evaluation) | {"content": "older"})
    found = rank([good, stopped, moved, unscored, other], "held_out_mean")
    assert names(found) == ["good", "stopped", "moved", "unscored", "other"]
    assert [each["left_out"] for each in found] == [
        None,
        "its gate says stop",
        "it was scored on other rows, or asked otherwise, than good",
        "it has no eval.json",
        f"its eval.json is of another export; snakemake {other.evaluation}",
    ]
    assert found[1]["score"] is None and not found[1]["tied"]
    reasons = [each["left_out"] for each in rank([good, moved, unscored], "larger")]
    assert reasons == [None, "it was scored on other rows, or asked otherwise, than good", "it has no benchmarks.json"]
    assert rank([good, unscored], "larger")[0]["name"] == "good"
    with pytest.raises(
        UserError, match=r"(?s)none of 2 .* by smaller:\n  good: it has no score on smaller\n  stopped: "
    ):
        rank([good, stopped], "smaller")


def test_responses_that_could_not_be_judged_count_as_in_the_score_that_is_shown(tmp_path):
    judged, unjudged = (make(tmp_path, name, {A: [1] * 15 + [reward] * 5}) for name, reward in (("j", 1), ("u", 0)))
    write_json(unjudged.evaluation, read_json(unjudged.evaluation) | {"unjudged": {"responses": 5, "first": "row 16"}})
    found = rank([unjudged, judged], "held_out_mean")
    assert [(each["name"], each["score"]) for each in found] == [("j", 1.0), ("u", 0.75)]


# The folder of a choice


@pytest.fixture
def program(tmp_path, capsys):
    """Call the program on variants below `tmp_path`; what it printed."""

    def call(*candidates: str, **options) -> str:
        choose.main(tmp_path, "rlvr1", "held_out_mean", candidates, tmp_path / "best", **options)
        return capsys.readouterr().out

    return call


def tree(folder: Path) -> dict[str, object]:
    """Every file and link below a folder: its bytes or where it points; none of those that a killed process left."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    paths = [path for path in paths if ".tmp" not in str(path)]
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes() for path in paths
    }


def test_a_folder_of_a_choice_is_like_the_chosen_ones(tmp_path, program):
    chosen = benchmarked(make(tmp_path, "x", {A: [1] * 20}), 0.5)
    (chosen.ckpt / ".snakemake_timestamp").touch()
    other = make(tmp_path, "y", {A: [0] * 20})
    said = program("y", "x")
    assert said == "rlvr1: x chosen among 2 by held_out_mean (highest 1.000, 95 % interval 1.000 to 1.000)\n"
    best = StagePaths(tmp_path / "best")
    record = read_record(best.choice, Choice)
    assert (record["stage"], record["by"], record["chosen"]) == ("rlvr1", "held_out_mean", ["x"])
    assert [(each["name"], each["identity"], each["step"]) for each in record["candidates"]] == [
        ("x", "identity-x", 3),
        ("y", "identity-y", 3),
    ]
    for name in (*choose.FILES, "ckpt/record.json", "hf/record.json"):
        assert (best.directory / name).read_bytes() == (chosen.directory / name).read_bytes()
    assert (best.export / "model.safetensors").read_text() == "x"
    assert (best.ckpt / "weights/model.safetensors").read_text() == "x"
    assert best.exported("content-x").is_dir() and best.run == chosen.run
    assert {path.name for path in best.directory.iterdir()} == {
        *choose.FILES,
        *choose.FOLDERS,
        *choose.LINKS,
        "choice.json",
    }
    make(tmp_path, "y", {A: [1] * 20})
    make(tmp_path, "x", {A: [0] * 20})
    program("y", "x")
    assert not best.benchmarks.exists() and best.run == other.run
    assert (best.export / "model.safetensors").read_text() == "y"


def test_the_same_choice_again_gives_equal_bytes(tmp_path, program):
    for name, reward in (("x", 1), ("y", 0)):
        make(tmp_path, name, {A: [reward] * 20})
    program("x", "y")
    before = tree(tmp_path / "best")
    program("x", "y")
    assert tree(tmp_path / "best") == before
    make(tmp_path, "z", {A: [0] * 20})
    program("x", "y", "z")
    now = tree(tmp_path / "best")
    assert {name for name in now if now[name] != before[name]} == {"choice.json"}, "its children stay fresh"


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_choice_that_is_not_whole(tmp_path, monkeypatch):
    made = {name: make(tmp_path, name, {A: [reward] * 20}) for name, reward in (("x", 1), ("y", 0))}
    folder, calls, moments = tmp_path / "best", 0, 0
    monkeypatch.setattr("os.fsync", bool)  # a second of waiting for the disk

    def published(name: str) -> dict[str, object]:
        publish(made[name], folder, Choice(stage="rlvr1", by="held_out_mean", chosen=[name], candidates=[]))
        return tree(folder)

    def killed(work):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > moments:
                raise KeyboardInterrupt
            return work(*arguments, **options)

        return call

    new, ended = published("y"), False
    while not ended:
        old, calls = published("x"), 0
        with monkeypatch.context() as patched:
            for work in ("rename", "replace", "unlink", "symlink_to"):
                patched.setattr(Path, work, killed(getattr(Path, work)))
            patched.setattr(choose.shutil, "copyfile", killed(choose.shutil.copyfile))
            with suppress(KeyboardInterrupt):
                ended = bool(published("y"))
        found = tree(folder)
        assert "choice.json" not in found or found in (old, new), moments
        assert published("y") == new, moments
        moments += 1
    assert moments > 15


# What is said of the scores


def test_scores_of_what_was_chosen_by_them_are_said_to_overestimate(tmp_path, program):
    for name, right in (("x", 18), ("y", 20), ("y.step-1", 20)):
        make(tmp_path, name, {A: [1] * right + [0] * (20 - right)})
    assert selection_sentences(tmp_path, ["x", "y"]) == []
    program("x", "y")
    flatters, honest = selection_sentences(tmp_path, ["sft", "y"])
    assert flatters == "y was chosen among 2 by held_out_mean, on the rows scored here, so the scores overestimate it."
    assert "evaluation.test: true" in honest
    assert selection_sentences(tmp_path, ["x"]) == [], "nobody chose it"
    assert selection_sentences(tmp_path, ["best"])[0] == flatters
    tested = make(tmp_path, "child", {A: [1] * 12 + [0] * 8}, {A: [1] * 4 + [0] * 16})
    tested.evaluation.rename(tested.test)
    says = selection_sentences(tmp_path, ["y", "child"])
    figures = "0.60 after child, 0.20 of the model that the chain started from (+0.40, 95 % interval +0."
    assert says[1].startswith(f"On the test split, which no choice has used: {figures}")
    assert len(says) == 2


def test_the_overview_the_summary_and_the_card_say_what_was_chosen(chain):
    parents = {"sft": "", "rlvr1": "sft", "other": "sft"}
    sweep_of = {"rlvr1": "rl", "other": "rl"}
    page = chain / "overview.html"
    sync_configs(load_recipe(SHORT), chain)
    write_overview(chain, Lineage(parents, sweep_of), page)
    assert "rlvr1 has the highest score of 2 variants, none of which was chosen, so its score is" in page.read_text()
    record = read_json(chain / "rlvr1/ckpt/record.json")
    best = {"name": "rlvr1", **{key: record[key] for key in ("identity", "step")}, "content": "0", "left_out": None}
    best |= {"score": 0.5, "low": None, "high": None, "difference": None, "tied": False}
    choice = {"stage": "rl", "by": "held_out_mean", "chosen": ["rlvr1"]}
    write_json(chain / "rl.best/choice.json", choice | {"candidates": [best, best | {"name": "other"}]})
    write_json(chain / "rl.best/test.json", read_json(chain / "rlvr1/eval.json"))
    flatters = "rlvr1 was chosen among 2 by held_out_mean, on the rows scored here, so the scores overestimate it."
    write_overview(chain, Lineage(parents, sweep_of), page)
    assert flatters in page.read_text() and "On the test split, which no choice has used: 0.5" in page.read_text()
    sft, rlvr1 = rows_of([StagePaths(chain / "sft"), StagePaths(chain / "rlvr1")])
    assert "selection" not in sft and rlvr1["selection"].startswith(flatters)
    assert flatters in str(model_card(chain / "rlvr1/hf"))
