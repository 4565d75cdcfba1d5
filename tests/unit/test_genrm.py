"""genrm_compare: the sheet's worked example, a slow and obvious reference, the judge's words, and each default."""

import importlib.util
import json
import logging
import math
import os
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.recipe.judges import GenRM, Judges, JudgeServer
from scripts.rewards import genrm_compare
from scripts.rewards import judge as judge_module
from scripts.rewards.genrm_compare import (
    Candidate,
    PairVerdict,
    pairs,
    question,
    read_comparison,
    rewards,
    small_is_good,
    style_density,
    with_bonuses,
)
from scripts.rewards.judge import JudgeClients, JudgeUnavailable
from scripts.rewards.registry import reward_groups, scores
from tests.judge_server import Fault, in_turn, serve

ROW = {"agent_ref": {"name": "genrm_simple_agent"}, "responses_create_params": {"input": "Say hello."}}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE", 0.01)


def panel(url: str, **genrm: object) -> JudgeClients:
    judges = Judges.model_validate({"genrm": {"model": "rm", "genrm_parse_retry_sleep_s": 0} | genrm})
    return JudgeClients(judges, {"genrm": JudgeServer(base_url=url, timeout=5, max_retries=1)})


def verdict(score_1: float, score_2: float, ranking: float) -> str:
    return json.dumps({"score_1": score_1, "score_2": score_2, "ranking": ranking})


# The computation.


def test_the_worked_example_only_the_shortest_answer_earns_its_bonus():
    with_bonus = GenRM(model="m", reasoning_bonus=0.5, answer_bonus=0.5)
    base, reasoning, answers = [4.0, 3.0, 3.0, 2.0], [100, 50, 200, 150], [10, 20, 30, 40]
    assert with_bonuses(base, reasoning, answers, with_bonus) == [4.5, 3.0, 3.0, 2.0]


def test_the_worked_example_from_the_judges_scores_on():
    group = [
        Candidate("r" * reasoning, "a" * answer) for reasoning, answer in ((100, 10), (50, 20), (200, 30), (150, 40))
    ]
    said = [PairVerdict(4, 3, 2), PairVerdict(3, 3, 3.5), PairVerdict(3, 2, 3), PairVerdict(2, 4, 6)]
    comparisons = list(zip(pairs("circular", 4), said, strict=True))
    plain = {"reasoning_bonus": 0.5, "answer_bonus": 0.5}
    assert rewards(group, comparisons, GenRM(model="m", **plain)) == [4.5, 3.0, 3.0, 2.0]
    lengths = {"group_reasoning_length_penalty_coeff": 0.3, "group_answer_length_penalty_coeff": 0.35}
    # Weights of reasoning 2/3, 1, 0, 1/3 and of answers 1, 2/3, 1/3, 0, each less its mean of 1/2.
    assert rewards(group, comparisons, GenRM(model="m", **plain, **lengths)) == pytest.approx(
        [4.5 + 0.3 / 6 + 0.35 / 2, 3 + 0.3 / 2 + 0.35 / 6, 3 - 0.3 / 2 - 0.35 / 6, 2 - 0.3 / 6 - 0.35 / 2]
    )


def test_a_tie_is_broken_by_the_ranking():
    group, met = [Candidate("", "a"), Candidate("", "b")], [(0, 1)]
    settings_ = GenRM(model="m")
    assert rewards(group, [(met[0], PairVerdict(3, 3, 1))], settings_) == [5.5, 0.5]
    assert rewards(group, [(met[0], PairVerdict(3, 3, 6))], settings_) == [0.5, 5.5]
    assert rewards(group, [(met[0], PairVerdict(4, 3, 6))], settings_) == [4, 3]


def test_the_answers_bonus_looks_at_the_score_with_the_reasonings_bonus_and_the_threshold_before_it():
    settings_ = GenRM(model="m", reasoning_bonus=0.5, answer_bonus=0.25, top_percentile=0.5)
    assert with_bonuses([4.0, 3.0, 2.0, 1.0], [0, 5, 9, 9], [9, 5, 9, 9], settings_) == [4.0, 3.75, 2.0, 1.0]
    assert with_bonuses([4.0, 4.0, 2.0, 1.0], [7, 7, 9, 9], [0, 0, 0, 0], settings_) == [4.5, 4.0, 2.0, 1.0]
    lifted = GenRM(model="m", reasoning_bonus=2, answer_bonus=0.25, top_percentile=0)
    assert with_bonuses([4.0, 3.0], [5, 1], [5, 1], lifted) == [4.0, 3.0]


