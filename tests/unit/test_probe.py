"""The reward probe stops a stage whose reward has a fault, and passes the rewards that have none."""

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import yaml

from demo.synthesize import FAMILIES, make_task
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.judges import Judges, JudgeServer
from scripts.recipe.load import load_recipe
from scripts.recipe.probe import Probe
from scripts.recipe.resolve import resolve_stage
from scripts.rewards.judge import JudgeClients, JudgeUnavailable
from scripts.rewards.probe_responses import probe_responses
from scripts.rewards.registry import SPECS, answers_of, check_row, score
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.trial import SampledRow
from scripts.rows.jsonl import key_of
from scripts.stage.probe import sample_rows, try_rewards
from scripts.train.preflight import check_stage
from tests.conftest import SHORT
from tests.judge_server import serve
from tests.stages import ready_stage

MATH, MCQA, GENRM = Environment.MATH, Environment.MCQA, Environment.GENRM


def rows_of(environment: str, count: int = 8) -> list[dict]:
    """Rows of the tiny recipe's task for an environment, whose prompts name no answer."""
    rng, rows = random.Random(environment), []
    for _ in range(count):
        task = make_task(environment, rng)
        params = {"input": [{"role": "user", "content": task.prompt}], "tools": list(task.tools)}
        rows.append({"agent_ref": {"name": str(environment)}, "responses_create_params": params, **task.fields})
    return rows


def sampled(rows: list[dict]) -> dict[str, list[SampledRow]]:
    return {rows[0]["agent_ref"]["name"]: [SampledRow(f"split:{number}", row) for number, row in enumerate(rows, 1)]}


def math_rows() -> list[dict]:
    """Rows whose prompts name no number."""
    return [
        {
            "agent_ref": {"name": str(MATH)},
            "responses_create_params": {"input": f"how many are in\nbox {'x' * number}?"},
            "question": "",
            "expected_answer": str(100 + number),
        }
        for number in range(8)
    ]


def replace_verifier(monkeypatch: pytest.MonkeyPatch, name: str, verify: Callable, compare: Callable | None = None):
    spec = replace(SPECS.get(name, EnvironmentSpec()), verify=verify, compare=compare)
    monkeypatch.setitem(SPECS, name, spec)


@pytest.fixture
def tried(monkeypatch):
    """Try a verifier in place of math's on rows whose prompts name no answer."""
    real = SPECS[MATH].verify

    def run(verify=real, rows=None, compare=None, **settings: object):
        replace_verifier(monkeypatch, MATH, verify, compare)
        return try_rewards(sampled(rows or math_rows()), Probe(**settings), None, 200)

    run.real = real
    return run


@pytest.mark.parametrize("environment", [it for it in FAMILIES if it != MATH])
def test_the_verifiers_of_the_tiny_recipe_have_no_fault(environment, capsys):
    rows = sampled(rows_of(environment))
    found = try_rewards(rows, Probe(), None, 128)
    assert found.problems == found.warnings == []
    described = found.record[environment]
    (good,) = described["by_kind"]["good"].values()
    assert good == (5.0 if environment == GENRM else 1.0)
    assert good > max(described["by_kind"]["bad"].values()) and described["variance"] > 0
    assert json.dumps(try_rewards(rows, Probe(), None, 128).record) == json.dumps(found.record)
    assert capsys.readouterr().err == "" and "ms a check" in found.times[0]
    found.report("rlvr1", "stop")
    assert "ms a check" in capsys.readouterr().err


def test_maths_verifier_has_no_fault_but_reads_the_last_number_of_a_copied_prompt(tried):
    found = tried()
    assert found.problems == found.warnings == []
    copied = [row | {"responses_create_params": {"input": f"is it {row['expected_answer']}"}} for row in math_rows()]
    problems = tried(rows=copied).problems
    assert any("pays a copy of the prompt in 8 of 8 rows (the first: split:1, 1, where 0 is" in it for it in problems)
    assert tried(rows=math_rows()[2:] + copied[:2]).problems == []
    assert len(tried(rows=math_rows()[2:] + copied[:2]).warnings) == 3


