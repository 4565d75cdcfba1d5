"""Published columns become rows of a blend: which, in which order, and what is left out."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.data.compose import write_blend
from scripts.data.download import fetch_source
from scripts.data.published import PublishedFile
from scripts.errors import UserError
from scripts.recipe.blend import Blend
from scripts.recipe.load import load_recipe
from scripts.rewards.own import OwnEnvironment
from scripts.rewards.registry import score
from tests.conftest import ROOT

QUESTION = {"question": "What is 60 x 20?", "answer": "It is <<60*20=1200>>1200.\n#### 1,200"}
ASKS, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)


def written(tmp_path, rows: list[dict], **blend) -> list[dict]:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "0.parquet")
    output = tmp_path / "blend.jsonl"
    write_blend(Blend(file="0.parquet", **blend), [[[PublishedFile(tmp_path / "0.parquet", "0.parquet")]]], output)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_question_of_gsm8k_is_paid_for_its_answer_and_demonstrates_it(tmp_path):
    (prompt,) = written(tmp_path, [QUESTION], columns="gsm8k")
    assert score(prompt, "So it is \\boxed{1200}.") == 1.0
    assert score(prompt, "So it is \\boxed{120}.") == 0.0
    (shown,) = written(tmp_path, [QUESTION], columns="gsm8k", kind="demonstrations")
    assert shown["messages"][0] == prompt["responses_create_params"]["input"][0]
    assert shown["messages"][1]["content"] == "It is 1200.\n\\boxed{1200}"
    assert score(prompt, shown["messages"][1]["content"]) == 1.0


def test_rows_of_tulu_3_by_their_kind(tmp_path):
    assert written(tmp_path, [{"messages": [ASKS, RIGHT]}], columns="tulu3", kind="demonstrations") == [
        {"messages": [ASKS, RIGHT]}
    ]
    (pair,) = written(
        tmp_path, [{"chosen": [ASKS, RIGHT], "rejected": [ASKS, WRONG]}], columns="tulu3", kind="preferences"
    )
    assert pair["context"] == [ASKS] and [answer["completion"] for answer in pair["completions"]] == [[RIGHT], [WRONG]]
    constraint = json.dumps({"func_name": "validate_lowercase", "N": None})
    math = {"messages": [ASKS], "ground_truth": "42", "dataset": "MATH"}
    rows = written(tmp_path, [math, math | {"ground_truth": constraint, "dataset": "ifeval"}], columns="tulu3")
    assert [row["agent_ref"]["name"] for row in rows] == ["math_with_judge_simple_agent", "tulu3_constraints"]
    assert score(rows[0], "\\boxed{42}") == 1.0


def test_what_breaks_its_contract_is_left_out_and_counted(tmp_path, capsys):
    rows = written(tmp_path, [QUESTION | {"answer": "forty"}, QUESTION], columns="gsm8k")
    assert len(rows) == 1
    left_out = "1 of 2 rows left out; the first: 0.parquet: row 1: column answer: has no '####' with an answer after it"
    assert left_out in capsys.readouterr().err
    with pytest.raises(UserError, match="no row can be trained on: of 1 read, 0 are filtered out, 1 do not fit"):
        written(tmp_path, [QUESTION | {"answer": "forty"}], columns="gsm8k")
    with pytest.raises(UserError, match=r"0\.parquet: has no column question; valid: text"):
        written(tmp_path, [{"text": "nothing"}], columns="gsm8k")


def test_shuffled_rows_are_the_same_ones_in_an_order_of_their_own(tmp_path):
    rows = [QUESTION | {"question": str(number)} for number in range(50)]
    plain, mixed, again = (written(tmp_path, rows, columns="gsm8k", shuffle=shuffle) for shuffle in (False, True, True))
    questions = [row["question"] for row in plain]
    assert mixed == again != plain and sorted(row["question"] for row in mixed) == sorted(questions)


def test_files_of_several_sets_are_fetched_and_follow_each_other(tmp_path):
    for name, question in (("train-00000-of-00002", "1"), ("train-00001-of-00002", "2"), ("test", "3")):
        pq.write_table(pa.Table.from_pylist([QUESTION | {"question": question}]), tmp_path / f"{name}.parquet")
    recipe = load_recipe(ROOT / "config/recipes/tiny-pretrained.yaml")
    blend = {"columns": "gsm8k", "file": ["train-*-of-00002.parquet", "test.parquet"]}
    source = {"kind": "folder", "path": str(tmp_path)}
    recipe = recipe.model_copy(update={"blends": {"math": Blend(**blend, source=source)}})
    fetch_source(recipe.model_copy(update={"source": recipe.blends["math"].source}), tmp_path / "source")
    rows = [json.loads(line) for line in (tmp_path / "source/math.jsonl").read_text().splitlines()]
    assert [row["question"][0] for row in rows] == ["1", "2", "3"]
    record = json.loads((tmp_path / "source/record.json").read_text())
    (part,) = record["blends"]["math"]["composed"]["sources"]
    assert {"test.parquet", "train-00001-of-00002.parquet"} <= part["files"].keys()


AGENT = b'{"agent_ref":{"type":"responses_api_agents","name":"%b"},"responses_create_params":{"input":'
BYTES = [
    (
        QUESTION,
        {"columns": "gsm8k"},
        AGENT
        % b"math_with_judge_simple_agent"
        + b'[{"role":"user","content":"What is 60 x 20?\\n\\nReason step by step, and put the final answer in \\\\boxed{}."}]},'
        b'"question":"What is 60 x 20?\\n\\nReason step by step, and put the final answer in \\\\boxed{}.",'
        b'"expected_answer":"1200"}\n',
    ),
    (
        {"chosen": [ASKS, RIGHT], "rejected": [ASKS, WRONG], "prompt": "q"},
        {"columns": "tulu3", "kind": "preferences"},
        b'{"context":[{"role":"user","content":"q"}],"completions":['
        b'{"rank":0,"completion":[{"role":"assistant","content":"a"}]},'
        b'{"rank":1,"completion":[{"role":"assistant","content":"b"}]}]}\n',
    ),
    (
        {"messages": [ASKS], "ground_truth": '{"N": null}', "dataset": "ifeval"},
        {"columns": "tulu3"},
        AGENT % b"tulu3_constraints" + b'[{"role":"user","content":"q"}]},"constraint":{"N":null}}\n',
    ),
]


@pytest.mark.parametrize(("row", "options", "line"), BYTES)
def test_rows_that_were_trained_on_are_the_same_to_the_byte(row, options, line, tmp_path):
    written(tmp_path, [row], **options)
    assert (tmp_path / "blend.jsonl").read_bytes() == line


CONSTRAINTS = [
    ({"func_name": "verify_keywords", "keyword_list": ["Egg", "hen"]}, "An egg from a hen.", "An egg."),
    ({"func_name": "verify_keyword_frequency", "word": "egg", "N": 2}, "Egg, egg.", "Eggs, egg."),
    ({"func_name": "validate_forbidden_words", "forbidden_words": ["egg"]}, "A hen.", "Eggs."),
    ({"func_name": "verify_letter_frequency", "letter": "g", "N": 2}, "egg", "eggs and bags"),
    ({"func_name": "validate_response_language", "language": "de"}, "Das ist ein guter Tag.", "This is a good day."),
    ({"func_name": "verify_paragraph_count", "N": 2}, "one\n* * *\ntwo", "one * * * "),
    ({"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    ({"func_name": "verify_sentence_constraint", "N": 3, "quantifier": "at most"}, "A. B. C.", "A. B. C. D."),
    ({"func_name": "validate_paragraphs", "N": 2, "first_word": "So", "i": 2}, "One.\n\nSo.", "So.\n\nOne."),
    ({"func_name": "verify_postscript", "postscript_marker": "P.S."}, "Bye. P.S. More.", "Bye. P.S."),
    ({"func_name": "validate_placeholders", "N": 2}, "[a] [b]", "[a]"),
    ({"func_name": "verify_bullet_points", "N": 1}, "* one", "one"),
    ({"func_name": "validate_title"}, "<<egg>>", "egg"),
    ({"func_name": "validate_choice", "options": ["yes", "no"]}, "no", "maybe"),
    ({"func_name": "validate_highlighted_sections", "N": 2}, "*a* and *b*", "*a*"),
    ({"func_name": "validate_sections", "N": 2, "section_splitter": "Part"}, "Part 1. Part 2.", "Part 1."),
    ({"func_name": "validate_json_format"}, "{}", "{"),
    ({"func_name": "validate_repeat_prompt", "original_prompt": "Say it."}, "Say it. Done.", "Done."),
    ({"func_name": "validate_two_responses"}, "a ****** b", "a ****** a"),
    ({"func_name": "validate_uppercase"}, "EGG", "Egg"),
    ({"func_name": "validate_lowercase"}, "egg", "Egg"),
    ({"func_name": "validate_frequency_capital_words", "N": 2, "quantifier": "at least"}, "ONE TWO", "ONE two"),
    ({"func_name": "validate_end", "end_phrase": "Over."}, "It is. Over.", "Over. It is."),
    ({"func_name": "validate_quotation"}, '"egg"', "egg"),
    ({"func_name": "validate_no_commas"}, "egg", "egg,"),
]


def test_every_constraint_of_tulu_3_is_paid_where_it_is_obeyed():
    environment = OwnEnvironment("tulu3_constraints", ROOT / "config/environments/tulu3_constraints.py").spec()
    for constraint, obeys, breaks in CONSTRAINTS:
        row = {"responses_create_params": {"input": "q"}, "constraint": constraint | {"letters": None}}
        assert environment.check(row) is None
        assert (environment.verify(row, obeys), environment.verify(row, breaks)) == (1.0, 0.0), constraint
    assert "whose func_name no check bears" in environment.check({"constraint": {"func_name": "validate_rhyme"}})
    assert environment.verify(row, " ") == 0.0
