"""Token lengths: every kind of row is counted, the long rows are all found."""

import json
from importlib.resources import files
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from scripts.errors import UserError
from scripts.model.lengths import BYTES, LengthsOf, TokenCounter, tokenizer_at_hand
from scripts.recipe.model import PretrainedModel, RandomModel
from scripts.rows import jsonl
from tests.cases import cases
from tests.pretrained import tokenizer

SCRATCH = RandomModel(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)


@pytest.fixture
def by_words(tmp_path):
    """A tokenizer with one token a word."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def token_lengths(split, kind, tokenizer, limit, workers=1, chat_template=None):
    """The lengths of a split's rows."""
    return LengthsOf.by(kind, tokenizer, limit, chat_template).of_split(split, workers)


def counted(split, kind: str, tokenizer: str, **options) -> list[int]:
    """The tokens of every row: none is short enough."""
    return [tokens for _, tokens in token_lengths(split, kind, tokenizer, 0, **options).too_long]


def prompt(words: int, **params) -> dict:
    return {"responses_create_params": {"input": [{"role": "user", "content": "word " * words}], **params}}


def talk(asked: str, answered: str) -> dict:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


@cases("lengths.rows", "row", "tokens")
def test_the_texts_of_every_kind_of_row_are_counted(row, tokens, by_words, write_rows):
    kind = "prompts" if "responses_create_params" in row else "demonstrations" if "messages" in row else "preferences"
    assert counted(write_rows("split.jsonl", [row]), kind, by_words) == [tokens]


def test_every_row_that_is_too_long_is_named(by_words, write_rows, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 300)
    split = write_rows("split.jsonl", [prompt(50 if number % 20 == 7 else 3) for number in range(100)])
    for workers in (1, 2):
        found = token_lengths(split, "prompts", by_words, 50, workers)
        assert found.too_long == [(line, 50) for line in (8, 28, 48, 68, 88)]
        assert found.longest == 50 and found.rows == 100


def test_a_model_from_scratch_has_a_token_a_byte_and_two_a_message(write_rows):
    assert tokenizer_at_hand(SCRATCH) == BYTES
    split = write_rows("split.jsonl", [prompt(2), prompt(1)])
    found = token_lengths(split, "prompts", BYTES, 12)
    assert counted(split, "prompts", BYTES) == [13, 8] and found.too_long == [(1, 13)] and found.share == 0.5
    pair = write_rows("split.jsonl", [{"prompt": "ä", "chosen": "a", "rejected": "bc", "messages": None}])
    assert counted(pair, "preferences", BYTES) == [8]


SAID = "{% for message in messages %}{% generation %}| {{ message['content'] }} |\n{% endgeneration %}{% endfor %}"


def test_what_the_template_adds_and_answers_that_are_cut_are_counted(by_words, tmp_path, write_rows):
    template = "{{ bos_token }} S " + SAID + "{% if add_generation_prompt %}>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "B"}))
    sizes = ((1, 3), (1, 4), (5, 5), (4, 1))
    rows = [talk("w " * asked, "w " * answered) for asked, answered in sizes]
    split = write_rows("split.jsonl", rows)
    found = token_lengths(split, "demonstrations", by_words, 10)
    assert found.too_long == [(2, 11), (3, 16), (4, 11)] and found.answers_cut == 1
    assert counted(split, "demonstrations", by_words) == [10, 11, 16, 11]
    other = "{% for message in messages %}{{ message.content }} | {% endfor %}"
    assert counted(split, "demonstrations", by_words, chat_template=other) == [6, 7, 12, 7]


@pytest.mark.parametrize(
    ("chat_template", "tokens"),
    [
        ("{% if tools %}You have {{ tools | tojson }} {% endif %}" + SAID, 11),
        (SAID, 4),  # it shows no tools
        ("{% what %}", 5),  # what fails shows nothing: the texts are counted
        ("{{ raise_exception('roles must alternate') }}", 5),
        ("{{ tools[0].function.name }}", 5),
        (None, 5),
    ],
)
def test_tools_count_as_the_template_shows_them(by_words, chat_template, tokens):
    counter = TokenCounter(by_words, chat_template)
    assert counter.count([{"role": "user", "content": "a b"}], [{"name": "a b", "c": "d"}]) == tokens


@pytest.mark.skipif(find_spec("trl") is None, reason="envs/trl.txt is not installed")
@pytest.mark.parametrize("template", ["qwen2_5", "llama3_1", "gemma3"])
def test_a_conversations_tokens_are_counted_as_the_template_makes_them(template, tmp_path, write_rows):
    made = tokenizer(chat_template=(files("trl") / f"chat_templates/{template}.jinja").read_text())
    made.save_pretrained(tmp_path)
    asks, says = ({"role": role, "content": f"The larger of {role}"} for role in ("user", "assistant"))
    talks = [[asks, says], [asks, says] * 3, [{"role": "system", "content": "Be larger."}, asks, says]]
    tools = [{"type": "function", "function": {"name": "larger", "description": "<of two>", "parameters": {}}}]
    split = write_rows("split.jsonl", [{"messages": talk, "tools": tools} for talk in talks])
    found = counted(split, "demonstrations", str(tmp_path / "tokenizer.json"))
    assert found == [len(made.apply_chat_template(talk, tools=tools, return_dict=False)) for talk in talks]


def test_rows_whose_texts_hold_special_tokens_are_told(by_words, write_rows):
    tokenizer = Tokenizer.from_file(by_words)
    tokenizer.add_special_tokens(["<|im_end|>", "</s>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(by_words)
    texts = ["<|im_end|>", "<think> <|im_", "a</s>", "<s>"]
    split = write_rows("split.jsonl", [talk(text, "a") for text in texts])
    assert token_lengths(split, "demonstrations", by_words, 10).special == [1, 3]


def test_the_tokenizer_is_taken_from_a_folder_or_the_hubs_cache(by_words, tmp_path, monkeypatch):
    assert tokenizer_at_hand(PretrainedModel(name=str(tmp_path))) == by_words
    assert tokenizer_at_hand(PretrainedModel(name=str(tmp_path / "none"))) is None
    assert tokenizer_at_hand(PretrainedModel(name="nobody/has-this")) is None


def test_a_row_that_is_none_and_a_tokenizer_that_is_none_are_named(by_words, write_rows, tmp_path):
    split = write_rows("split.jsonl", [prompt(1), b"{"])
    with pytest.raises(UserError, match=r"split.jsonl:2: not valid JSON"):
        token_lengths(split, "prompts", by_words, 1)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other.json: not a tokenizer"):
        token_lengths(split, "prompts", str(tmp_path / "other.json"), 1)
