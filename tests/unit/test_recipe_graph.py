"""The graph of a recipe: what each node answers, of all shipped recipes and of one that has every kind of node."""

import copy

import pytest
import yaml

from scripts.errors import UserError
from scripts.recipe.load import load_recipe
from scripts.recipe.model import MODEL, PretrainedModel
from tests.conftest import ROOT

RECIPES = sorted((ROOT / "config/recipes").glob("*.yaml"))
EVERYTHING = """
name: everything
seed: 3
source: {kind: synthetic}
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}
models: {other: {name: org/other}}
blends:
  sft: {kind: demonstrations, rows: 400, holdout: 20, environments: [math_with_judge_simple_agent]}
  prefs: {kind: preferences, rows: 400, holdout: 20, environments: [math_with_judge_simple_agent]}
  rlvr: {rows: 80, holdout: 20, test: 5, environments: [math_with_judge_simple_agent]}
  made:
    source: {kind: generated, by: [other, {stage: rlvr, best: held_out_mean}], prompts: rlvr, max_new_tokens: 12}
    select: {pass_rate: {max: 0.9}}
  pairs:
    source: {kind: generated, by: {stage: sft, checkpoint: 10}, prompts: made, samples: 2, max_new_tokens: 12}
    select: {pairs: {margin: 0.1}, rank: {by: judge}}
evaluation: {max_new_tokens: 12, test: true}
defaults:
  grpo:
    grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 3}
    policy: &policy {max_total_sequence_length: 64, optimizer: {lr: 1.0e-3}, generation: {max_new_tokens: 12}}
    checkpointing: {save_period: 1}
  sft:
    sft: {max_num_steps: 30}
    policy: &batched {max_total_sequence_length: 64, train_global_batch_size: 16, optimizer: {lr: 1.0e-2}}
  distillation: {policy: *policy, distillation: {max_num_steps: 3, num_prompts_per_step: 4}}
  dpo: {policy: *batched, dpo: {max_num_steps: 3}}
  reward: {policy: *batched, reward: {max_num_steps: 3}}
stages:
  sft: {algorithm: sft, blend: sft}
  judge: {algorithm: reward, parent: sft, blend: prefs}
  rlvr: {algorithm: grpo, parent: sft, blend: rlvr, sweep: {seed: [1, 2]}}
  each: {algorithm: grpo, parent: {stage: rlvr, each: true}, blend: rlvr}
  early: {algorithm: grpo, parent: {stage: rlvr, checkpoint: [1, 2], best: held_out_mean}, blend: rlvr}
  more: {algorithm: sft, continues: sft, blend: sft, sft: {max_num_steps: 60}}
  rft: {algorithm: grpo, parent: sft, blend: made}
  dpo: {algorithm: dpo, parent: {stage: sft, checkpoint: 20}, blend: pairs}
  taught:
    algorithm: distillation
    parent: sft
    blend: rlvr
    teachers: {teacher: {stage: rlvr, best: held_out_mean}}
  soup: {algorithm: merge, merge: {rlvr.seed-1: 0.7, rlvr.seed-2: 0.3}}
  after: {algorithm: grpo, parent: soup, blend: rlvr, quantize: {format: int4, group_size: 32}}
"""
VARIANTS = ["rlvr.seed-1", "rlvr.seed-2"]
BEST = "rlvr.best-held_out_mean"


@pytest.fixture
def everything(tmp_path):
    """The recipe that has every kind of node."""
    path = tmp_path / "everything.yaml"
    path.write_text(EVERYTHING)
    return load_recipe(path)


def names(nodes):
    """The nodes' names, in their order."""
    return [node.name for node in nodes]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_node_answers_as_the_recipe_is_written(path):
    """What comes before a start is what its settings name; all else follows from that by the definitions here."""
    recipe = load_recipe(path)
    graph = recipe.graph
    order = names(graph.order)
    assert sorted(order) == sorted(recipe.stages)
    for name, settings in recipe.stages.items():
        stage = graph[name]
        assert stage.settings is settings and (stage.stage, stage.trained) == (name, {name})
        assert names(stage.parents) == [each for each in (settings.parent,) if each]
        assert {role: start.name for role, start in stage.roles.items()} == settings.roles
        parents = [settings.parent] if settings.parent else []
        starts = list(dict.fromkeys([*parents, *settings.roles.values()]))
        assert names(stage.starts) == starts and {*stage.starts} <= {*stage.before}
        assert {start.name for start in stage.before} - {MODEL} == {*starts, *names(stage.makers)} - {MODEL}
        assert all(order.index(before) < order.index(name) for before in stage.trained_before), "parents come first"
        above = [start.lineage for start in stage.before]
        assert stage.lineage == frozenset({stage}).union(*above)
        for start in stage.lineage:
            assert (stage in graph.descendants(start)) and (start.settings is None) == (start.trained == frozenset())
    for name, blend in recipe.blends.items():
        rows = graph.rows(name)
        assert rows.blend is blend and names(rows.makers) == blend.makers
        assert names(rows.prompts) == ([blend.source.prompts] if name in recipe.generated else [])
    assert all(isinstance(model, PretrainedModel) for model in graph.pretrained.values())