def test_pairs_go_round_or_each_to_each():
    assert pairs("circular", 3) == [(0, 1), (1, 2), (2, 0)]
    assert pairs("circular", 2) == [(0, 1), (1, 0)]
    assert pairs("all_pairs", 4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs("circular", 1) == pairs("all_pairs", 1) == []


@pytest.mark.parametrize(
    ("text", "elements", "length"),
    [
        ("# a\n## b\nplain", 2, 14),
        ("- a\n* b\n+ c\n1. d\n", 4, 16),
        ("**a** and __b__", 2, 15),
        ("ok 🎉🎉", 2, 5),
        ("```\n# no\n```\n**b**", 1, 5),
        ("#no -no", 0, 7),
        ("```\n# no\n```", 0, 1),
        ("", 0, 1),
    ],
)
def test_style_is_counted_outside_code(text, elements, length):
    assert style_density(text) == elements / length


def brute_force(group, comparisons, coefficients):
    """The sheet's steps 3 to 7, said as slowly as they can be."""
    reasoning_bonus, answer_bonus, share, c_reasoning, c_answer, c_style = coefficients
    count = len(group)
    totals, seen = [0.0] * count, [0] * count
    for (i, j), (score_1, score_2, ranking) in comparisons:
        d = 3.5 - ranking if score_1 == score_2 else 0.0
        for place, score in ((i, score_1 + d), (j, score_2 - d)):
            totals[place] += score
            seen[place] += 1
    result = [totals[place] / seen[place] if seen[place] else 3.0 for place in range(count)]
    if count < 2:
        return result
    threshold = sorted(result, reverse=True)[max(0, int(count * share) - 1)]
    for bonus, part in ((reasoning_bonus, 0), (answer_bonus, 1)):
        lengths = {place: len(group[place][part].strip()) for place in range(count)}
        nonempty = [place for place in range(count) if lengths[place] > 0]
        winners = [place for place in nonempty if all(lengths[place] <= lengths[other] for other in nonempty)]
        if winners and result[winners[0]] >= threshold:
            result[winners[0]] += bonus
    measures = [
        (c_reasoning, [len(reasoning.strip()) for reasoning, _ in group]),
        (c_answer, [len(answer.strip()) for _, answer in group]),
        (c_style, [answer.count("**b**") / len(answer.strip()) if answer.strip() else 0.0 for _, answer in group]),
    ]
    for coefficient, values in measures:
        low, high = min(values), max(values)
        weights = [0.0 if low == high else 1 - (value - low) / (high - low) for value in values]
        for place in range(count):
            result[place] += coefficient * (weights[place] - fmean(weights))
    return result


texts = st.builds(lambda plain, bold: " ".join(["x"] * plain + ["**b**"] * bold), st.integers(0, 6), st.integers(0, 3))
coefficient = st.sampled_from([0.0, 0.05, 0.3, 0.35, 0.5])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rewards_are_those_of_the_slow_reference(data):
    group = data.draw(st.lists(st.builds(Candidate, texts, texts), min_size=1, max_size=7))
    strategy, judges = data.draw(st.sampled_from(["circular", "all_pairs"])), data.draw(st.integers(1, 3))
    score = st.sampled_from([1.0, 2.0, 3.0, 3.5, 4.0, 5.0])
    said = st.builds(PairVerdict, score, score, st.sampled_from([1.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0]))
    comparisons = [(pair, data.draw(said)) for pair in pairs(strategy, len(group)) * judges]
    chosen = [data.draw(coefficient) for _ in range(2)] + [data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))]
    chosen += [data.draw(coefficient) for _ in range(3)]
    names = ("reasoning_bonus", "answer_bonus", "top_percentile")
    names += tuple(f"group_{part}_penalty_coeff" for part in ("reasoning_length", "answer_length", "style"))
    model = GenRM(model="m", **dict(zip(names, chosen, strict=True)))
    assert rewards(group, comparisons, model) == pytest.approx(brute_force(group, comparisons, chosen))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_weights_of_lengths_sum_to_nothing_and_favour_the_short(lengths):
    weights = small_is_good(lengths)
    assert math.isclose(sum(weights), 0, abs_tol=1e-9)
    assert max(weights) - min(weights) == pytest.approx(0 if len(set(lengths)) == 1 else 1)
    assert all(
        one >= other
        for one, a in zip(weights, lengths, strict=True)
        for other, b in zip(weights, lengths, strict=True)
        if a <= b
    )


# Agreement with NeMo-Gym's own functions.


