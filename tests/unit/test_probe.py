"""The reward probe stops a stage whose expected answers earn no more than wrong ones, and passes sound rewards."""

import random
import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import yaml

from demo.synthesize import FAMILIES, make_task
from scripts.errors import UserError
from scripts.recipe.environment import Environment
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.recipe.stage_settings import Probe
from scripts.rewards.registry import SPECS
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.jsonl import key_of
from scripts.stage import probe as probe_module
from scripts.stage.probe import EMPTY, EXPECTED, OTHER, PROMPT, SampledRow, sample_rows, try_rewards
from scripts.train.preflight import check_stage
from tests.cases import cases
from tests.conftest import SHORT
from tests.stages import ready_stage

MATH = Environment.MATH


def rows_of(environment: str, count: int = 8) -> list[dict]:
    """Rows of the tiny recipe's task for an environment."""
    rng, rows = random.Random(environment), []
    for _ in range(count):
        task = make_task(environment, rng)
        params = {"input": [{"role": "user", "content": task.prompt}], "tools": list(task.tools)}
        rows.append({"agent_ref": {"name": str(environment)}, "responses_create_params": params, **task.fields})
    return rows


def math_rows() -> list[dict]:
    """Rows whose prompts name no number."""
    return [
        {
            "agent_ref": {"name": str(MATH)},
            "responses_create_params": {"input": f"how many are in box {'x' * number}?"},
            "question": "",
            "expected_answer": str(100 + number),
        }
        for number in range(8)
    ]


def sampled(rows: list[dict]) -> dict[str, list[SampledRow]]:
    return {rows[0]["agent_ref"]["name"]: [SampledRow(f"split:{number}", row) for number, row in enumerate(rows, 1)]}


@pytest.fixture
def tried(monkeypatch):
    """Try a verifier in place of math's on rows whose prompts name no answer."""
    real = SPECS[MATH]

    def run(verify=real.verify, rows=None, **settings: object):
        monkeypatch.setitem(SPECS, MATH, replace(real, verify=verify, waits=False))
        return try_rewards(sampled(rows or math_rows()), Probe(**settings))

    run.real = real.verify
    return run


@pytest.mark.parametrize("environment", [it for it in FAMILIES if it != MATH])
def test_the_verifiers_of_the_tiny_recipe_have_no_fault(environment):
    record, problems = try_rewards(sampled(rows_of(environment)), Probe())
    assert problems == [] and (record, []) == try_rewards(sampled(rows_of(environment)), Probe())
    paid = record[environment]
    assert paid["rows"] == 8 and paid[EMPTY] == (1.0 if environment == Environment.GENRM else 0.0)
    if EXPECTED in paid:
        assert paid[EXPECTED] == (5.0 if environment == Environment.GENRM else 1.0)
        assert paid[EXPECTED] > max(paid[EMPTY], paid[PROMPT], paid.get(OTHER, 0.0))


def test_maths_verifier_has_no_fault_but_reads_the_last_number_of_a_copied_prompt(tried):
    record, problems = tried()
    assert problems == [] and record == {MATH: {"rows": 8, EXPECTED: 1.0, EMPTY: 0.0, PROMPT: 0.0, OTHER: 0.0}}
    copied = [row | {"responses_create_params": {"input": f"is it {row['expected_answer']}"}} for row in math_rows()]
    (problem,) = tried(rows=copied)[1]
    assert "pays the prompt as well as a right one in 8 of 8 rows (the first: split:1, 1, 1 for the exp" in problem
    assert tried(rows=math_rows()[2:] + copied[:2]) == ({MATH: {**record[MATH], PROMPT: 0.25}}, [])


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (lambda real, row, response: 0.5, [EMPTY, PROMPT, OTHER]),
        (lambda real, row, response: 0.0, [EMPTY, PROMPT, OTHER]),
        (lambda real, row, response: 1 - real, [EMPTY, PROMPT, OTHER]),
        (lambda real, row, response: real or float(response == ""), [EMPTY]),
        (lambda real, row, response: real or float(response == row["responses_create_params"]["input"]), [PROMPT]),
        (lambda real, row, response: real or float("boxed" in response), [OTHER]),
    ],
)
def test_a_faulty_reward_is_told_by_what_it_pays(tried, fault, wrong):
    _, problems = tried(lambda row, response: fault(tried.real(row, response), row, response))
    assert [problem.partition(" as well as")[0] for problem in problems] == [f"{MATH} pays {what}" for what in wrong]