@pytest.mark.parametrize(
    ("name", "before", "trained_before", "scored"),
    [
        ("sft", [], [], True),
        ("judge", ["sft"], ["sft"], False),
        (VARIANTS[0], ["sft"], ["sft"], True),
        (BEST, VARIANTS, VARIANTS, True),
        ("each.seed-2", [VARIANTS[1]], [VARIANTS[1]], True),
        ("sft.step-10", ["sft"], ["sft"], True),
        ("rlvr.seed-1.step-2", [VARIANTS[0]], [VARIANTS[0]], True),
        ("early", ["rlvr.checkpoints.best-held_out_mean"], VARIANTS, True),
        ("more", ["sft"], ["sft"], True),
        ("rft", ["sft", "other", BEST], ["sft", *VARIANTS], True),
        ("dpo", ["sft.step-20", "sft.step-10", "judge", "other", BEST], ["judge", "sft", *VARIANTS], True),
        ("taught", ["sft", BEST], ["sft", *VARIANTS], True),
        ("soup", VARIANTS, VARIANTS, True),
        ("other", [], [], False),
    ],
)
def test_every_kind_of_start_tells_what_comes_before_it(everything, name, before, trained_before, scored):
    start = everything.graph[name]
    assert names(start.before) == before and start.trained_before == {*trained_before}
    assert start.is_scored is scored and names(start.scored) == [name] * scored


@pytest.mark.parametrize(
    ("name", "alternatives", "is_resolved", "is_scored_itself", "steps", "trains", "again"),
    [
        ("sft", ["sft"], True, True, (), ["sft"], ""),
        ("judge", ["judge"], True, False, (), ["judge"], ""),
        ("sft.step-10", ["sft.step-10"], True, True, (10,), [], "is a checkpoint of sft"),
        (BEST, VARIANTS, False, False, (), [], "is chosen and not trained"),
    ],
)
def test_a_start_answers_as_its_kind_does(
    everything, name, alternatives, is_resolved, is_scored_itself, steps, trains, again
):
    start = everything.graph[name]
    assert names(start.alternatives) == alternatives and start.is_resolved is is_resolved
    assert start.is_scored_itself is is_scored_itself and start.early_steps == steps
    assert names(start.trains) == trains and start.why_not_again.startswith(again)
    assert bool(start.why_not_again) is bool(again)


def test_a_checkpoint_has_its_step_or_the_end_of_a_training_that_ends_before(everything):
    graph = everything.graph
    assert [graph["sft.step-10"].last_step(trained) for trained in (None, 7, 30)] == [10, 7, 10]
    assert [graph["sft"].last_step(trained) for trained in (None, 7)] == [None, 7]


def test_a_stage_that_goes_on_names_the_stage_before(everything):
    graph = everything.graph
    assert names(graph["more"].continued) == ["sft"] and graph["rft"].continued == ()
    assert graph.continued == {"sft"}


def test_a_merge_is_made_by_another_rule(everything):
    by_rule = {stage.name: stage.settings.rule for stage in everything.graph.order}
    assert by_rule.pop("soup") == "merge" and {*by_rule.values()} == {"train"}


def test_a_checkpoint_and_a_choice_answer_for_the_stages_that_train_them(everything):
    graph, stages = everything.graph, everything.stages
    early, best = graph["rlvr.seed-2.step-2"], graph[BEST]
    assert (early.settings, early.stage, early.trained) == (stages[VARIANTS[1]], VARIANTS[1], {VARIANTS[1]})
    assert (best.settings, best.stage, best.trained) == (stages[VARIANTS[0]], BEST, {*VARIANTS})
    assert names(early.stage_node) == names(early.waits_for) == [VARIANTS[1]] and best.waits_for == ()
    assert early.step == 2 and best.choice.by == "held_out_mean"


def test_rows_name_the_rows_and_the_starts_behind_them(everything):
    pairs, made, rlvr = (everything.graph.rows(name) for name in ("pairs", "made", "rlvr"))
    assert names(pairs.lineage) == ["pairs", "made", "rlvr"] and names(rlvr.lineage) == ["rlvr"]
    assert names(pairs.models) == ["sft.step-10"] and names(pairs.rankers) == ["judge"]
    assert names(pairs.makers) == ["sft.step-10", "judge"] and names(made.makers) == ["other", BEST]
    assert names(pairs.made_by) == ["sft.step-10", "judge", "other", BEST] and rlvr.made_by == ()
    assert names(made.held_out) == ["rlvr"] == names(made.held_out_tests)