# Each criterion that stops, with a verifier that has the fault.


def is_copy(row: dict, response: str) -> bool:
    return response == row["responses_create_params"]["input"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda real, row, response: 0.5, "pays 0.5 for each of 106 responses, right or wrong (first row: split:1)"),
        (lambda real, row, response: 0.0, "pays 0 for each of 106 responses"),
        (lambda real, row, response: real or float(response == ""), "pays an empty answer in 8 of 8 rows"),
        (lambda real, row, response: real or 0.1 * (not response.strip()), "pays white space in 8 of 8 rows"),
        (lambda real, row, response: real or float(is_copy(row, response)), "pays a copy of the prompt in 8 of 8"),
        (
            lambda real, row, response: real or float(response.startswith("box ")),
            "pays a copy of the prompt's last line in 8 of 8 rows",
        ),
        (lambda real, row, response: 1 - real, "pays right answers 0 and wrong ones 1 on average (the first: split:1"),
    ],
)
def test_a_faulty_reward_stops_the_stage(tried, capsys, fault, says):
    found = tried(lambda row, response: fault(tried.real(row, response), row, response))
    assert any(says in problem for problem in found.problems), found.problems
    with pytest.raises(UserError, match=r"stage rlvr1: its reward cannot be trained on:\n  math_with"):
        found.report("rlvr1", "stop")
    found.report("rlvr1", "warn")
    assert says in capsys.readouterr().err


def test_a_verifier_slower_than_its_budget_stops_the_stage_and_one_slow_check_is_warned_of(tried):
    def slow(row, response):
        time.sleep(0.004)
        return tried.real(row, response)

    tried(tried.real)  # the first check of all imports what it checks by
    problems = tried(slow, seconds_per_check=0.002).problems
    assert any("s a check, more than probe.seconds_per_check, 0.002" in problem for problem in problems)
    assert tried(slow, rows=math_rows()[:2]).problems == []

    def once(row, response):
        time.sleep(0.3 * is_copy(row, response))
        return tried.real(row, response)

    found = tried(once, seconds_per_check=0.05, rows=math_rows()[:2])
    assert found.problems == []
    assert any("rewarding a copy of the prompt, took 0.3" in warning for warning in found.warnings)


def test_a_verifier_that_never_returns_or_raises_is_named_with_its_row(tried):
    def hang(row, response):
        while not response:
            with suppress(Exception):
                time.sleep(0.01)
        return tried.real(row, response)

    with pytest.raises(UserError, match=r"split:1: math_.*, rewarding an empty answer, took more than 0.6 s"):
        tried(hang, seconds_per_check=0.02)

    def fail(row, response):
        return float(response.split()[0] == row["expected_answer"])

    (warning,) = [warning for warning in tried(fail).warnings if "cannot judge" in warning]
    assert "(the first: split:1, an empty answer, IndexError: list index out of range)" in warning

    def fail_on_all(row, response):
        return row["no such field"]

    with pytest.raises(UserError, match=r"split:1: .*rewarding the right answer: .*KeyError: 'no such field' whatever"):
        tried(fail_on_all)


def test_a_form_of_the_right_answer_that_is_not_paid_is_warned_of(tried):
    found = tried(lambda row, response: float(response == rf"\boxed{{{row['expected_answer']}}}"))
    assert found.problems == []
    assert [it.partition(" in 8 of 8")[0] for it in found.warnings] == [
        f"{MATH} pays less for white space around the right answer",
        f"{MATH} pays less for the right answer in a sentence",
    ]


