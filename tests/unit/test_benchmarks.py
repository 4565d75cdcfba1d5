"""Scores on benchmarks: how they are kept, compared, judged by gates, and shown in the report and the card."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from scripts.errors import UserError
from scripts.evaluate.benchmarks import beside_parent, read_documents, read_scores, share_cut
from scripts.evaluate.gate import judge
from scripts.files import read_json, write_json
from scripts.recipe.criteria import Criterion
from scripts.recipe.evaluation import Evaluation, Task
from scripts.recipe.load import load_recipe
from scripts.records import Benchmarks, read_record
from scripts.report.card import model_card
from scripts.report.compare import ComparedStage
from scripts.report.pages import write_environments_page
from scripts.report.stage_page import main as write_stage_page
from tests.cases import cases
from tests.conftest import ROOT, SHORT, refusal
from tests.lm_eval_files import write_answers
from tests.report_files import write_manifest, write_stage

BASE, SFT, RLVR = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def score(tmp_path):
    """Keep an export's answers as lm-eval writes them; benchmarks.json beside the parent's scores."""

    def take(content: str, values: list[float], parent: Benchmarks | None = None, key: str = "k", **told) -> Benchmarks:
        write_answers(folder := tmp_path / content / key, {"gsm8k": values}, **told)
        scores = read_scores(folder, "gsm8k", None, key)
        record = {"stage": content[0], "content": content, "by": "lm-eval 0.4.13, hf", "benchmarks": scores}
        return record | {"benchmarks": beside_parent(record, parent, tmp_path)}

    return take


WRONG, RIGHT = [0.0] * 20 + [1.0] * 20, [0.0] * 10 + [1.0] * 30


def test_a_score_stands_beside_the_parents_and_the_firsts_paired_by_document(score):
    base = score(BASE, WRONG)
    sft = score(SFT, RIGHT, base)
    rlvr = score(RLVR, RIGHT, sft)
    first, second, third = (record["benchmarks"]["gsm8k"] for record in (base, sft, rlvr))
    assert (first["before"], first["change"], first["first"]) == (None, None, None)
    assert second["before"] == 0.5 and second["change"]["value"] == 0.25 and second["first"] == BASE
    independent = 1.96 * np.hypot(first["stderr"], second["stderr"])
    assert second["change"]["high"] - second["change"]["low"] < 1.5 * independent, "paired: narrower than two samples"
    assert third["change"]["value"] == third["change"]["low"] == 0.0
    assert third["change_from_first"]["value"] == 0.25 and third["first"] == BASE


@pytest.mark.parametrize(
    ("settings", "answers", "share"),
    [
        ({"until": ["!"], "max_gen_toks": 4}, ["a b c d", "a b c", "a", ""], 0.25),
        ({"max_new_tokens": 3, "max_tokens": 9}, ["a b c d", "a b c", "a b", "a"], 0.5),
        ({"max_gen_toks": 100}, [" ".join("a" * 98), " ".join("a" * 97)], 0.5),
        ({}, ["a " * 256, "a " * 250], 0.5),
        (None, ["a b c d"], None),
    ],
)
def test_answers_that_fill_their_length_are_counted_as_cut_and_texts_that_are_weighed_are_not(
    tmp_path, settings, answers, share
):
    arguments = {"gen_args_0": {"arg_0": "?", "arg_1": " A" if settings is None else settings}}
    rows = [json.dumps({"arguments": arguments, "resps": [[answer]]}) for answer in answers]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/samples_gsm8k_2026.jsonl").write_text("\n".join(rows))
    assert share_cut(tmp_path, "gsm8k", lambda text: len(text.split())) == share


def test_what_was_asked_otherwise_is_not_compared(score):
    found = score(SFT, RIGHT, score(BASE, WRONG), key="another")["benchmarks"]["gsm8k"]
    assert (found["before"], found["change"], found["change_from_first"]) == (None, None, None)


@pytest.mark.parametrize(
    ("fact", "value", "is_same"),
    [("num_fewshot", 0, True), ("num_fewshot", 5, False), ("samples", 39, False), ("by", "lm-eval 0.4.12, hf", False)],
)
def test_scores_that_an_earlier_version_kept_in_parquet_are_before_and_paired_by_prompt(
    score, tmp_path, fact, value, is_same
):
    base = score(BASE, WRONG, key="earlier")
    shutil.rmtree(tmp_path / BASE / "earlier")
    rows = [
        {"benchmark": "gsm8k", "task": "gsm8k", "document": place, "score": each, "prompt": f"gsm8k {place}?"}
        for place, each in enumerate(WRONG)
    ]
    pq.write_table(pa.Table.from_pylist(rows), (tmp_path / BASE / "earlier").with_suffix(".parquet"))
    (base if fact == "by" else base["benchmarks"]["gsm8k"])[fact] = value
    found = score(SFT, RIGHT, base)["benchmarks"]["gsm8k"]
    if not is_same:
        assert (found["before"], found["change"], found["first"]) == (None, None, None)
        return
    assert (found["before"], found["first"]) == (0.5, BASE)
    assert found["change"]["value"] == found["change_from_first"]["value"] == 0.25
    rows[3]["prompt"] = "another question?"
    pq.write_table(pa.Table.from_pylist(rows), (tmp_path / BASE / "earlier").with_suffix(".parquet"))
    assert score(RLVR, RIGHT, base)["benchmarks"]["gsm8k"]["change"] is None, "not the same documents"


def test_a_score_that_is_no_mean_of_documents_or_of_other_documents_has_no_change(score):
    found = score(SFT, RIGHT, score(BASE, WRONG, score=20.0), score=20.05)["benchmarks"]["gsm8k"]
    assert (found["score"], found["before"], found["change"]) == (20.05, 20.0, None)
    fewer = score(RLVR, RIGHT[1:], score(BASE, WRONG))["benchmarks"]["gsm8k"]
    assert fewer["before"] == 0.5 and fewer["change"] is None


def test_of_a_tag_each_task_counts_and_of_a_group_its_own_score(tmp_path):
    by_task = {"one": RIGHT, "two": WRONG}
    write_answers(tmp_path / "tag", by_task)
    tag = read_scores(tmp_path / "tag", "mine", None, "k")
    assert {name: entry["score"] for name, entry in tag.items()} == {"one": 0.75, "two": 0.5}
    assert len(read_documents(tmp_path / "tag", "one", "acc,none", tag["one"]["score"])) == 40
    write_answers(tmp_path / "group", by_task, group="mine")
    (group,) = read_scores(tmp_path / "group", "mine", "acc", "k").values()
    assert (group["score"], group["samples"], group["metric"]) == (0.625, 80, "acc,none")
    assert len(read_documents(tmp_path / "group", "mine", "acc,none", group["score"])) == 80
    with pytest.raises(UserError, match=r"mine has no metric f1; it has acc,none"):
        read_scores(tmp_path / "group", "mine", "f1", "k")


def test_a_gate_judges_scores_and_changes_by_their_intervals(score):
    record = score(SFT, RIGHT, score(BASE, WRONG))

    def outcome(metric: str, name: str | None = "gsm8k", **bounds) -> tuple[str, str]:
        result = judge(Criterion(metric=metric, benchmark=name, **bounds), [], None, record)
        return result.outcome, result.says

    assert outcome("benchmark_score", min=0.5)[0] == "pass" and outcome("benchmark_score", min=0.95)[0] == "stop"
    assert "undecided" in outcome("benchmark_score", min=0.8)[1]
    assert outcome("benchmark_change", min=0.0)[0] == "pass"
    assert outcome("benchmark_change", max=0.05, action="warn")[0] == "warn"
    assert outcome("benchmark_change", against="first", min=0.5)[0] == "stop"
    worst = outcome("worst_benchmark_change", None, min=0.0)
    assert worst[0] == "pass" and "of gsm8k is +0.250" in worst[1] and "(1 benchmarks at once)" in worst[1]
    assert outcome("benchmark_change", "mmlu", min=0.0)[0] == "not measured"
    assert (
        judge(Criterion(metric="benchmark_score", benchmark="gsm8k", min=0.1), [], None, None).outcome == "not measured"
    )


@cases("benchmarks.mistakes", "evaluation", "gate", "message")
def test_a_mistake_in_the_tasks_or_a_gate_on_them_is_one_message(tmp_path, evaluation, gate, message):
    recipe = yaml.safe_load(SHORT.read_text()) | {"evaluation": evaluation}
    recipe["stages"]["rlvr1"]["gate"] = [gate] if gate else []
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert message in refusal(load_recipe, path)


def test_tasks_alone_are_an_evaluation_without_held_out_scores(tmp_path):
    for name in ("short", "super3"):
        source = SHORT if name == "short" else ROOT / "config/recipes/super3.yaml"
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(source.read_text()) | {"evaluation": {"tasks": ["gsm8k"]}}))
        recipe = load_recipe(path)
        assert not any(stage.is_scored for stage in recipe.graph.order) and recipe.evaluation.tasks == ["gsm8k"]


def test_the_report_and_the_card_show_scores_with_their_errors(score, chain, tmp_path):
    base, directory = score(BASE, WRONG), chain / "rlvr1"
    content = read_json(directory / "hf/record.json")["content"]
    dataset = {"path": "openai/gsm8k", "name": "main", "split": "test"}
    record = score(content, [*RIGHT[:39], 0.0], base)
    record["benchmarks"]["gsm8k"] |= {"metric": "exact_match,strict-match", "num_fewshot": 5, "dataset": dataset}
    write_json(directory / "benchmarks.json", record | {"step": 1, "by": "lm-eval"})
    assert read_record(directory / "benchmarks.json", Benchmarks)["content"] == content
    card = model_card(directory / "hf")
    (result,) = [each for each in card.data.eval_results if each.dataset_type == "openai/gsm8k"]
    assert (result.metric_type, result.metric_value, result.dataset_config) == ("exact_match", 0.725, "main")
    assert result.metric_args == {"stderr": pytest.approx(0.0715, abs=1e-3), "num_fewshot": 5, "version": "3.0"}
    assert "| gsm8k | exact_match,strict-match | 5 | 40 | 0.500 | 0.725 ± 0.071 | +0.225 (" in card.text

    write_stage(tmp_path, "sft")
    write_json(tmp_path / "sft/benchmarks.json", record | {"stage": "sft"})
    write_stage_page(tmp_path / "sft", write_manifest(tmp_path), tmp_path / "page.html")
    assert "<td>0.500</td><td>0.725</td><td>0.071</td><td></td><td>+0.225</td>" in (tmp_path / "page.html").read_text()
    write_environments_page([], tmp_path / "chain.html", [base, record])
    page = (tmp_path / "chain.html").read_text()
    assert "0.50 ± 0.080" in page and "0.72 ± 0.071 ▲" in page and "Environments over the chain</h1>" not in page


def test_scores_of_another_export_get_into_no_card(chain):
    write_json(chain / "rlvr1/benchmarks.json", {"stage": "rlvr1", "content": BASE, "benchmarks": {}})
    with pytest.raises(UserError, match=r"benchmarks.json: scores another export than"):
        model_card(chain / "rlvr1/hf")


def test_a_tasks_settings_reach_lm_eval_and_another_question_has_another_key():
    pytest.importorskip("torch")
    from scripts.evaluate.tasks import key_of, settings_of

    task, evaluation = Task(task="gsm8k", num_fewshot=0, limit=4), Evaluation(tasks=["gsm8k"])
    assert settings_of(task) == {"tasks": ["gsm8k"], "log_samples": True, "num_fewshot": 0, "limit": 4}
    asked = [task, task.model_copy(update={"limit": 5}), task.model_copy(update={"metric": "exact_match"})]
    keys = [key_of(each, evaluation, "0.4.13") for each in asked]
    assert keys[0] == keys[2] != keys[1] and key_of(task, evaluation, "0.4.14") != keys[0]


def test_runs_that_were_asked_a_benchmark_otherwise_are_not_compared():
    def scored(shots: int, version: str = "1") -> SimpleNamespace:
        entry = {"score": 0.5, "samples": 10, "num_fewshot": shots, "version": version}
        return SimpleNamespace(benchmarks={"benchmarks": {"arc": entry, "gsm8k": entry | {"num_fewshot": 5}}})

    compared = ComparedStage("rlvr", {"a": scored(0), "b": scored(5, "2"), "c": SimpleNamespace(benchmarks=None)})
    assert compared.asked_otherwise == {"arc": "num_fewshot 0 or 5; version 1 or 2", "gsm8k": "version 1 or 2"}
    assert ComparedStage("rlvr", {"a": scored(0), "b": scored(0)}).asked_otherwise == {}
