"""Answers that say nothing of their prompt: what they are paid, that the probe warns of them, that the page lists them."""

import json
import re
from collections import Counter

import pytest

from scripts.recipe.environment import Environment
from scripts.recipe.judges import Judges, JudgeServer
from scripts.recipe.probe import Probe
from scripts.rewards.instructions import obeys
from scripts.rewards.judge import JudgeClients
from scripts.rewards.probe_responses import EVERYWHERE, known_cheap, other_cheap
from scripts.rewards.registry import SPECS, answers_of, check_row, score
from scripts.rewards.sentences import tokens
from scripts.rewards.trial import SampledRow
from scripts.stage.probe import CHEAP_ROWS, try_rewards
from tests.conftest import ROOT
from tests.gym.cheap_rows import cheap_rows
from tests.gym.rows import TOOL_USE
from tests.gym.verify import gym_verify, needs_gym
from tests.judge_server import serve

CHEAP = list(cheap_rows())
HERE = [known for known in CHEAP if check_row(known[1]) is None]
EXAMPLES = ROOT.parent / "shared/gym-examples"
FILES = {
    "structured_outputs": [Environment.STRUCTURED_OUTPUTS],
    "single_step_tool_use_with_argument_comparison": [*TOOL_USE, Environment.PARALLEL_TOOL_USE],
    "instruction_following": [Environment.INSTRUCTION_FOLLOWING],
    "code_gen": [Environment.CODE_GEN],
}


def name_of(row: dict) -> str:
    return row["agent_ref"]["name"]


def probe(rows: list[dict], judges: JudgeClients | None = None):
    samples = [SampledRow(f"split:{number}", row) for number, row in enumerate(rows, 1)]
    return try_rewards({name_of(rows[0]): samples}, Probe(seconds_per_check=30), judges, 100)


def test_every_known_cheap_answer_has_a_row_here_that_pays_it():
    judged = {Environment.EQUIVALENCE, Environment.LC_JUDGE}
    known = {(name, it.what) for name, spec in SPECS.items() for it in spec.cheap if name not in judged}
    assert {(name_of(row), what) for what, row, _ in CHEAP} == known


@needs_gym
def test_gym_pays_those_of_environments_without_a_verifier_here():
    gyms = [known for known in CHEAP if known not in HERE]
    pairs = [
        (row, it.text) for what, row, _ in gyms for it in known_cheap(row, SPECS[name_of(row)].cheap) if it.what == what
    ]
    assert [verdict.reward for verdict in gym_verify(pairs)] == [paid for _, _, paid in gyms]
    assert {name_of(row) for _, row, _ in gyms} >= {Environment.CALENDAR, Environment.WORKPLACE}


@pytest.mark.parametrize(("what", "row", "paid"), HERE, ids=[f"{name_of(row)}-{what}" for what, row, _ in HERE])
def test_a_cheap_answer_is_paid_as_in_gym_and_the_probe_says_so(what, row, paid):
    (response,) = [it for it in known_cheap(row, SPECS[name_of(row)].cheap) if it.what == what]
    assert score(row, response.text) == paid
    warnings = probe([row] * 3).warnings
    (says,) = [it for it in warnings if "says nothing of the prompt" in it]
    start = f"{name_of(row)} pays {what}, which says nothing of the prompt, in 3 of 3 rows, 100% (the first: split:1, "
    assert says.startswith(f"{start}{paid:g}, where 0 is the most it may earn)"), says
    assert f"; {response.remedy}, drop these rows, or accept it" in says


def test_the_share_is_of_all_rows_and_the_first_that_pays_is_named():
    pays = next(row for what, row, _ in CHEAP if what == "`1`")
    asks = [
        pays | {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["tea" * number]}]}
        for number in range(1, CHEAP_ROWS + 1)
    ]
    rows = asks.copy()
    rows[21] = rows[30] = pays
    (says,) = probe(rows).warnings
    assert "pays `1`, which says nothing of the prompt, in 2 of 40 rows, 5% (the first: split:22, 1, where 0" in says
    assert probe(asks).warnings == []


