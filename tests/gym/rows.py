"""Rows of every environment that is verified here."""

import json
import random
from collections.abc import Iterable
from typing import Any

from demo.synthesize import FAMILIES, make_task
from scripts.recipe.environment import Environment

Row = dict[str, Any]


def rows() -> list[Row]:
    """Some of each environment: those of the tiny recipes, and others of more kinds than these have."""
    rng, made = random.Random(7), []
    for environment in FAMILIES:
        for _ in range(4):
            task = make_task(environment, rng)
            made.append(_row(environment, task.prompt, task.tools, **task.fields))
    return made + _more_rows()


def _row(environment: str, question: str = "What, then?", tools: Iterable[Row] = (), /, **fields: Any) -> Row:
    params: Row = {"input": [{"role": "user", "content": question}]}
    if tools:
        params["tools"] = [{"strict": None} | tool for tool in tools]
    return {
        "agent_ref": {"type": "responses_api_agents", "name": str(environment)},
        "responses_create_params": params,
        **fields,
    }


TOOL_USE = (Environment.TOOL_USE, Environment.TOOLCALL_SCHEMA, Environment.SEARCH_PIVOT, Environment.SWE_PIVOT)
ANSWERS = [
    r"\frac{3}{4}",
    r"0.125",
    r"50\%",
    r"-7",
    r"1,200",
    r"2\sqrt{3}",
    r"x^2+2x+1",
    r"(1,2]",
    r"\{1,2,3\}",
    r"(3,4)",
    r"x=5",
    r"\pi/2",
    r"10^{6}",
    r"3+4i",
    r"\text{even}",
    r"$12$",
    r"\(\dfrac{1}{3}\)",
    r"1:2",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"x>3",
    r"12\text{cm}",
    r"\infty",
    r"90^\circ",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "count": {"type": "integer", "minimum": 1},
        "share": {"type": "number"},
        "open": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "inner": {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": []},
    },
    "required": ["name"],
}
VALUE = {"name": "ab", "count": 2, "share": 0.5, "open": True, "tags": ["x", "y"], "inner": {"when": "2026-01-02"}}
TABLE = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}
TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}
    for name in ("find", "move", "open")
]
FIND = {"item": "the red key", "count": 2, "near": 1.5, "tags": ["a b", "c"], "deep": {"on": True, "none": None}}


def _more_rows() -> list[Row]:
    letters = [{"A": "red wine"}, {"B": "wine"}, {"C": "A dog"}, {"D": None}, {"E": "12.5"}]
    choice = {"options": letters, "expected_answer": "B"}
    made = [_row(Environment.MATH, question="?", expected_answer=answer) for answer in ANSWERS]
    made += [
        _row(Environment.MCQA, **choice, grading_mode=mode)
        for mode in ("strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon")
    ]
    made += [
        _row(Environment.MCQA, **choice, template_metadata={"output_regex": pattern})
        for pattern in (r"choice:\s*(.+)", [r"final:\s*(\w+)", r"choice:\s*(\w+)"], r"[A-E](?=!)", r"<(\w?)>")
    ]
    made += [
        _row(Environment.STRUCTURED_OUTPUTS, schema_type="json", schema_str=json.dumps(schema))
        for schema in (SCHEMA, TABLE)
    ]
    for name in TOOL_USE:
        expected = [
            {"type": "message", "content": "Hello."},
            {"type": "function_call", "name": "find", "arguments": json.dumps(FIND)},
            {"type": "function_call", "name": "open", "arguments": "{}"},
        ]
        made += [_row(name, "Do it.", TOOLS, expected_action=action) for action in expected]
    programs = (
        {"inputs": ["3\n", "-4\n"], "outputs": ["9\n", "16"]},
        {"inputs": ["[1]\n[2, 3]", "[]\n[]"], "outputs": ["[1, 2, 3]", "[]"], "fn_name": "joined"},
    )
    made += [_row(Environment.CODE_GEN, verifier_metadata={"unit_tests": tests}) for tests in programs]
    made += [
        _row(
            Environment.INSTRUCTION_FOLLOWING,
            id=1,
            prompt="Say something.",
            instruction_id_list=[name for name, _ in some],
            kwargs=[given for _, given in some],
            grading_mode=mode,
        )
        for some in (*([pair] for pair in INSTRUCTIONS), INSTRUCTIONS[:3], INSTRUCTIONS[4:9])
        for mode in ("binary", "fraction")
    ]
    return made


INSTRUCTIONS: list[tuple[str, Row]] = [
    ("keywords:existence", {"keywords": ["tea", "milk"]}),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}),
    ("keywords:forbidden_words", {"forbidden_words": ["coffee", "rum"]}),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 4, "let_relation": "at least"}),
    ("language:response_language", {"language": "de"}),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("length_constraints:number_words", {"num_words": 8, "relation": "less than"}),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "milk"}),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say something."}),
    ("startend:end_checker", {"end_phrase": "That is all."}),
    ("startend:quotation", {}),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}),
    ("change_case:english_capital", {}),
    ("change_case:english_lowercase", {}),
    ("punctuation:no_comma", {}),
    ("punctuation:punctuation_dot", {}),
    ("punctuation:punctuation_exclamation", {}),
    ("detectable_format:square_brackets", {}),
    ("detectable_format:sentence_hyphens", {}),
    ("detectable_format:bigram_wrapping", {}),
    ("keywords:no_adjacent_consecutive", {}),
    ("keywords:word_once", {"keyword": "tea"}),
    ("keywords:palindrome", {}),
    ("keywords:start_end", {}),
    ("paragraphs:paragraphs", {}),
    ("paragraphs:paragraphs2", {}),
    ("first_word:first_word_sent", {"first_word": "tea"}),
    ("first_word:first_word_answer", {"first_word": "tea"}),
    ("last_word:last_word_sent", {"last_word": "milk"}),
    ("last_word:last_word_answer", {"last_word": "milk"}),
    ("count:lowercase_counting", {"N": 3}),
    ("count:count_unique", {}),
    ("count:count_increment_word", {"keyword1": "tea", "keyword2": "milk"}),
    ("letters:letter_counting", {"N": 20, "relation": "at least"}),
    ("letters:letter_counting2", {"letter": "e", "let_frequency": 4, "let_relation": "at least"}),
    ("copy:repeat_phrase", {"phrase": "tea with milk", "small_n": 2}),
]
