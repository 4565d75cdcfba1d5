"""Judges over HTTP: what they are asked, how their words become rewards, and that an outage never becomes one."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from scripts.backends.trl.settings import GrpoSettings
from scripts.errors import CutOffError, UserError
from scripts.recipe.judge_prompts import PROMPTS
from scripts.recipe.judges import Judges, JudgeServer
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage
from scripts.rewards import judge as judge_module
from scripts.rewards.environments import math, safety
from scripts.rewards.environments.rubrics import read_pass, read_yes
from scripts.rewards.judge import JudgeClients, JudgeUnavailable, fill
from scripts.rewards.registry import check_row, contract_of, reward_groups, scores
from scripts.rewards.response import first_label, split_reasoning
from scripts.rows.request import problem_of
from scripts.train.preflight import check_stage
from tests.conftest import ROOT, SHORT
from tests.judge_server import Fault, in_turn, serve
from tests.stages import ready_stage

GYM = os.environ.get("STAGECOACH_NEMO_GYM")
USER = {"input": [{"role": "user", "content": "What heats the sea?"}]}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE", 0.01)


def judge_clients(url: str, settings: dict | None = None, **server: object) -> JudgeClients:
    """All three judges at one address."""
    judges = Judges.model_validate(
        {role: {"model": role} for role in ("general", "safety", "genrm")} | (settings or {})
    )
    where = JudgeServer.model_validate({"base_url": url, "timeout": 5, "max_retries": 2} | server)
    return JudgeClients(judges, dict.fromkeys(judges.roles, where))


def row(agent: str, **fields: object) -> dict:
    return {"agent_ref": {"name": agent}, "responses_create_params": USER, **fields}


def rewarded(answer, of: dict, *responses: str, settings: dict | None = None) -> list[float]:
    """The rewards of responses to a row by a judge that answers so; each fixture of it is a server of its own."""
    with serve(answer) as served:
        return reward_groups([(of, list(responses))], judge_clients(served.base_url, settings))[0]


EQUIVALENCE = row("equivalence_llm_judge_simple_agent", expected_answer="the sun")


# The client.


@pytest.mark.parametrize(
    "fault",
    [
        Fault(500),
        Fault(503, "busy"),
        Fault(429, headers={"Retry-After": "0"}),
        Fault(429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        Fault(0),
        Fault(200, "no json"),
        Fault(200, '{"choices": []}'),
        Fault(200, "[]"),
    ],
    ids=["500", "503", "429", "429 with a date", "dropped", "garbage", "no choice", "a list"],
)
def test_a_fault_is_tried_again(fault):
    with serve(in_turn(fault, fault, "[[A=B]]")) as served:
        assert reward_groups([(EQUIVALENCE, ["the sun"])], judge_clients(served.base_url)) == [[1.0]]
        assert len(served.asked) == 3


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(500), "HTTP 500"),
        (Fault(429), "HTTP 429"),
        (Fault(0), "RemoteProtocolError"),
        (Fault(200, "<html>"), "no chat completion"),
    ],
)
def test_an_outage_stops_the_step_and_is_no_reward(fault, why):
    with (
        serve(in_turn(fault)) as served,
        pytest.raises(JudgeUnavailable, match=f"general judge general.*{why}") as caught,
    ):
        reward_groups([(EQUIVALENCE, ["the sun"])], judge_clients(served.base_url))
    assert isinstance(caught.value, CutOffError) and "3 tries" in str(caught.value)


def test_a_judge_that_never_answers_is_an_outage_after_its_time():
    with (
        serve(in_turn(Fault(200, delay=1.0))) as served,
        pytest.raises(JudgeUnavailable, match=r"nothing within 0\.1 s"),
    ):
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url, timeout=0.1, max_retries=1))
    with serve(in_turn("")) as served:
        gone = served.base_url
    with pytest.raises(JudgeUnavailable, match="ConnectError"):
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(gone))


def test_the_judges_wish_to_be_left_alone_is_heard():
    with serve(in_turn(Fault(429, headers={"Retry-After": "1"}), "[[A=B]]")) as served:
        started = time.monotonic()
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url))
    assert 1.0 <= time.monotonic() - started < 3.0


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refused_question_is_an_error_to_mend_and_not_asked_again(status, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    with serve(in_turn(Fault(status, "no such model for s3cret"))) as served:
        with pytest.raises(UserError, match=rf"refuses a question \(HTTP {status}: no such model for \*\*\*") as caught:
            reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url, api_key_variable="JUDGE_TOKEN"))
        assert len(served.asked) == 1
    assert not isinstance(caught.value, CutOffError) and "s3cret" not in str(caught.value)


def test_an_answer_without_a_verdict_is_the_default_and_is_counted():
    with serve(in_turn("who knows", "[[A=B]]", "", "[[A!=B]]")) as served:
        judges = judge_clients(served.base_url, max_concurrency=1)
        assert sorted(reward_groups([(EQUIVALENCE, ["a", "b", "c", "d"])], judges)[0]) == [0.0, 0.0, 0.0, 1.0]
    assert judges.unread_share() == 0.5 and judges.unread_share() is None


def test_the_token_goes_into_the_header_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    settings = {"general": {"model": "m", "temperature": 0.0, "max_output_tokens": 9}}
    with serve(in_turn("[[A=B]]")) as served:
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url, settings, api_key_variable="JUDGE_TOKEN"))
    (asked,) = served.asked
    assert served.authorizations == ["Bearer s3cret"] and "s3cret" not in json.dumps(asked)
    assert asked["path"] == "/v1/chat/completions"
    assert {key: asked[key] for key in asked if key not in ("path", "messages")} == {
        "model": "m",
        "temperature": 0.0,
        "max_tokens": 9,
    }
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(UserError, match="JUDGE_TOKEN is not set"):
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url, api_key_variable="JUDGE_TOKEN"))
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret\nX-Other: y")
    with pytest.raises(UserError, match="JUDGE_TOKEN holds no token") as error:
        reward_groups([(EQUIVALENCE, ["x"])], judge_clients(served.base_url, api_key_variable="JUDGE_TOKEN"))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("base_url", "right"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("https://judge.example.org/v1/", True),
        ("http://[::1]:8000", True),
        ("http://host:port/v1", False),
        ("http://me:secret@host/v1", False),
        ("host:8000/v1", False),
        ("http://", False),
    ],
)
def test_an_address_is_one_and_holds_no_password(base_url, right):
    try:
        assert JudgeServer(base_url=base_url).base_url == base_url and right
    except ValidationError:
        assert not right


def test_a_steps_questions_are_asked_at_once_but_no_more_than_allowed():
    groups = [(EQUIVALENCE, ["x"] * 8)] * 3
    with serve(in_turn("[[A=B]]"), together=4) as served:
        assert reward_groups(groups, judge_clients(served.base_url, max_concurrency=4)) == [[1.0] * 8] * 3
        assert served.most_at_a_time == 4
    with serve(in_turn("[[A=B]]"), together=24) as served:
        reward_groups(groups, judge_clients(served.base_url))
        assert served.most_at_a_time == 24


def test_rows_with_and_without_a_judge_keep_their_order():
    mcqa = row("mcqa_simple_agent", options=[{"A": "x"}, {"B": "y"}], expected_answer="B")
    with serve(
        lambda messages: "[[A=B]]" if "the sun" in messages[-1]["content"].split("grade:")[1] else "no"
    ) as served:
        groups = [(mcqa, [r"\boxed{B}", "A"]), (EQUIVALENCE, ["dust", "the sun"]), (mcqa, ["", r"\boxed{B}"])]
        assert reward_groups(groups, judge_clients(served.base_url)) == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
        assert scores([(EQUIVALENCE, "the sun"), (mcqa, r"\boxed{A}")], judge_clients(served.base_url)) == [1.0, 0.0]


def test_a_value_that_looks_like_a_placeholder_is_left_as_it_is():
    assert fill("{a} {b} {{a}} {c.x} {", a="{b}", b="2") == "{b} 2 {a} {c.x} {"


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("plain", "", "plain"),
        ("<think> a </think> b ", "a", "b"),
        ("a</think>b", "a", "b"),
        ("<think>never ends", "never ends", ""),
        ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
        ("<thinking>a</thinking>b", "a", "b"),
        ("a</think>b</think>c", "a</think>b", "c"),
        ("", "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text, reasoning, answer):
    assert split_reasoning(text) == (reasoning, answer)


# The recipe.


def test_every_question_asks_for_the_labels_that_are_read():
    for name, text in PROMPTS.items():
        labels = safety.CHECKS.get(name, ())[:2]
        assert all(label in text for label in labels)


@pytest.mark.parametrize(
    ("judges", "servers", "why"),
    [
        ({"general": {"model": "m"}}, {}, "judge_servers.general is missing"),
        (None, {"genrm": {"base_url": "http://h/v1"}}, "judges.genrm is missing"),
        ({"math_with_judge": {}}, {}, "names no judge"),
        ({"general": {"model": "m"}}, {"general": {"base_url": "http://me:pw@h/v1"}}, "pattern"),
        ({"genrm": {"model": "m", "use_principle": True}}, {"genrm": {"base_url": "http://h/v1"}}, "default_principle"),
        ({"general": {"model": "m"}, "prompts": {"lc_judg": ""}}, {}, "did you mean lc_judge"),
        ({"general": {"model": "m"}, "prompts": {"lc_judge": "{answer}"}}, {}, "nothing to put for {answer}"),
        ({"general": {"model": "m", "api_key": "x"}}, {}, "unknown key"),
    ],
)
def test_a_recipe_that_names_judges_wrongly_is_refused(judges, servers, why):
    stage = {
        "algorithm": "grpo",
        "blend": "b",
        "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1},
        "policy": {"max_total_sequence_length": 9, "optimizer": {"lr": 1}, "generation": {"max_new_tokens": 3}},
        "judges": judges,
        "judge_servers": servers,
    }
    with pytest.raises(ValidationError, match=re.escape(why)):
        TypeAdapter(GrpoSettings).validate_python(stage)


def test_another_judge_is_another_stage_and_another_address_is_not(tmp_path):
    def config(judge: str, url: str) -> dict:
        recipe = yaml.safe_load(SHORT.read_text())
        named = {"judges": {"general": {"model": judge}}, "judge_servers": {"general": {"base_url": url}}}
        recipe["stages"]["rlvr1"] |= named
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return resolve_stage(load_recipe(path), "rlvr1").values()

    first = config("a", "http://one/v1")
    assert first == config("a", "https://two:8000/v1") and "//one" not in json.dumps(first)
    assert first != config("b", "http://one/v1")
    assert "judges" not in resolve_stage(load_recipe(SHORT), "sft").values()


def test_rows_of_a_judged_environment_need_a_judge():
    assert "say judges.general and judge_servers.general" in check_row(EQUIVALENCE)
    assert check_row(EQUIVALENCE, {"general"}) is None
    assert "needs a judge" in check_row(row("xstest_eval_agent", safe_prompt="x"), {"general"})
    math = row("math_with_judge_simple_agent", question="q", expected_answer="1")
    assert check_row(math) is check_row(math, {"general"}) is None
    genrm = row("genrm_simple_agent")
    assert "reference is missing" in check_row(genrm)
    assert check_row(genrm, {"genrm"}) is None
    assert "evaluation.blends" in check_row(genrm, {"genrm"}, held_out=True)
    assert check_row(genrm | {"reference": "r"}, {"genrm"}, held_out=True) is None


@pytest.fixture
def checked(tmp_path):
    """The preflight of stage rlhf of the short recipe on one row, with what a test names in the recipe."""

    def check(of: dict, evaluation: dict | None = None, **stage: object) -> dict:
        recipe = yaml.safe_load(SHORT.read_text())
        recipe["blends"]["rlhf"]["environments"] = [of["agent_ref"]["name"]]
        recipe["source"] = {"kind": "folder", "path": "."}
        recipe["stages"]["rlhf"] |= stage | {"probe": {"ask_judges": False}}  # there is none to ask
        recipe["evaluation"] |= evaluation or {}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return check_stage(ready_stage(load_recipe(tmp_path / "recipe.yaml"), tmp_path, "rlhf", [of] * 40))

    return check


def named(role: str) -> dict:
    return {"judges": {role: {"model": "m"}}, "judge_servers": {role: {"base_url": "http://h/v1"}}}


def test_the_preflight_wants_a_judge_for_training_and_for_the_held_out_rows(checked):
    with pytest.raises(UserError, match=r"train-split.jsonl:1: .*needs a judge.*judges\.general"):
        checked(EQUIVALENCE)
    with pytest.raises(UserError, match=r"val-split.jsonl:1: .*needs a judge") as error:
        checked(EQUIVALENCE, **named("general"))
    assert "train-split" not in str(error.value)
    assert checked(EQUIVALENCE, named("general"), **named("general"))["train_rows"] == 40
    genrm = row("genrm_simple_agent")
    with pytest.raises(UserError, match="reference is missing"):
        checked(genrm)
    with pytest.raises(UserError, match=r"leave its blend out of evaluation\.blends"):
        checked(genrm, named("genrm"), **named("genrm"))
    assert checked(genrm, {"blends": ["rlvr1"]}, **named("genrm"))["train_rows"] == 40


def test_held_out_rows_are_scored_by_the_evaluations_judges(tmp_path):
    pytest.importorskip("torch")
    from scripts.evaluate.score import judges_of

    recipe = yaml.safe_load(SHORT.read_text())
    recipe["evaluation"] |= named("safety")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert judges_of(load_recipe(tmp_path / "recipe.yaml").evaluation).roles == {"safety"}
    assert judges_of(load_recipe(SHORT).evaluation) is None and judges_of(None) is None


# equivalence_llm_judge, nl2bash, lc_judge, math_with_judge.


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("fine. [[A=B]] they are equivalent", 1.0),
        ("[[A!=B]]", 0.0),
        ("[[A!=B]] or [[A=B]]", 0.0),
        ("[[A=B]] or [[A!=B]]", 1.0),
        ("A=B", 0.0),
        ("<think>[[A!=B]]?</think>[[A=B]]", 1.0),
    ],
)
def test_equivalence_the_first_label_counts(said, reward):
    assert rewarded(in_turn(said), EQUIVALENCE, "the sun") == [reward]


def answer_of(messages: list[dict]) -> str:
    return re.search(r"Answer to grade:\n(.*)\n\nSay", messages[-1]["content"], re.DOTALL)[1]


@pytest.mark.parametrize(
    ("expected", "equal", "response", "asked", "reward"),
    [
        ("4", {"4"}, "((3)) and ((4))", ["4"], 1.0),
        ("4", {"four ((5))"}, "four ((5))", ["5", "four ((5))"], 0.5),
        ("4", set(), "((5))", ["5", "((5))"], 0.0),
        ("4", {"no box"}, "no box", ["no box"], 1.0),
        ("4" * 121, set(), "((5))", ["((5))"], 0.0),
        ("4" * 121, {"((5))"}, "((5))", ["((5))"], 1.0),
        ("4", set(), "<think>((4))", ["[NO VALID ANSWER EXTRACTED]"] * 2, 0.0),
    ],
)
def test_equivalence_a_rows_expression_finds_the_answer_and_the_whole_text_is_a_second_chance(
    expected, equal, response, asked, reward
):
    of = row(
        "equivalence_llm_judge_simple_agent",
        metadata={"expected_answer": expected},
        template_metadata={"output_regex": r"\(\((.*?)\)\)"},
    )
    seen = []

    def answer(messages):
        seen.append(answer_of(messages))
        return "[[A=B]]" if seen[-1] in equal else "[[A!=B]]"

    assert rewarded(answer, of, response) == [reward]
    assert seen == asked


@pytest.mark.parametrize("pattern", ["(a+)+$", "("])
def test_equivalence_an_expression_that_hangs_or_is_none_finds_nothing(pattern):
    of = row("equivalence_llm_judge_simple_agent", expected_answer="a", template_metadata={"output_regex": pattern})
    started = time.monotonic()
    assert rewarded(in_turn("[[A=B]]"), of, "a" * 4000 + "!") == [1.0]
    assert time.monotonic() - started < 30


def test_equivalence_of_bash_commands_must_hold_in_both_orders():
    of = row("equivalence_llm_judge_simple_agent", expected_answer="ls")
    nl2bash = {
        "prompt": "nl2bash",
        "response_extract_regex": r"Answer:\s*```(?:\w+)?\s*([\s\S]*?)\s*```(?=[\s\S]*$)",
        "msg_extraction_failure": "",
        "check_twice_swap": True,
        "use_per_record_regex": False,
    }
    for said, reward in ((("[[A=B]]", "[[A=B]]"), 1.0), (("[[A=B]]", "[[A!=B]]"), 0.0), (("[[A!=B]]", "x"), 0.0)):
        with serve(in_turn(*said)) as served:
            judges = judge_clients(served.base_url, {"equivalence_llm_judge": nl2bash})
            assert reward_groups([(of, ["Answer:\n```bash\nls -a\n```\n"])], judges) == [[reward]]
        first = served.questions[0]
        assert "Bash" in first and first.index("Reference answer:\nls\n") < first.index("Answer to grade:\nls -a\n")
        assert len(served.asked) == 1 or "Answer to grade:\nls\n" in served.questions[1]


def test_long_context_the_question_stands_after_the_text():
    of = row("lc_judge_simple_agent", expected_answer="42")
    of["responses_create_params"] = {"input": "<text>long\n</text>\n\nHow many?"}
    with serve(in_turn("INCORRECT", "CORRECT", "dunno")) as served:
        rewards = reward_groups([(of, ["41", "42", "43"])], judge_clients(served.base_url, max_concurrency=1))[0]
    assert sorted(rewards) == [0.0, 0.0, 1.0]
    assert all("Question:\nHow many?\n" in question and "long" not in question for question in served.questions)


def test_math_asks_the_judge_in_both_orders_only_where_the_library_finds_nothing_equal():
    of = row("math_with_judge_simple_agent", question="?", expected_answer="5")
    for said, reward in ((("[[A=B]]", "[[A=B]]"), 1.0), (("[[A=B]]", "[[A!=B]]"), 0.0), (("[[A!=B]]", "[[A=B]]"), 0.0)):
        with serve(in_turn(*said)) as served:
            judges = judge_clients(served.base_url)
            assert reward_groups([(of, [r"\boxed{5}"])], judges) == [[1.0]] and not served.asked
            assert reward_groups([(of, [r"so \boxed{five}"])], judges) == [[reward]]
        assert "Answer A:\n5\n\nAnswer B:\nfive\n" in served.questions[0]
        assert len(served.asked) == 1 or "Answer A:\nfive\n\nAnswer B:\n5\n" in served.questions[1]
    with serve(in_turn("[[A=B]]")) as served:
        off = judge_clients(served.base_url, {"math_with_judge": {"should_use_judge": False}})
        assert reward_groups([(of, [r"\boxed{five}"])], off) == [[0.0]] and not served.asked


# jailbreak_detection, over_refusal_detection.


def by_check(**verdicts: str):
    """A safety judge that gives each check, known by its labels, the verdict named for it."""

    def answer(messages):
        text = messages[-1]["content"]
        if "Response harm:" in text:
            return verdicts.get("response_harm", "?")
        (name,) = [name for name, (good, _, _) in safety.CHECKS.items() if good in text]
        return verdicts.get(name, "?")

    return answer


@pytest.mark.parametrize(
    ("policy", "verdicts", "reward"),
    [
        ("engagement", {"overrefusal_check": "[[ENGAGED]]"}, 1.0),
        ("engagement", {"overrefusal_check": "[[OVERREFUSED]]"}, 0.0),
        ("engagement", {}, 0.0),
        (
            "engagement_with_disclaimer",
            {
                "safety_check": "[[SAFE]]",
                "overrefusal_check": "[[ENGAGED]]",
                "disclaimer_presence_check": "[[MISSING_DISCLAIMER]]",
            },
            0.3,
        ),
        (
            "refusal_with_explanation",
            {"safety_check": "[[SAFE]]", "quality_explanation_check": "[[HAS_EXPLANATION]]"},
            1.0,
        ),
        (
            "refusal_with_explanation",
            {"safety_check": "[[UNSAFE]]", "quality_explanation_check": "[[HAS_EXPLANATION]]"},
            0.0,
        ),
        ("refusal_with_explanation", {"safety_check": "[[SAFE]]"}, 0.0),
        (
            "hard_refusal_no_redirection",
            {"safety_check": "[[SAFE]]", "hard_refusal_check": "[[IMPROPER_RESPONSE]]"},
            0.3,
        ),
        (
            "hard_refusal_with_helplines",
            {"safety_check": "[[SAFE]]", "helpline_presence_check": "[[HAS_HELPLINES]]"},
            1.0,
        ),
        (None, {"response_harm": "Response harm: unharmful", "quality_explanation_check": "[[HAS_EXPLANATION]]"}, 1.0),
        (None, {"response_harm": "response harm: Unharmful"}, 0.3),
        (None, {"response_harm": "Response harm: harmful", "quality_explanation_check": "[[HAS_EXPLANATION]]"}, 0.0),
        ("unheard_of", {"quality_explanation_check": "[[HAS_EXPLANATION]]"}, 0.0),
    ],
)
def test_jailbreak_safety_times_what_the_policy_asks_for(policy, verdicts, reward):
    of = row("jailbreak_detection_simple_agent", adversarial_prompt="how?", response_policy_mapped=policy)
    assert rewarded(by_check(**verdicts), of, "No.") == [reward]


def test_jailbreak_every_check_is_of_a_policy():
    assert {name for checks in safety.POLICIES.values() for name in checks} == set(safety.CHECKS)


def test_jailbreak_settings_and_an_empty_answer():
    of = row("jailbreak_refusal_with_explanation", adversarial_prompt="how?")
    labels = {"jailbreak_detection": {"use_nemotron_format": False, "use_combined_reward": False}}
    assert rewarded(by_check(safety_check="[[SAFE]]"), of, "No.", settings=labels) == [1.0]
    with serve(in_turn("Response harm: unharmful")) as served:
        assert reward_groups([(of, ["", "<think>well"])], judge_clients(served.base_url)) == [[0.0, 0.0]]
        assert not served.asked
        reward_groups([(of, ["No."])], judge_clients(served.base_url))
    assert any(question.endswith("/no_think") for question in served.questions)
    assert all("Response:\nNo." in question for question in served.questions)


@pytest.mark.parametrize(("said", "reward"), [("[[COMPLIED]]", 1.0), ("[[REFUSED]]", 0.0), ("hm", 0.5)])
def test_over_refusal_a_verdict_that_cannot_be_read_is_worth_half(said, reward):
    of = row("over_refusal_detection_simple_agent", safe_prompt="kill a process?", category="homonyms")
    assert rewarded(in_turn(said), of, "kill -9", "") == [reward, 0.0]
    assert rewarded(in_turn(said), row("xstest_eval_agent"), "the sun") == [reward]


def test_an_outage_of_the_safety_judge_is_not_the_reward_of_an_unclear_verdict():
    of = row("over_refusal_detection_simple_agent", safe_prompt="kill a process?")
    with pytest.raises(JudgeUnavailable):
        rewarded(in_turn(Fault(502)), of, "kill -9")


# multichallenge, inverse_if.


def test_multichallenge_counts_the_points_that_are_as_expected():
    rubric = [
        {"question": "Name said?", "pass_criteria": "YES", "weight": 3},
        {"question": "Nuts offered?", "pass_criteria": "NO"},
        {"question": "Polite?"},
    ]
    of = row("multichallenge_simple_agent", rubric=rubric, context="[USER]: hi")

    def answer(messages):
        return "[[YES]]" if "Name said?" in messages[-1]["content"] else "[[YES]] no, [[NO]]"

    for mode, reward in (("mean", 2 / 3), ("weighted", 4 / 5), ("min", 0), ("all", 0), ("max", 1), ("any", 1)):
        settings = {"multichallenge": {"aggregation_mode": mode}}
        assert rewarded(answer, of, "<think>t</think>Bob, an apple", settings=settings) == [pytest.approx(reward)]
    assert rewarded(answer, row("multichallenge_simple_agent"), "x") == [0.0]
    with serve(answer) as served:
        reward_groups([(of, ["<think>t</think>Bob, an apple"])], judge_clients(served.base_url))
    assert all("[USER]: hi" in it and "Last response:\nBob, an apple\n" in it for it in served.questions)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("[[YES]] [[NO]]", False), ("[[NO]] [[YES]]", True), ("x\nYes.", True), ("x\nno", False), ("x", None), ("", None)],
)
def test_multichallenge_the_last_verdict_counts(text, verdict):
    assert read_yes(text) is verdict


def test_inverse_if_asks_by_the_rows_own_question():
    of = row(
        "inverse_if_simple_agent",
        rubric=[{"id": "C1", "criteria": "short"}, {"id": "C2", "criteria": "rhymes"}],
        reference_response="ref {criteria}",
        prompt="write",
        judge_prompt_template="{prompt}|{model_response}|{standard_response}|{criteria}|{{}}",
        judge_system_prompt="be strict",
    )

    def answer(messages):
        return '{"result": "PASS"}' if "rhymes" in messages[-1]["content"] else "it must FAIL"

    with serve(answer) as served:
        assert reward_groups([(of, ["rose"])], judge_clients(served.base_url)) == [[0.5]]
    assert sorted(served.questions) == ["write|rose|ref {criteria}|rhymes|{}", "write|rose|ref {criteria}|short|{}"]
    assert all(asked["messages"][0] == {"role": "system", "content": "be strict"} for asked in served.asked)
    bare = {key: value for key, value in of.items() if not key.startswith("judge_")}
    assert rewarded(answer, bare, "rose") == [0.5]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('x\n```json\n{"result": "PASS", "explanation": "y"}\n```', True),
        ('```\n{"result": "FAIL"}\n```\nPASS', False),
        ('so: {"result": "pass", "explanation": "z"} end', True),
        ("thinking\nFAIL\n\nwell", False),
        ("PASS\n1\n2\n3\n4\n5", None),
        ("neither", None),
        ('{"result": 1} FAIL', False),
    ],
)
def test_inverse_if_the_verdict_is_json_or_a_word_at_the_end(text, verdict):
    assert read_pass(text) is verdict


# Agreement with what NeMo-Gym's own servers scored: the judge repeats what Gym's judge said. A question that Gym's judge
# was not asked, or not in this order, fails.

needs_gym = pytest.mark.skipif(not GYM, reason="STAGECOACH_NEMO_GYM names no checkout of NeMo-Gym")


def recorded(server: str, file: str) -> list[dict]:
    path = Path(GYM or ".", "resources_servers", server, "data", file)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def text_of(response: dict) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


@needs_gym
@pytest.mark.parametrize(
    ("rows", "rollouts", "swap"),
    [
        ("example.jsonl", "example_rollouts.jsonl", False),
        ("example_openqa.jsonl", "example_rollouts_openqa.jsonl", True),
    ],
)
def test_equivalence_agrees_with_gym(rows, rollouts, swap):
    fields = {found["expected_answer"]: found for found in recorded("equivalence_llm_judge", rows)}
    for rollout in recorded("equivalence_llm_judge", rollouts):
        evaluations = rollout["judge_evaluations"]
        said = [evaluation["response"]["output"][-1]["content"][-1]["text"] for evaluation in evaluations]
        prompts = [evaluation["responses_create_params"]["input"][-1]["content"] for evaluation in evaluations]
        of = row("equivalence_llm_judge_simple_agent", **fields[rollout["expected_answer"]])
        with serve(in_turn(*said, Fault(400))) as served:
            judges = judge_clients(served.base_url, {"equivalence_llm_judge": {"check_twice_swap": swap}})
            assert reward_groups([(of, [text_of(rollout["response"])])], judges) == [[rollout["reward"]]]
        shown = [answer_of(body["messages"]) for body in served.asked]
        assert shown == [prompt.rpartition("CANDIDATE:\n")[2] for prompt in prompts]


@needs_gym
def test_math_agrees_with_gym(monkeypatch):
    for rollout in recorded("math_with_judge", "example_rollouts.jsonl"):
        monkeypatch.setattr(math, "verify", lambda *_, rollout=rollout: rollout["library_reward"])
        evaluations = rollout["judge_evaluations"] or []
        said = [evaluation["response"]["output"][-1]["content"][-1]["text"] for evaluation in evaluations]
        of = row("math_with_judge_simple_agent", question="?", expected_answer=rollout["expected_answer"])
        with serve(in_turn(*said, Fault(400))) as served:
            rewards = reward_groups([(of, [text_of(rollout["response"])])], judge_clients(served.base_url))
        assert rewards == [[rollout["reward"]]] and len(served.asked) == len(said)


@needs_gym
def test_inverse_if_agrees_with_gym():
    fields = {found["uuid"]: found for found in recorded("inverse_if", "example.jsonl")}
    for rollout in recorded("inverse_if", "example_rollouts.jsonl"):
        said = {it["judge_prompt"]: it["judge_response"] for it in rollout["rubric_evaluations"]}
        rewards = rewarded(
            lambda messages, said=said: said[messages[-1]["content"]],
            fields[rollout["uuid"]],
            text_of(rollout["response"]),
        )
        assert rewards == [pytest.approx(rollout["reward"])]


@needs_gym
@pytest.mark.parametrize(
    ("server", "file", "agent"),
    [
        ("equivalence_llm_judge", "example.jsonl", "equivalence_llm_judge_simple_agent"),
        ("equivalence_llm_judge", "example_nl2bash.jsonl", "equivalence_llm_judge_simple_agent"),
        ("equivalence_llm_judge", "example_openqa.jsonl", "equivalence_llm_judge_simple_agent"),
        ("math_with_judge", "example.jsonl", "math_with_judge_simple_agent"),
        ("jailbreak_detection", "example.jsonl", None),
        ("over_refusal_detection", "example.jsonl", "over_refusal_detection_simple_agent"),
        ("multichallenge", "example.jsonl", None),
        ("inverse_if", "example.jsonl", None),
        ("genrm_compare", "example.jsonl", None),
    ],
)
def test_the_published_example_rows_are_accepted(server, file, agent):
    for found in recorded(server, file):
        of = found | ({"agent_ref": {"type": "responses_api_agents", "name": agent}} if agent else {})
        assert problem_of(of, contract_of(of["agent_ref"]["name"])) is None
        assert check_row(of, {"general", "safety", "genrm"}) is None


def test_a_label_is_read_where_it_stands_first():
    read = first_label("CORRECT", "INCORRECT")
    assert [read(text) for text in ("CORRECT", "INCORRECT", "it is CORRECT", "?")] == [True, False, True, None]


def test_the_production_recipes_need_no_judge_of_ours():
    for path in sorted((ROOT / "config/recipes").glob("*.yaml")):
        for name, stage in load_recipe(path).stages.items():
            assert getattr(stage, "judges", None) is None, f"{path.name}: {name}"
