"""Each environment's rules: what they accept, what they refuse, where they begin, and what tries to trick them."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.recipe.environment import Environment
from scripts.rewards.environments import code_gen, instruction_following, math, structured_outputs, tool_use
from scripts.rewards.instructions import INSTRUCTIONS, obeys
from scripts.rewards.registry import SPECS, reward_groups, score
from scripts.rewards.sentences import count_sentences, language, split_sentences, tokens

# math_with_judge


@pytest.mark.parametrize(
    ("expected", "response", "reward"),
    [
        ("52", r"\boxed{52}", 1.0),
        ("52", r"so it is \boxed{ 52 }.", 1.0),
        ("52", r"\boxed{53}", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        ("52", "", 0.0),
        ("52", r"\boxed{", 0.0),
        (r"\(\frac{1}{3}\)", r"\boxed{\frac{1}{3}}", 1.0),
        ("$x^2$", r"\boxed{x^2}", 1.0),
        ("-3", r"\boxed{-4}", 0.0),
        ("7", "I say 8 at first, but it is 7", 1.0),
    ],
)
def test_math_compares_values(expected, response, reward):
    assert math.verify({"expected_answer": expected}, response) == reward


def test_math_a_response_that_asks_for_a_huge_number_ends_in_time(monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 1.0)
    started = time.monotonic()
    reward = score({"agent_ref": {"name": Environment.MATH}, "expected_answer": "7"}, r"\boxed{9^{9^{9^{9^9}}}}")
    assert reward == 0.0 and reward.why == "timeout: ran longer than 1 s"
    assert time.monotonic() - started < 30
    assert math.check({"expected_answer": " "}) is not None


# code_gen


def program(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\nDone."


SQUARE = {"verifier_metadata": {"unit_tests": {"inputs": ["3\n", "-4\n"], "outputs": ["9\n", "16"]}}}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (program("print(int(input()) ** 2)"), 1.0),
        (program("print(9)"), 0.0),
        (program("x = 1") + program("print(int(input()) ** 2)"), 1.0),
        (program("print(int(input()) ** 2)") + program("x = 1"), 0.0),
        (program("n = int(input())\nprint(f'{n * n}.0')"), 1.0),
        (program("print(pow(int(stdin.readline()), 2))"), 1.0),
        (program("print(int(input()) ** 2, file=sys.stderr)"), 0.0),
        (program("print(int(input()) ** 2)\n1 / 0"), 0.0),
        (program("print(int(input()) ** 2)\nexit(1)"), 1.0),
        ("print(int(input()) ** 2)", 0.0),
        ("", 0.0),
        ("```", 0.0),
        ("<think>easy</think>" + program("print(int(input()) ** 2)"), 0.0),
        (program("def"), 0.0),
    ],
)
def test_code_gen_runs_the_last_block_on_every_test(response, reward):
    assert code_gen.verify(SQUARE, response) == reward


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("1.0 2", "1 2.00", True),
        ("1\n\n2", "1\n2", False),
        ("yes", "Yes", False),
        ("50000000000000000", "50000000000000001", False),
        ("1 2", "1 2 3", False),
        ("", "", True),
    ],
)
def test_code_gen_compares_lines_and_numbers(output, expected, same):
    assert code_gen.same_output(output, expected) is same


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("def joined(a, b):\n    return a + b", 1.0),
        ("class Solution:\n    def joined(self, a, b):\n        return a + b", 1.0),
        ("def joined(a, b):\n    return [x for x in (a, b)]", 0.0),
        ("def minus(a, b):\n    return a + b", 0.0),
        ("def joined(a: List[int], b):\n    return tuple(a + b)", 1.0),
    ],
)
def test_code_gen_calls_the_named_function(text, reward):
    tests = {"fn_name": "joined", "inputs": ["[1]\n[2, 3]", "[]\n[]"], "outputs": ["[1, 2, 3]", "[]"]}
    row = {"verifier_metadata": {"unit_tests": tests}}
    assert code_gen.verify(row, program(text)) == reward


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1.0000001, 1, True),
        (1.1, 1, False),
        ("2", 2.0, True),
        (True, 1, True),
        ([1.0000001], [1], False),
        (None, 0, False),
    ],
)
def test_code_gen_compares_returned_values(value, expected, same):
    assert code_gen.same_value(value, expected) is same


def test_code_gen_a_group_is_run_on_all_cores():
    row = SQUARE | {"agent_ref": {"name": "code_gen_simple_agent"}}
    right, wrong = program("print(int(input()) ** 2)"), program("print(1)")
    assert reward_groups([(row, [right, wrong, "", right])])[0] == [1.0, 0.0, 0.0, 1.0]


# structured_outputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}


def structured(kind: str, schema: dict = SCHEMA, **more: object) -> dict:
    return {"schema_type": kind, "schema_str": json.dumps(schema), **more}


def test_structured_outputs_a_bomb_ends_in_time(monkeypatch):
    monkeypatch.setattr(structured_outputs, "SECONDS", 1.0)
    row = structured("json", {"type": "string", "pattern": "^(a+)+$"})
    started = time.monotonic()
    assert score(row | {"agent_ref": {"name": Environment.STRUCTURED_OUTPUTS}}, json.dumps("a" * 40 + "!")) == 0.0
    assert time.monotonic() - started < 20


def test_structured_outputs_in_other_formats_than_json_and_as_calls_are_gyms():
    assert "schema_type 'yaml' has no verifier here" in structured_outputs.check(structured("yaml"))
    called = structured_outputs.check(structured("json", response_mode="tool_call"))
    assert called.startswith("response_mode 'tool_call'") and "gym.servers" in called
    assert structured_outputs.check(structured("json", response_mode="text")) is None


def test_structured_outputs_fetches_no_schema_and_refuses_bad_patterns():
    remote = structured("json", {"$ref": "http://127.0.0.1:9/schema.json"})
    assert structured_outputs.verify(remote, "{}") == 0.0
    assert "not a 'regex'" in structured_outputs.check(structured("json", {"pattern": "("}))


def test_structured_outputs_is_strict_at_every_depth_of_objects_alone():
    inner = {"type": "object", "properties": {"a": {}, "b": {}}}
    nested = structured("json", {"type": "object", "properties": {"x": inner}})
    assert structured_outputs.verify(nested, '{"x": {"a": 1}}') == 0.0
    either = structured("json", {"anyOf": [inner]})
    assert structured_outputs.verify(either, '{"a": 1}') == 1.0


# instruction_following


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"),
    [
        ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b A.B", "a.b axb"),
        ("keywords:existence", {"keywords": ["x", "y"]}, "Y then X", "x"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat"),
        ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "z", "zZ"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a}"),
        ("change_case:english_lowercase", {}, "all of this is written in small letters", "Not all of this is small"),
        ("change_case:english_capital", None, "ALL OF THIS IS WRITTEN IN CAPITALS", "Dies ist es nicht"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
        ("startend:quotation", {}, ' "q" ', '"q'),
        ("startend:end_checker", {"end_phrase": "The end."}, "so\nthe end.", "the end. no"),
        ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz.", "This is an English one."),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 2, "relation": "at least"},
            "Dr. X is in. Yes!",
            "Mr. Y.",
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a *** *** b"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
            'a\n\n"then, b',
            "a\n\nso then",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a [b]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP. S. y", "PS y"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\nP.P.S y", "P.S. y"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n** b"),
        ("detectable_format:constrained_response", {}, "My answer is no.", "My answer is perhaps."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* ** **"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "SECTION", "num_sections": 2},
            "SECTION 1 SECTION 2",
            "SECTION 1",
        ),
        ("detectable_format:title", {}, "x\n<<A title>>", "<<>>"),
        ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Well", "Well. Say it."),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "less than"},
            "ONE two",
            "ONE TWO",
        ),
        (
            "copy:repeat_phrase",
            {"phrase": "the red old cat", "small_n": 2},
            "the red old cat, the new old cat",
            "the red old cat " * 2,
        ),
        ("copy:copy", {"prompt_to_repeat": "It"}, " it\n", "it."),
        ("copy:copying_simple", {"prompt_to_repeat": "It"}, "IT", "It it"),
        ("copy:copying_multiple", {"prompt_to_repeat": "It", "N": 2}, "it ****** it", "it"),
        ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "BC", "abc"),
        ("detectable_format:sentence_hyphens", {}, "One.-Two.", "One. - Two."),
        ("detectable_format:square_brackets", {}, "[a] [b]", "[a] b"),
        ("detectable_format:bigram_wrapping", {}, "<<a b>> <<c d>>", "<<a b c>>"),
        ("keywords:no_adjacent_consecutive", {}, "a c", "a b"),
        ("keywords:word_once", {"keyword": "cat"}, "A cat", "Cat cat"),
        (
            "keywords:word_count_different_numbers",
            {"keyword": "a", "frequency": 2, "relation": "less than"},
            "a",
            "a a",
        ),
        ("keywords:exclude_word_harder", {"keyword": "cat"}, "category", "a cat is"),
        ("keywords:palindrome", {}, "a level", "no such"),
        ("keywords:keyword_specific_position", {"keyword": "cat", "n": 2, "m": 3}, "One. Is a cat.", "One. A cat."),
        ("keywords:start_end", {}, "So it is so", "So it is"),
        ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
        ("paragraphs:paragraphs2", None, "a\n\nb", "a\n***\nb"),
        ("first_word:first_word_sent", {"first_word": "Now"}, "Now it is. now it was.", "Now it is. Then it was."),
        ("first_word:first_word_answer", {"first_word": "now"}, "Now then", "Then now"),
        ("last_word:last_word_sent", {"last_word": "end"}, "An end. The END!", "An end. The start."),
        ("last_word:last_word_answer", {"last_word": "end"}, "the (end)", "end it"),
        ("punctuation:punctuation_dot", {}, "a!", "a."),
        ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
        ("count:lowercase_counting", {"N": 1}, "One two Three", "one two"),
        ("count:counting_composition", {"n_sent": 1, "n_words": 3}, "a b.***c d.***e f.", "a b.***c d."),
        ("count:count_unique", {}, "each word once", "word and word"),
        ("count:count_increment_word", {"keyword1": "a1", "keyword2": "b2"}, "a1 b2 B2", "a1 b2"),
        ("letters:letter_counting", {"N": 3, "relation": "at least"}, "a1bc", "ab"),
        ("letters:letter_counting2", {"letter": "A", "let_frequency": 1, "let_relation": "less than"}, "b", "a"),
    ],
)
def test_instructions_of_ifeval_and_its_sequels(name, arguments, good, bad):
    row = {"instruction_id_list": [name], "kwargs": [arguments], "prompt": ""}
    assert instruction_following.check(row) is None
    assert instruction_following.verify(row, good) == 1.0
    assert instruction_following.verify(row, bad) == 0.0


def test_instructions_each_has_a_test():
    source = "".join(path.read_text() for path in __import__("pathlib").Path(__file__).parent.glob("test_*.py"))
    assert [name for name in INSTRUCTIONS if f'"{name}"' not in source] == []


ARGUMENTS = {"keyword": "a", "keywords": ["a"], "forbidden_words": ["a"], "phrase": "a b c", "relation": "at least"}


@pytest.mark.parametrize(
    "text", ["a " * 50_000, "*" * 100_000, "[" * 100_000, "<" * 100_000, "." * 100_000, "\n" * 100_000]
)
def test_instructions_are_quick_with_what_is_long(text):
    started = time.monotonic()
    for name, checker in INSTRUCTIONS.items():
        taken = {key: ARGUMENTS.get(key, 2) for key in checker.__code__.co_varnames[1 : checker.__code__.co_argcount]}
        taken |= {key: "at least" for key in taken if "relation" in key}
        taken |= {key: "a" for key in taken if key in (
            "letter", "first_word", "last_word", "keyword1", "keyword2", "end_phrase", "prompt_to_repeat",
            "postscript_marker", "section_spliter", "instruction",
        )}  # fmt: skip
        if "language" in taken:
            taken["language"] = "en"
        obeys(name, text, taken)
    assert time.monotonic() - started < 30


def test_sentences_words_and_language():
    assert split_sentences("Mr. A. Smith paid $3.50 at a.com. Really?! Yes") == [
        "Mr. A. Smith paid $3.50 at a.com.",
        "Really?",
        "!",
        "Yes",
    ]
    assert count_sentences('He said "no." She (too) left... "Why?!" - Because') == 4
    assert count_sentences("") == 0
    assert tokens("I don't, it's A.") == ["I", "do", "n't", ",", "it", "'s", "A", "."]
    assert tokens('"Hi" ("yes")') == ["``", "Hi", "''", "(", "``", "yes", "''", ")"]
    assert language("12 345") is None


# the tool-use family


def calls(*made: tuple[str, dict]) -> str:
    return "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in made)


def single(expected: tuple[str, dict]) -> dict:
    name, given = expected
    return {"expected_action": {"type": "function_call", "name": name, "arguments": json.dumps(given)}}


A, B, C = ("f", {"a": 1}), ("f", {"a": 2}), ("g", {})


def test_tool_use_the_first_call_is_compared():
    made = [(A,), (B,), (A, C), (C, A), (A, A), ()]
    assert [tool_use.verify(single(A), f"I call. {calls(*each)}", 0.1) for each in made] == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("swe_pivot_single_step_tool_use_with_argument_comparison_agent", [1.0, 1.0, 1.0]),
        ("single_step_tool_use_with_argument_comparison_agent", [0.0, 1.0, 1.0]),
        ("toolcall_schema_single_step_tool_use_with_argument_comparison_agent", [0.0, 1.0, 1.0]),
        ("search_pivot_single_step_tool_use_with_argument_comparison_agent", [0.0, 0.0, 1.0]),
    ],
)
def test_tool_use_each_environment_has_its_threshold(name, reward):
    row = single(("f", {"q": "a b c d e"}))
    said = ["v w x y z", "a w x y b", "a b c y z"]  # 0, 2 and 3 shared of 10
    assert [SPECS[Environment(name)].verify(row, calls(("f", {"q": text}))) for text in said] == reward


def test_tool_use_an_integer_takes_a_truth_value_but_not_a_float():
    assert [tool_use.verify(single(A), calls(("f", {"a": value})), 0.1) for value in (1, True, 1.0, "1")] == [
        1,
        1,
        0,
        0,
    ]


# any response at all

ROWS = {
    Environment.MCQA: {"options": [{"A": "x"}], "expected_answer": "A", "grading_mode": "lenient_boxed"},
    Environment.TOOL_USE: single(A),
    Environment.INSTRUCTION_FOLLOWING: {
        "instruction_id_list": ["keywords:start_end", "detectable_format:title", "copy:repeat_phrase"],
        "kwargs": [None, {}, {"phrase": "a b c", "small_n": 1}],
        "grading_mode": "fraction",
    },
}
ODD = st.lists(
    st.sampled_from(["\\boxed{", "}", "Answer:", "[{", "[f(a=1)]", "<tool_call>{", "</tool_call>", "\0", "A", '"'])
)


@given(st.one_of(st.text(), ODD.map("".join)))
def test_every_response_has_a_reward_between_nothing_and_one(text):
    for environment, row in ROWS.items():
        assert 0.0 <= SPECS[environment].verify(row, text) <= 1.0
