"""Blends that models make: which prompts are asked, what is sampled once, and what becomes of judged responses."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from scripts.commands.plan import check_budget, plan_text
from scripts.commands.project import Project
from scripts.data.fill import FILES
from scripts.recipe.blend import GeneratedBlend
from scripts.recipe.load import load_recipe, load_site
from scripts.sampling import select as selecting
from scripts.sampling.judge import JUDGED
from scripts.sampling.kept import Kept
from scripts.sampling.sample import is_response, prompts_of, sample
from scripts.sampling.select import Selection
from scripts.stage.tables import write_table
from tests.conftest import ROOT, refusal

MATH, MCQA = "math_with_judge_simple_agent", "mcqa_simple_agent"
RECIPE = (ROOT / "config/recipes/tiny-rft.yaml").read_text()
GENERATED = "{kind: generated, by: sft, prompts: prompts, samples: 8, temperature: 1.0, max_new_tokens: 24, shards: 2}"
SELECT = "{best: {keep: 1, min_reward: 1.0}}"


def recipe_with(tmp_path, source=GENERATED, select=SELECT, more=""):
    """The recipe of rejection sampling with another source and selection, and more settings of the blend."""
    text = RECIPE.replace(f"source: {GENERATED}", f"source: {source}{more}").replace(
        f"select: {SELECT}", f"select: {select}"
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path)


def blend_of(select, **source):
    """A generated blend with a selection, its source's settings changed."""
    told = {"kind": "generated", "by": "sft", "prompts": "prompts", "max_new_tokens": 24}
    return GeneratedBlend.model_validate({"source": told | source, "select": yaml.safe_load(select)})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": GENERATED.replace("by: sft", "by: stf")}, "no stage or model is named stf; did you mean sft"),
        ({"source": GENERATED.replace("prompts: prompts", "prompts: promts")}, "no blend is named promts"),
        ({"source": GENERATED.replace("prompts: prompts", "prompts: best")}, "take their prompts from each other"),
        ({"source": GENERATED.replace("prompts: prompts", "prompts: sft, part: 3 of 2")}, "beyond the last part"),
        ({"source": GENERATED.replace("by: sft", "by: rft")}, "the stages start from each other"),
        ({"source": GENERATED.replace("by: sft", "by: [sft, sft]")}, "names a model twice"),
        ({"select": "{best: {}, pairs: {}}"}, "says best and pairs"),
        ({"select": "{best: {keep: 9}}"}, "keeps 9 of 8 samples; lower it"),
        (
            {"source": GENERATED.replace("samples: 8", "samples: 1"), "select": "{pairs: {}}"},
            "a pair needs two responses",
        ),
        ({"select": "{best: {}, curriculum: by_pass_rate}"}, "curriculum orders prompts"),
        ({"select": "{}"}, "says nothing"),
        ({"select": "{pass_rate: {min: 0.9, max: 0.1}}"}, "is above max"),
        ({"select": "{pass_rate: {}, rank: {by: sft}}"}, "rank orders the responses"),
        ({"select": "{best: {}, rank: {by: sft}}"}, "answers prompts and ranks nothing"),
        ({"select": "{best: {}, filter: [[lenght, '<', 3]]}"}, "select.filter.0"),
        (
            {"more": "\n    test: 20"},
            "best.test: is for a blend that is published or synthesized; this one is generated",
        ),
        ({"select": "{pairs: {}}"}, "sft trains on demonstrations, but blend best holds preferences"),
    ],
)
def test_a_generated_blend_that_cannot_be_is_refused_in_one_message(tmp_path, changes, says):
    message = refusal(recipe_with, tmp_path, **changes)
    assert says in message
    assert "recipe.yaml" in message


def test_selection_without_a_generated_source_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("  prompts: {rows: 1500,", "  prompts: {select: {best: {}}, rows: 1500,")
    )
    assert "go together" in refusal(load_recipe, tmp_path / "recipe.yaml")