def test_where_no_right_answer_is_known_an_empty_one_must_earn_nothing(monkeypatch):
    rows = [row | {"agent_ref": {"name": "mine"}} for row in math_rows()]
    for value, problems in ((0.0, 0), (0.3, 4)):
        replace_verifier(monkeypatch, "mine", lambda row, response, value=value: value)
        found = try_rewards(sampled(rows), Probe(), None, 200)
        assert len(found.problems) == problems and set(found.record["mine"]["by_kind"]) == {"adversarial", "cheap"}
    replace_verifier(monkeypatch, "mine", lambda row, text: 0.0, lambda row, texts: [3.0] * len(texts))
    assert try_rewards(sampled(rows), Probe(), None, 200).problems == []


def test_a_copy_of_the_prompt_is_a_right_answer_where_any_text_is():
    row = rows_of(Environment.TOOL_USE)[0] | {"expected_action": {"type": "message", "content": "x"}}
    made = {it.what: it for it in probe_responses(row, answers_of(row), [], 100)}
    assert score(row, made["a copy of the prompt"].text) == 1.0 and made["a copy of the prompt"].if_paid is None
    assert made["an empty answer"].if_paid == "stop"
    assert try_rewards(sampled([row] * 4), Probe(), None, 100).problems == []


FUNCTION = {"type": "function_call", "name": "find", "arguments": '{"item": "key"}'}
MORE_ROWS = {
    "string_match_simple_agent": [{"expected_answer": f"town {n}", "extraction_mode": "boxed"} for n in range(3)],
    "toolcall_schema_single_step_tool_use_with_argument_comparison_agent": [{"expected_action": FUNCTION}],
    "parallel_tool_calls_single_step_tool_use_with_argument_comparison_agent": [
        {"expected_action": {"type": "function_call_batch", "calls": [FUNCTION, FUNCTION | {"name": "open"}]}}
    ],
    "instruction_following_simple_agent": [
        {"verifier_metadata": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["tea", "milk"]}]},
    ],
    "mcqa_simple_agent": [
        {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B", "grading_mode": "lenient_answer_colon"},
        {"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "a"},
    ],
    "structured_outputs_simple_agent": [
        {"schema_str": json.dumps(schema), "schema_type": "json"}
        for schema in (
            {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}},
            {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"anyOf": [{"type": "string"}]}}},
        )
    ],
}


@pytest.mark.parametrize("environment", MORE_ROWS)
def test_no_verifier_is_found_at_fault_on_rows_as_they_are_published(environment):
    rows = [
        {"agent_ref": {"name": environment}, "responses_create_params": {"input": "what, then?"}} | fields
        for fields in MORE_ROWS[environment]
    ]
    assert all(check_row(row) is None for row in rows)
    found = try_rewards(sampled(rows), Probe(seconds_per_check=20), None, 200)
    assert found.problems == [it for it in found.warnings if "says nothing of the prompt" not in it] == []
    assert set(found.record[environment]["by_kind"].get("good", {"": 1.0}).values()) == {1.0}


# Judges.


def test_a_judge_is_asked_as_the_stage_would_and_its_outage_is_its_own_message():
    rows = [row | {"agent_ref": {"name": "equivalence_llm_judge_simple_agent"}} for row in math_rows()[:2]]

    def probe(url: str):
        server = JudgeServer(base_url=url, max_retries=0)
        judges = Judges.model_validate({"general": {"model": "m"}})
        return try_rewards(sampled(rows), Probe(), JudgeClients(judges, {"general": server}), 100)

    with serve(lambda messages: "[[A!=B]]") as judge:
        assert any("pays 0 for each of" in problem for problem in probe(judge.base_url).problems)
    with pytest.raises(
        JudgeUnavailable, match=r"split:[12]: equiv.*, the reward probe got no verdict: the general judge"
    ):
        probe(judge.base_url)
    assert try_rewards(sampled(rows), Probe(), None, 100).record == {}


# Sampling.