def test_a_judge_that_repeats_the_label_in_an_answer_is_found():
    row = {"expected_answer": "Bern", "responses_create_params": {"input": "Which town?"}}
    row |= {"agent_ref": {"name": str(Environment.EQUIVALENCE)}}
    labels = []

    def judge(messages):
        text = "".join(message["content"] for message in messages)
        labels.append(text.count("[[A=B]]"))
        return "[[A=B]]" if labels[-1] > min(labels) or text.count("Bern") > 1 else "[[A!=B]]"

    with serve(judge) as server:
        clients = JudgeClients(
            Judges.model_validate({"general": {"model": "m"}}),
            {"general": JudgeServer(base_url=server.base_url, max_retries=5)},
        )
        warnings = probe([row] * 2, clients).warnings
    assert any("pays `[[A=B]]`" in it and "name another judge or prompt, drop" in it for it in warnings), warnings


def test_answers_that_say_nothing_are_tried_in_every_environment_but_where_they_are_right():
    assert [it.text for it in other_cheap(None, [])] == list(EVERYWHERE)
    assert "1" not in [it.text for it in other_cheap(r"\boxed{1}", [])]
    assert {"[]", "{}"} <= {it.text for it in other_cheap("[]", [])}
    mine = {"agent_ref": {"name": str(Environment.MATH)}, "responses_create_params": {"input": "?"}}
    mine |= {"question": "?", "expected_answer": "1"}
    assert probe([mine] * 2).warnings == []
    good = answers_of(mine).good
    assert score(mine, "1") == 1.0 == score(mine, good)


def test_two_quotes_are_one_word_twice_as_in_gym():
    """NLTK reads both as opening quotes, so they are not unique, and the first is the last."""
    assert not obeys("count:count_unique", '""', {})
    assert obeys("keywords:start_end", '""', {})
    assert tokens('a "" b ""') == ["a", "``", "''", "b", "``", "''"]


def test_one_right_answer_for_most_rows_is_warned_of():
    rows = [
        {"agent_ref": {"name": str(Environment.MCQA)}, "responses_create_params": {"input": "?"}}
        | {"options": [{"A": "tea"}, {"B": "rum"}], "expected_answer": "AAB"[number % 3]}
        for number in range(30)
    ]
    (says,) = probe(rows).warnings
    assert r"the same answer, '\\boxed{A}', is right in 20 of 30 rows, 67% (the first: split:1)" in says
    assert probe(rows[:12]).warnings == []
    assert probe([row | {"expected_answer": "AB"[place % 2]} for place, row in enumerate(rows)]).warnings == []


# The page.


def table() -> list[list[str]]:
    section = (ROOT / "docs/environments.md").read_text().partition("### Cheap answers")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_page_lists_the_cheap_answers_that_the_environments_know():
    listed = {(name, answer, paid) for names, answer, paid, _ in table() for name in re.findall(r"`([^`]+)`", names)}
    assert listed == {(str(name), it.what, it.paid) for name, spec in SPECS.items() for it in spec.cheap}


@pytest.mark.skipif(not EXAMPLES.exists(), reason=f"{EXAMPLES} is absent")
def test_the_page_says_how_many_of_gyms_published_rows_pay_them():
    paid = Counter()
    for file, names in FILES.items():
        examples = [json.loads(line) for line in (EXAMPLES / f"{file}.jsonl").read_text().splitlines()]
        for name in names:
            rows = [row | {"agent_ref": {"type": "responses_api_agents", "name": str(name)}} for row in examples]
            for it in SPECS[name].cheap:
                texts = [(row, it.text(row)) for row in rows]
                earning = sum(score(row, text) > 0 for row, text in texts if text is not None)
                paid[str(name), it.what] = f"{earning} of {len(rows)}"
    for names, answer, _, share in table():
        for name in (name for name in re.findall(r"`([^`]+)`", names) if SPECS[name].verify or SPECS[name].judged):
            assert paid.get((name, answer), "-") == share, (name, answer)