def test_a_verifier_that_never_returns_or_raises_is_named_with_its_row(tried, monkeypatch):
    def hang(row, response):
        while not response:
            with suppress(Exception):
                time.sleep(0.01)
        return tried.real(row, response)

    monkeypatch.setattr(probe_module, "SECONDS", 0.2)
    with pytest.raises(UserError, match=r"split:1: the verifier of math_.* took more than 0.8 s"):
        tried(hang)
    monkeypatch.setattr(probe_module, "SECONDS", 30)
    assert tried(lambda row, response: float(row["expected_answer"] in response.split()[0]))[0][MATH][EMPTY] == 0.0
    with pytest.raises(UserError, match=r"split:1: .*KeyError: 'no such field' whatever"):
        tried(lambda row, response: row["no such field"])


def test_where_no_expected_answer_is_known_an_empty_one_must_earn_nothing(monkeypatch):
    rows = [row | {"agent_ref": {"name": "mine"}} for row in math_rows()]
    for value, says in ((0.0, []), (0.3, [f"mine pays {EMPTY} as well as a right one in 8 of 8 rows"])):
        monkeypatch.setitem(SPECS, "mine", EnvironmentSpec(verify=lambda row, response, value=value: value))
        record, problems = try_rewards(sampled(rows), Probe())
        assert [problem.partition(" (")[0] for problem in problems] == says
        assert record == {"mine": {"rows": 8, EMPTY: value}}
    compared = EnvironmentSpec(verify=lambda row, text: 0.0, compare=lambda row, texts: [3.0] * len(texts))
    monkeypatch.setitem(SPECS, "mine", compared)
    assert try_rewards(sampled(rows), Probe()) == ({"mine": {"rows": 8}}, [])


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


@pytest.fixture
def load(tmp_path):
    """The short recipe with these settings of rlvr1's probe."""

    def load(**probe: object):
        values = yaml.safe_load(SHORT.read_text())
        values["stages"]["rlvr1"]["probe"] = probe
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return load_recipe(tmp_path / "recipe.yaml")

    return load


def test_the_preflight_records_the_probe_and_refuses_a_faulty_reward(load, tmp_path, monkeypatch, capsys):
    def stage(**probe: object) -> dict:
        return check_stage(ready_stage(load(**probe), tmp_path, "rlvr1", math_rows()))["reward_probe"]

    assert stage(rows=3)[MATH]["rows"] == 3
    assert stage() == stage()
    monkeypatch.setitem(SPECS, MATH, replace(SPECS[MATH], verify=lambda row, response: 1.0))
    with pytest.raises(
        UserError,
        match=r"ready to train:\n  its reward .*\n    math.*of 8 rows .*train-split.jsonl:1, 1, 1 for the expected",
    ):
        stage()
    capsys.readouterr()
    assert stage(action="warn")[MATH][EMPTY] == 1.0
    assert "warning: rlvr1: reward probe: math_with" in capsys.readouterr().err


def test_the_probes_settings_are_no_part_of_what_a_stage_trains(load):
    assert resolve_stage(load(), "rlvr1") == resolve_stage(load(rows=3, action="warn"), "rlvr1")


@cases("probe.gone", "place", "key", "says")
def test_keys_of_judges_and_of_the_larger_probe_say_what_to_do_instead(tmp_path, place, key, says):
    values = yaml.safe_load(SHORT.read_text())
    stage = values["stages"]["rlvr1"]
    {"stages": stage, "probe": stage.setdefault("probe", {}), "evaluation": values["evaluation"]}[place][key] = {
        "general": {}
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=re.escape(says)):
        load_recipe(tmp_path / "recipe.yaml")


def test_the_preflight_names_rows_whose_scorers_run_answers_as_code(load, tmp_path, monkeypatch, capsys):
    name = "reasoning_gym_simple_agent"
    monkeypatch.setitem(SPECS, name, EnvironmentSpec(verify=lambda row, response: 0.0))
    tasks = ["countdown", "knights_knaves", "countdown", "puzzle24", None, 7]
    made = [
        {**row, "agent_ref": {"type": "responses_api_agents", "name": name}, "metadata": {"source_dataset": task}}
        for row, task in zip(math_rows(), tasks, strict=False)
    ]
    made[-1]["metadata"] = "none"
    record = check_stage(ready_stage(load(rows=1, action="warn"), tmp_path, "rlvr1", [*math_rows(), *made]))
    assert record["evaluated_answers"] == {"countdown": 2, "puzzle24": 1}
    assert (
        "3 rows have scorers that run a policy's answers as code: countdown (2), puzzle24 (1)"
        in capsys.readouterr().err
    )