def test_the_same_rows_are_drawn_of_each_environment_and_none_that_is_allowed_to_be_bad(write_rows):
    rows = [{"agent_ref": {"name": "ab"[number % 5 == 0]}, "number": number} for number in range(100)]
    split = write_rows("split.jsonl", rows)
    first = sample_rows(split, 8)
    assert sample_rows(split, 8) == first and {name: len(of) for name, of in first.items()} == {"a": 8, "b": 8}
    places = [int(place.rpartition(":")[2]) for place, _ in first["a"]]
    assert places == sorted(places) and places[-1] > 40
    assert all(int(place.rpartition(":")[2]) == row["number"] + 1 for place, row in first["a"] + first["b"])
    bad = key_of(split.read_bytes().splitlines()[5])
    assert 5 in [row["number"] for _, row in sample_rows(split, 100)["b"]]
    assert 5 not in [row["number"] for _, row in sample_rows(split, 100, frozenset([bad]))["b"]]


# The stage.


@pytest.fixture
def stage(tmp_path):
    """Check stage rlvr1 of the short recipe on math rows, with these settings of its probe."""

    def load(**probe: object):
        values = yaml.safe_load(SHORT.read_text())
        values["stages"]["rlvr1"]["probe"] = probe
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return load_recipe(tmp_path / "recipe.yaml")

    def check(**probe: object) -> dict:
        return check_stage(ready_stage(load(**probe), tmp_path, "rlvr1", math_rows()))

    check.load = load
    return check


def test_the_preflight_records_the_probe_and_refuses_a_faulty_reward(stage, monkeypatch, capsys):
    assert stage(rows=3)["reward_probe"][MATH]["rows"] == 3
    assert stage()["reward_probe"] == stage()["reward_probe"]
    replace_verifier(monkeypatch, MATH, lambda row, response: 1.0)
    with pytest.raises(
        UserError, match=r"stage rlvr1: its reward .*\n.*train-split.jsonl:1\), so nothing can be learnt"
    ):
        stage()
    capsys.readouterr()
    assert stage(action="warn")["reward_probe"][MATH]["variance"] == 0
    assert "warning: rlvr1: reward probe: math_with" in capsys.readouterr().err


def test_the_probes_settings_are_no_part_of_what_a_stage_trains(stage):
    configs = [resolve_stage(stage.load(**probe), "rlvr1") for probe in ({}, {"rows": 3, "rollouts": True})]
    assert configs[0] == configs[1]


# Rollouts.


def test_rollouts_are_described_and_a_constant_reward_stops_the_stage(stage, monkeypatch):
    pytest.importorskip("torch")
    from scripts.backends.trl.probe import try_rollouts
    from scripts.model.processor import make_tokenizer
    from scripts.model.random_init import make_model

    recipe = stage.load()
    config, tokenizer = resolve_stage(recipe, "rlvr1"), make_tokenizer()
    model = make_model(recipe.model, tokenizer, config.max_length, config.seed)
    samples = sampled(math_rows()) | sampled(rows_of(MCQA))

    def run(verify, **settings: object):
        for name in (MATH, MCQA):
            replace_verifier(monkeypatch, name, verify)
        return try_rollouts(model, tokenizer, samples, config, Probe(**settings), None)

    found = run(lambda row, response: len(response) / 100)
    assert found.problems == [] and list(found.record["environments"]) == [MATH, MCQA]
    whole = found.record["rollouts"]
    assert whole["prompts"] == 8 and whole["responses"] == 64 and whole["variance"] > 0
    assert 0 < whole["length_mean"] <= whole["length_max"] <= 12
    assert ["cut at max_new_tokens" in it for it in found.warnings] == [True] * (whole["truncation_rate"] > 0.5)
    assert run(lambda row, response: len(response) / 100).record == found.record
    by_row = run(lambda row, response: float("9" in str(row["responses_create_params"])), truncation_rate=1)
    assert by_row.record["rollouts"]["zero_variance_share"] == 1.0
    assert by_row.problems == [] and "in 100% of the groups all rollouts earn the same" in by_row.warnings[0]
    assert "all 64 rollouts earn 0, so nothing can be learnt" in run(lambda row, response: 0.0).problems[0]
    assert run(lambda row, response: 0.0, prompts=3, generations=2).record["rollouts"]["responses"] == 6