def test_the_stage_comes_after_the_stage_that_makes_its_rows(tmp_path):
    loaded = recipe_with(tmp_path)
    assert loaded.graph.stage_names == ["sft", "rft"]
    makers = {name: [maker.name for maker in loaded.graph.rows(name).made_by] for name in ("best", "sft")}
    assert makers == {"best": ["sft"], "sft": []}
    blend = loaded.blends["best"]
    assert (blend.kind, blend.environments, blend.holdout) == ("demonstrations", [MATH, MCQA], 0.05)
    assert [rows.name for rows in loaded.graph.scored_rows] == ["prompts"], (
        "rows that a model made are held out of no other stage's scores"
    )


def write_rows(path: Path, questions: list[str], environment: str = MATH) -> Path:
    rows = [
        {
            "agent_ref": {"type": "responses_api_agents", "name": environment},
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "expected_answer": "1",
        }
        for question in questions
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_no_prompt_of_a_held_out_split_comes_in(tmp_path):
    split = write_rows(tmp_path / "train.jsonl", ["a", "b", "c", "b"])
    held_out = write_rows(tmp_path / FILES["validation"], ["b", "d"])
    source = blend_of(SELECT).source
    asked, left_out = prompts_of(source, split, "prompts", {held_out: "prompts"})
    assert [prompt.line for prompt in asked] == [1, 3]
    assert left_out == {"prompts that are held out": 2}


def test_parts_share_the_prompts_and_never_overlap(tmp_path):
    questions = [f"question {number % 40}" for number in range(60)]
    split, parts = write_rows(tmp_path / "train.jsonl", questions), []
    for part in ("1 of 3", "2 of 3", "3 of 3"):
        asked, _ = prompts_of(blend_of(SELECT, part=part).source, split, "prompts", {})
        parts.append([prompt.line for prompt in asked])
    assert sorted(line for part in parts for line in part) == list(range(1, 61))
    asked = [{questions[line - 1] for line in part} for part in parts]
    assert all(asked) and not (asked[0] & asked[1] or asked[0] & asked[2] or asked[1] & asked[2])


class Engine:
    """Respond with a text that tells the place; count how often."""

    def __init__(self, size: int = 4, fails_after: int | None = None) -> None:
        self.size, self.left, self.sampled = size, fails_after, Counter()

    def plan(self, rows):
        return [list(range(start, min(start + self.size, len(rows)))) for start in range(0, len(rows), self.size)]

    def respond(self, rows, done=()):
        for batch in self.plan(rows):
            if all(place in done for place in batch):
                continue
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = self.left and self.left - 1
            self.sampled.update(batch)
            yield {place: (f"response {place}", place, False) for place in batch}


def sampled_in(folder, shards, engine, prompts):
    found = []
    for number in range(shards):
        rows, _ = sample(lambda: engine, prompts, 3, (number, shards), folder, "responses")
        found += rows
    return sorted(found, key=lambda row: (row["line"], row["sample"]))


def test_responses_are_the_same_in_any_number_of_shards_and_none_is_sampled_twice(tmp_path):
    split = write_rows(tmp_path / "train.jsonl", [f"question {number}" for number in range(7)])
    prompts, _ = prompts_of(blend_of(SELECT).source, split, "prompts", {})
    whole = sampled_in(tmp_path / "one", 1, Engine(), prompts)
    assert [row["line"] for row in whole] == [line for line in range(1, 8) for _ in range(3)]
    assert sampled_in(tmp_path / "four", 4, Engine(), prompts) == whole

    struck = Engine(fails_after=2)
    with pytest.raises(KeyboardInterrupt):
        sampled_in(tmp_path / "struck", 1, struck, prompts)
    again = Engine()
    assert sampled_in(tmp_path / "struck", 3, again, prompts) == whole
    assert sorted((struck.sampled + again.sampled).values()) == [1] * 21
    third = Engine()
    assert sampled_in(tmp_path / "struck", 2, third, prompts) == whole
    assert not third.sampled, "another number of shards samples nothing again"


def test_a_line_cut_by_a_kill_is_asked_again(tmp_path):
    kept = Kept(tmp_path, is_response)
    kept.begin("answers", {0, 1})
    kept.add({0: ["a", 1, False]})
    kept.add({1: ["b", 1, False]})
    path = next(tmp_path.glob("*.jsonl"))
    path.write_text(path.read_text()[:-4])
    assert Kept(tmp_path, is_response).answers == {0: ["a", 1, False]}


def response(line, sample, reward, tokens=5, text=None, **more):
    """A judged response."""
    told = {"model": 0, "line": line, "sample": sample, "reward": reward, "tokens": tokens, "cut": False}
    others = {"response": text or f"{line}.{sample}", "environment": MATH, "why": None, "score": None}
    return told | others | more


def selected(select, responses, **source):
    """The rows of a selection, by prompt's line, and the selection."""
    prompts = {each["line"]: {"responses_create_params": {"input": f"question {each['line']}"}} for each in responses}
    blend = blend_of(select, **source)
    selection = Selection(blend, responses, ["c0", "c1"][: len(blend.source.models)])
    return list(getattr(selection, blend.kind)(prompts)), selection


def answers(rows):
    return [row["messages"][-1]["content"] for row in rows]


def test_the_best_is_the_shortest_of_the_most_rewarded(tmp_path):
    responses = [response(1, 0, 1.0, 9), response(1, 1, 1.0, 3), response(1, 2, 0.0, 1), response(2, 0, 0.0)]
    rows, selection = selected(SELECT, responses)
    assert answers(rows) == ["1.1"]
    assert rows[0]["messages"][0] == {"role": "user", "content": "question 1"}
    made = {"model": "c0", "line": 1, "seed": 0, "sample": 1, "environment": MATH, "reward": 1.0, "tokens": 3}
    assert rows[0]["made"] == made
    assert selection.left_out["responses below 1.0"] == 2
    assert selection.left_out["prompts without a response that is good enough"] == 1
    rows, _ = selected("{best: {shortest: false}}", responses)
    assert answers(rows) == ["1.0"]


def test_of_several_models_each_may_give_some_and_no_text_comes_twice(tmp_path):
    responses = [
        response(1, 0, 1.0, text="a"),
        response(1, 1, 1.0, text="b"),
        response(1, 0, 1.0, text="a", model=1),
        response(1, 1, 1.0, text="c", model=1),
    ]
    rows, _ = selected("{best: {keep: 1}}", responses, by=["sft", "other"])
    assert answers(rows) == ["a", "c"]
    assert [row["made"]["model"] for row in rows] == ["c0", "c1"]
    rows, _ = selected("{best: {keep: 2, per_prompt: 1}}", responses, by=["sft", "other"])
    assert answers(rows) == ["a"]


def test_responses_that_could_not_be_judged_or_are_cut_make_no_row(tmp_path):
    responses = [
        response(1, 0, None, why="the verifier broke"),
        response(1, 1, 1.0, cut=True),
        response(1, 2, 1.0, text=" "),
    ]
    rows, selection = selected(SELECT, responses)
    assert rows == []
    assert selection.left_out["responses that could not be judged"] == 1
    assert selection.left_out["responses that are cut or empty"] == 2


@pytest.mark.parametrize(
    ("pairs", "chosen", "rejected"),
    [("{}", "1.1", "1.2"), ("{rejected: nearest_length}", "1.1", "1.0"), ("{margin: 0.2}", "1.1", "1.2")],
)
def test_a_pair_is_the_best_response_and_a_worse_one(tmp_path, pairs, chosen, rejected):
    responses = [response(1, 0, 0.4, 8), response(1, 1, 1.0, 9), response(1, 2, 0.0, 30), response(1, 3, 0.7, 9)]
    (row,), _ = selected(f"{{pairs: {pairs}}}", responses)
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == (chosen, rejected)
    assert row["made"]["chosen"]["reward"] == 1.0 and row["made"]["rejected"]["model"] == "c0"


def test_responses_alike_or_too_unlike_in_length_make_no_pair(tmp_path):
    responses = [response(1, 0, 1.0), response(1, 1, 0.8), response(2, 0, 1.0, 30), response(2, 1, 0.0, 3)]
    rows, selection = selected("{pairs: {max_length_ratio: 2}}", responses)
    assert rows == []
    assert selection.left_out["prompts whose responses are all alike"] == 1
    assert selection.left_out["pairs of which one is longer than 2 times the other"] == 1


def test_scores_of_a_reward_model_order_the_responses_where_they_rank(tmp_path):
    blend = blend_of("{pairs: {margin: 1}}")
    rank = type("Rank", (), {"by": "rm"})()
    blend = blend.model_copy(update={"select": blend.select.model_copy(update={"rank": rank})})
    responses = [response(1, 0, 1.0, score=-2.0), response(1, 1, 0.0, score=3.0)]
    (row,) = Selection(blend, responses, ["c0"]).preferences({1: {"responses_create_params": {"input": "?"}}})
    assert row["chosen"][0]["content"] == "1.1"


def test_prompts_are_kept_by_pass_rate_easiest_first(tmp_path):
    responses = [response(line, sample, float(sample < line)) for line in range(5) for sample in range(4)]
    rows, selection = selected("{pass_rate: {min: 0.1, max: 0.9}, curriculum: by_pass_rate}", responses)
    assert [row["pass_rate"] for row in rows] == [0.75, 0.5, 0.25]
    assert selection.left_out["prompts of a pass rate beyond 0.1 to 0.9"] == 2


def test_bands_of_a_curriculum_have_their_shares(tmp_path):
    responses = [response(line, sample, float(sample < line % 5)) for line in range(100) for sample in range(4)]
    bands = "{curriculum: [{min: 0.7, max: 1, share: 0.25}, {min: 0.2, max: 0.6, share: 0.75}]}"
    rows, _ = selected(bands, responses)
    easy = [row["pass_rate"] >= 0.7 for row in rows]
    assert easy == sorted(easy, reverse=True), "one band after another"
    assert sum(easy) / len(easy) == pytest.approx(0.25, abs=0.02)
    assert len({row["made"]["line"] for row in rows}) == len(rows)


def test_a_filter_asks_about_a_responses_columns(tmp_path):
    responses = [response(1, 0, 1.0, 9), response(1, 1, 1.0, 3), response(2, 0, 1.0, 2)]
    rows, _ = selected("{best: {}, filter: [[tokens, '>', 4], [model, '==', sft]]}", responses)
    assert answers(rows) == ["1.0"]
    with pytest.raises(Exception, match=r"select\.filter"):
        selected("{best: {}, filter: [[tokens, '<', word]]}", responses)


def test_an_empty_selection_is_one_message_and_leaves_nothing(tmp_path):
    recipe_with(tmp_path)
    split = write_rows(tmp_path / "train-split.jsonl", ["a"])
    judged, counts, export = tmp_path / "judged.parquet", tmp_path / "1-of-1.json", tmp_path / "record.json"
    write_table(pa.Table.from_pylist([response(1, 0, 0.0)], schema=JUDGED), judged)
    counts.write_text(json.dumps({"prompts": 1, "left_out": {}}))
    record = {"stage": "sft", "step": 1, "identity": "0" * 16, "content": "c0", "files": {}}
    export.write_text(json.dumps(record))
    output = tmp_path / "out"
    options = {"prompts": split, "judged": judged, "sampled": [counts], "makers": [export], "output": output}
    message = refusal(selecting.main, recipe=tmp_path / "recipe.yaml", blend="best", **options)
    assert "blends.best: no row is left of 1 prompts" in message and "1 responses below 1.0" in message
    assert not output.exists()


def test_what_ruins_dpo_is_warned_of(tmp_path):
    responses = [each for line in range(6) for each in (response(line, 0, 1.0, 20), response(line, 1, 0.0, 10))]
    responses += [response(line, sample, 1.0) for line in range(6, 12) for sample in range(2)]
    rows, selection = selected("{pairs: {}}", responses)
    shown = selecting.described(selection, rows, Counter({MATH: 6}))
    assert shown["longer_chosen"] == 1.0
    assert "chosen responses are 100% longer" in shown["warnings"][0]
    assert "6 of 12 prompts have no better and worse response" in shown["warnings"][1]
    assert shown["pass_rates"] == {MATH: [0, 0, 0, 0, 6, 0, 0, 0, 6]}


def test_plan_and_budget_count_the_sampling_of_64_nodes(edited, tmp_path):
    told = "by: rlvr1, prompts: rlvr1, samples: 8, max_new_tokens: 16384, shards: 64, runtime: 240"
    blend = f"  rlvr2:\n    source: {{kind: generated, {told}}}\n    select: {{pass_rate: {{min: 0.1, max: 0.9}}}}\n"
    recipe = edited("super3", ("  rlvr2: {}\n", blend))
    site = load_site(ROOT / "config/sites/h100.yaml", recipe)
    says = (
        "blend rlvr2: 8 responses of rlvr1 to prompts that are not there yet, in 64 jobs, ≤ 4 h each, ≤ 2,048 GPU-hours"
    )
    project = Project(recipe, site, tmp_path / "results")
    assert says in plan_text(project)
    small = site.model_copy(update={"slurm": site.slurm.model_copy(update={"budget_gpu_hours": 1000.0})})
    assert "sampling 2,048" in refusal(check_budget, replace(project, site=small), stages={"rlvr2"})
    assert "sampling" not in refusal(check_budget, replace(project, site=small), stages={"rlvr1"})


SWEPT = ("sft: {max_num_steps: 120}", "sft: {max_num_steps: 120}, sweep: {policy.optimizer.lr: [1.0e-3, 2.0e-3]}")
CHILD = ("parent: sft", "parent: {stage: sft, best: held_out_mean}")
VARIANTS = ["sft.lr-0.001", "sft.lr-0.002"]


@pytest.mark.parametrize(
    ("by", "makers"),
    [
        ("{stage: sft, best: held_out_mean}", ["sft.best-held_out_mean"]),
        ("{stage: sft, each: true}", VARIANTS),
        ("[{stage: sft, each: true}, {stage: sft, best: held_out_mean}]", [*VARIANTS, "sft.best-held_out_mean"]),
        ("sft.lr-0.001", ["sft.lr-0.001"]),
        (
            "[{stage: sft.lr-0.001, checkpoint: 60}, {stage: sft.lr-0.002}]",
            ["sft.lr-0.001.step-60", "sft.lr-0.002"],
        ),
    ],
)
def test_variants_their_best_or_a_checkpoint_respond(edited, by, makers):
    recipe = edited("tiny-rft", ("by: sft", f"by: {by}"), SWEPT, CHILD)
    assert recipe.blends["best"].source.models == makers
    assert {*makers} <= {*recipe.stages, *recipe.checkpoints, *recipe.choices}
    assert recipe.graph["rft"].trained_before == {*VARIANTS}


def test_a_checkpoint_of_a_stage_without_a_sweep_responds(edited):
    recipe = edited("tiny-rft", ("by: sft", "by: {stage: sft, checkpoint: 60}"))
    assert recipe.blends["best"].source.models == ["sft.step-60"]
    assert recipe.stages["sft"].checkpointing.keep_steps == [60]


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("sft", "sft has variants: start from one (sft.lr-0.001)"),
        ("{stage: sft}", "sft has variants: say each: true, or best: held_out_mean"),
        ("{stage: stf, best: held_out_mean}", "no stage is named stf; did you mean sft"),
    ],
)
def test_variants_are_not_chosen_from_in_silence(refused, by, says):
    said = refused("tiny-rft", ("by: sft", f"by: {by}"), SWEPT, CHILD)
    assert says in said and "blends.best.source.by" in said