def test_a_node_names_the_files_that_come_to_be_in_its_folder(everything):
    graph = everything.graph
    scores = ("eval.json", "rollouts.parquet", "test.json", "quantized/eval.json")
    assert graph["after"].files("gate.json", *scores) == [f"after/{name}" for name in ("gate.json", *scores)]
    assert graph["soup"].files(*scores) == ["soup/eval.json", "soup/rollouts.parquet"]
    assert graph["judge"].files(*scores) == ["judge/eval.json"], "its held-out rows of written answers are measured"
    assert graph["other"].files("gate.json", "hf/record.json", "benchmarks.json") == ["other/hf/record.json"]
    splits = ("train-split.jsonl", "test-split.jsonl")
    assert graph.rows("rlvr").files(*splits) == ["data/rlvr/train-split.jsonl", "data/rlvr/test-split.jsonl"]
    assert graph.rows("pairs").files(*splits) == ["data/pairs/train-split.jsonl"]
    assert graph.rows("sft").files("MMPR/images/.extracted.json") == []


def test_the_scores_before_a_start_are_of_its_parent_or_of_the_model_at_the_beginning(everything):
    graph = everything.graph
    assert names(graph["soup"].scores_before) == [VARIANTS[0]], "the part with the largest share"
    assert names(graph["after"].scored_before) == ["soup"] and graph["after"].unscored_before == ()
    assert graph["after"].root is graph["sft"] and names(graph["after"].root_fresh) == ["sft"]
    whole = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml").graph
    last = whole.order[-1]
    assert names(last.root_model) == [MODEL] == names(last.root.origin) and last.root_fresh == () == last.root.fresh
    assert names(last.root.unscored_before) == [MODEL]


def test_the_ends_are_what_nothing_starts_from_but_no_variants(everything):
    assert names(everything.graph.ends) == ["early", "more", "rft", "dpo", "taught", "after"]
    assert names(everything.graph.tested_rows) == ["rlvr"] == names(everything.graph.scored_rows)
    assert [*everything.graph.pretrained] == ["other"]


def test_a_copy_of_a_recipe_has_a_graph_of_its_own(everything):
    stage, model = everything.stages["sft"], PretrainedModel(name="org/model")
    assert everything.graph["sft"].origin == () and everything.graph["sft"].settings is stage
    other = everything.model_copy(update={"model": model, "stages": everything.stages | {"sft": stage.model_copy()}})
    assert names(other.graph["sft"].origin) == [MODEL] and other.graph["sft"].settings is not stage
    assert everything.graph["sft"].origin == (), "the recipe that was copied keeps its own"
    for same in (everything.model_copy(deep=True), copy.deepcopy(everything)):
        assert same.graph["dpo"].settings is same.stages["dpo"] and same.graph is not everything.graph


def test_where_a_recipe_starts_later_its_graph_has_no_earlier_stages(tmp_path):
    path = tmp_path / "everything.yaml"
    path.write_text(EVERYTHING)
    graph = load_recipe(path, start="rlvr").graph
    stays = {*VARIANTS, "each.seed-1", "each.seed-2", "early", "soup", "after"}
    assert {*names(graph.order)} == stays, "what needs a stage that is left out is left out too"
    assert graph[BEST].before and all(graph[name].origin == () for name in VARIANTS)
    with pytest.raises(KeyError):
        graph["sft"]


def test_stages_that_need_each_other_are_refused_with_the_cycle(tmp_path):
    recipe = yaml.safe_load(EVERYTHING)
    recipe["stages"]["sft"]["parent"] = "more"
    path = tmp_path / "circle.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.raises(UserError, match=r"the stages start from each other: (sft -> more -> sft|more -> sft -> more)"):
        load_recipe(path)


def test_a_reward_model_is_neither_scored_nor_judged_on_tasks(tmp_path):
    recipe = yaml.safe_load(EVERYTHING)
    recipe["evaluation"]["tasks"] = ["gsm8k"]
    path = tmp_path / "tasks.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    graph = load_recipe(path).graph
    assert graph["sft"].files("benchmarks.json") == ["sft/benchmarks.json"]
    assert graph["judge"].files("benchmarks.json") == [] == graph["other"].files("benchmarks.json")
    recipe["stages"]["judge"]["gate"] = [{"metric": "benchmark_score", "benchmark": "gsm8k", "min": 0.5}]
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.raises(UserError, match=r"stages\.judge\.gate\.0\.metric: is of tasks, whose prompts a reward model"):
        load_recipe(path)