@pytest.fixture(scope="module")
def gym():
    """NeMo-Gym's genrm_compare/utils.py."""
    if not os.environ.get("STAGECOACH_NEMO_GYM"):
        pytest.skip("STAGECOACH_NEMO_GYM names no checkout of NeMo-Gym")
    path = Path(os.environ["STAGECOACH_NEMO_GYM"], "resources_servers/genrm_compare/utils.py")
    spec = importlib.util.spec_from_file_location("gym_genrm_compare", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logging.getLogger("gym_genrm_compare").setLevel(logging.CRITICAL)
    return module


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rewards_are_those_that_gym_computes(gym, data):
    strategy, judges = data.draw(st.sampled_from(["circular", "all_pairs"])), data.draw(st.integers(1, 3))
    group = data.draw(st.lists(st.builds(Candidate, texts, texts), min_size=2, max_size=7))
    score = st.integers(1, 5).map(float)
    said = st.builds(PairVerdict, score, score, st.integers(1, 6).map(float))
    comparisons = [(pair, data.draw(said)) for pair in pairs(strategy, len(group)) * judges]
    bonuses = {name: data.draw(coefficient) for name in ("reasoning_bonus", "answer_bonus")}
    penalties = {
        f"group_{part}_penalty_coeff": data.draw(coefficient) for part in ("reasoning_length", "answer_length", "style")
    }
    model = GenRM(model="m", comparison_strategy=strategy, **bonuses, **penalties)
    assert gym.generate_comparison_pairs(strategy, len(group)) == pairs(strategy, len(group))
    final, _, _, _ = gym.aggregate_scores(
        comparison_results=[tuple(it) for _, it in comparisons],
        comparison_metadata=[(*pair, 0) for pair, _ in comparisons],
        response_objs=[
            {
                "output": [
                    {"type": "reasoning", "summary": [{"text": reasoning}]},
                    {"type": "message", "content": [{"type": "output_text", "text": answer}]},
                ]
            }
            for reasoning, answer in group
        ],
        aggregator_method="simple_tiebreaker",
        default_score=3.0,
        top_percentile=model.top_percentile,
        **bonuses,
        **penalties,
    )
    assert rewards(group, comparisons, model) == pytest.approx(final)


@settings(max_examples=300, deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(["# ", "- ", "1. ", "**a**", "__b__", "```", "\n", "🎉", "日", " x "])).map("".join)
)
def test_style_is_as_dense_as_gym_finds_it(gym, text):
    assert style_density(text) == gym.compute_style_density(text)


@pytest.mark.parametrize(
    "text",
    [
        verdict(4, 2, 1),
        f"a {verdict(1, 1, 1)} b {verdict(4, 2, 2)} c",
        f"```json\n{verdict(5, 1, 1)}\n```\n{verdict(1, 5, 6)}",
        '{"rubric": [], "overall": {"score_1": 2, "score_2": 3, "ranking": 4}}',
        '{"score_1": "4"}',
        '{"note": "a } b {", "ranking": 2}',
        '{"score_1": "high"}',
        '{"other": {"score_1": 1}}',
        "nothing",
    ],
)
def test_the_judge_is_read_as_gym_reads_it(gym, text):
    found = read_comparison(text, GenRM(model="m"))
    assert tuple(found or (3.0, 3.0, 3.5)) == gym.parse_genrm_output(text, 3.0, 3.5)


# What the judge says.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (verdict(4, 2, 1), (4, 2, 1)),
        (f"first {verdict(1, 1, 1)} then {verdict(4, 2, 2)} end", (4, 2, 2)),
        (f"```json\n{verdict(5, 1, 1)}\n```\n{verdict(1, 5, 6)}", (5, 1, 1)),
        (f"```json\nnot this\n```\n```JSON\n{verdict(5, 1, 1)}\n```", (5, 1, 1)),
        ('{"rubric": [], "overall": {"score_1": 2, "score_2": 3, "ranking": 4}}', (2, 3, 4)),
        ('{"score_1": "4"}', (4, 3, 3.5)),
        ('{"ranking": 2}', (3, 3, 2)),
        ('{\n "score_1": 4,\n "note": "a } b {",\n "score_2": 1, "ranking": 1}', (4, 1, 1)),
        (f"{verdict(4, 2, 1)} {{cut", (4, 2, 1)),
        (f"{{a set}} {verdict(4, 2, 1)}", (4, 2, 1)),
        ('{"score_1": "high"}', None),
        ('{"score_1": NaN, "score_2": 1, "ranking": 1}', None),
        ('{"score_1": null}', None),
        ('{"other": 1}', None),
        ("score_1: 4", None),
        ("[1, 2]", None),
        ("{" * 5000, None),
        ("", None),
    ],
)
def test_the_scores_are_found_in_what_the_judge_says(text, found):
    assert read_comparison(text, GenRM(model="m")) == found


# The judge over HTTP.


def helpful(messages):
    """A judge for which a longer answer is the more helpful one."""
    first, second = (len(message["content"]) for message in messages[-2:])
    return f"Well.\n```json\n{verdict(min(first, 5), min(second, 5), 3.5 + (second - first) / 2)}\n```"


def test_a_group_is_compared_round_a_circle():
    with serve(helpful) as served:
        assert reward_groups([(ROW, ["a", "bbb", "ccccc"])], panel(served.base_url)) == [[1.0, 3.0, 5.0]]
        asked = [[message["content"] for message in body["messages"][-2:]] for body in served.asked]
    assert sorted(asked) == [["a", "bbb"], ["bbb", "ccccc"], ["ccccc", "a"]]
    body = served.asked[0]
    assert {key: body[key] for key in ("model", "temperature", "top_p", "max_tokens")} == {
        "model": "rm",
        "temperature": 0.6,
        "top_p": 0.95,
        "max_tokens": 16384,
    }


def test_every_pair_can_meet_several_times():
    with serve(helpful) as served:
        judges = panel(served.base_url, comparison_strategy="all_pairs", num_judges_per_comparison=2)
        assert reward_groups([(ROW, ["a", "bbb", "bbb"])], judges) == [[1.0, 3.0, 3.0]]
    assert len(served.asked) == 6


def test_the_judge_sees_the_conversation_and_the_answers_without_their_reasoning():
    row = ROW | {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            ]
        }
    }
    with serve(helpful) as served:
        reward_groups([(row, ["<think>hm</think>A", "<think>cut off"])], panel(served.base_url))
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answers = [{"role": "response_1", "content": "A"}, {"role": "response_2", "content": "None"}]
    first = next(asked for asked in served.asked if asked["messages"][2]["content"] == "A")  # both are asked at once
    assert first["messages"] == [*conversation, *answers]


def test_a_principle_stands_before_the_answers_where_one_is_used():
    model = GenRM(model="m", use_principle=True, default_principle="Be brief.")
    assert [it["role"] for it in question(ROW, "a", "b", model)] == ["user", "principle", "response_1", "response_2"]
    assert question(ROW, "a", "b", model)[1]["content"] == "Be brief."
    assert question(ROW | {"principle": "Be long."}, "a", "b", model)[1]["content"] == "Be long."
    assert len(question(ROW | {"principle": "Be long."}, "a", "b", GenRM(model="m"))) == 3


def test_a_judge_that_cannot_be_read_is_asked_again_and_then_gives_the_defaults():
    with serve(in_turn("?", "{}", verdict(5, 1, 1))) as served:
        assert scores([(ROW | {"reference": "b"}, "a")], panel(served.base_url)) == [1.0]
        assert len(served.asked) == 3
    with serve(in_turn("?")) as served:
        judges = panel(served.base_url)
        assert reward_groups([(ROW, ["a", "b"])], judges) == [[3.0, 3.0]]
        assert len(served.asked) == 2 * 4 and judges.unread_share() == 1.0
        ranked = panel(served.base_url, default_score=2.0, default_ranking=3.0, genrm_parse_retries=0)
        assert reward_groups([(ROW, ["a", "b"])], ranked) == [[2.0, 2.0]]


def test_a_lone_response_gets_the_default_and_nobody_is_asked():
    with serve(helpful) as served:
        assert reward_groups([(ROW, ["a"])], panel(served.base_url, default_score=2.5)) == [[2.5]]
    assert not served.asked


@pytest.mark.parametrize("fault", [Fault(500), Fault(0), Fault(429), Fault(200, "?")])
def test_an_outage_is_not_the_default_score(fault):
    with serve(in_turn(verdict(4, 2, 1), fault)) as served, pytest.raises(JudgeUnavailable, match="genrm judge rm"):
        reward_groups([(ROW, ["a", "b", "c"])], panel(served.base_url))


def test_without_a_judge_likeness_to_the_reference_compares():
    row = ROW | {"reference": "Hello."}
    assert reward_groups([(row, ["Hello.", "zzz"])]) == reward_groups([(row, ["Hello.", "zzz"])], None) == [[5.0, 1.0]]
    with serve(in_turn(verdict(1, 5, 6))) as served:
        judges = panel(served.base_url)
        assert scores([(row, "Hello.")], judges) == [0.0]
        assert genrm_compare.check_held_out(row) is None
