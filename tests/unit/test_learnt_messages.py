"""A message's own mark (weight, train, trainable, loss) decides whether the message is learnt, or the row is refused."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from scripts.backends.nemo_rl.demonstrations import check_marks
from scripts.errors import UserError
from scripts.rows.kinds import KINDS
from scripts.rows.learning_marks import MARKS, learnt_places, mark_of
from scripts.rows.prompts import as_chat
from tests.pretrained import TEMPLATE, tokenizer

if find_spec("trl") is None:
    pytest.skip("envs/trl.txt is not installed", allow_module_level=True)

from scripts.backends.trl.tokenization import Line, tokenize_demonstrations

WITH_MARKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = pytest.mark.parametrize("template", [TEMPLATE, WITH_MARKS], ids=["plain", "marked"])


def conversation(*marks: dict) -> dict:
    """A row with an answer a mark: ONE, TWO and so on."""
    messages = []
    for mark, word in zip(marks, ("ONE", "TWO", "SIX"), strict=False):
        messages += [{"role": "user", "content": f"Say {word.lower()}."}, {"role": "assistant", "content": word} | mark]
    return {"messages": messages}


def learnt(row: dict, every_answer: bool, template: str = TEMPLATE) -> list[str]:
    """The answers of a row that are learnt."""
    made = tokenizer(chat_template=template)
    line = Line(1, "rows.jsonl:1", "", row)
    (tokens,) = tokenize_demonstrations([line], made, 500, {}, assistant_only_loss=every_answer)
    text = made.decode([token for token in tokens["labels"] if token != -100])
    return [word for word in ("ONE", "TWO", "SIX") if word in text]


@TEMPLATES
@pytest.mark.parametrize(
    ("marks", "last_alone", "every_answer"),
    [
        ([{}, {}, {}], ["SIX"], ["ONE", "TWO", "SIX"]),
        ([{"weight": 0}, {}, {"weight": 1}], ["SIX"], ["TWO", "SIX"]),
        ([{"weight": 1}, {"weight": 0}, {"weight": 1}], ["ONE", "SIX"], ["ONE", "SIX"]),
        ([{"weight": 1}, {}, {"weight": 0}], ["ONE"], ["ONE", "TWO"]),
        ([{"train": False}, {"train": True}, {}], ["TWO", "SIX"], ["TWO", "SIX"]),
        ([{"trainable": True}, {"loss": False}, {"loss": 0}], ["ONE"], ["ONE"]),
        ([{"weight": 1.0, "train": True}, {"weight": None}, {"weight": 0.0}], ["ONE"], ["ONE", "TWO"]),
    ],
)
def test_a_message_is_learnt_as_its_mark_says_and_else_as_the_recipe_says(marks, last_alone, every_answer, template):
    row = conversation(*marks)
    assert KINDS["demonstrations"].problem(row) is None
    assert learnt(row, False, template) == last_alone
    assert learnt(row, True, template) == every_answer


@pytest.mark.parametrize("name", MARKS)
def test_every_name_of_a_mark_has_one_meaning_and_never_reaches_the_template(name):
    assert (mark_of({name: 0}), mark_of({name: True}), mark_of({name: None})) == (False, True, None)
    assert as_chat([{"role": "assistant", "content": "x", name: 0, "name": "a", "tool_calls": None}]) == [
        {"role": "assistant", "content": "x", "name": "a"}
    ]


@pytest.mark.parametrize(
    ("marks", "problem"),
    [
        ([{"weight": 0.5}, {}], "$.messages[1].weight: is 0.5; a message is learnt (1, true) or not (0, false)"),
        ([{}, {"weight": 2}], "$.messages[3].weight: is 2;"),
        ([{"train": "yes"}, {}], "$.messages[1].train: is 'yes';"),
        ([{"weight": 0, "train": True}, {}], "$.messages[1].weight: weight 0 and train True contradict each other"),
        ([{"weight": 0}, {"loss": False}], "$.messages: every message of the assistant is marked as not learnt"),
    ],
)
def test_a_mark_without_meaning_and_a_row_without_a_learnt_message_are_refused(marks, problem):
    assert KINDS["demonstrations"].problem(conversation(*marks)).startswith(problem)


def test_only_the_assistants_messages_can_be_learnt():
    row = conversation({})
    row["messages"][0]["train"] = False
    assert KINDS["demonstrations"].problem(row) is None
    row["messages"][0]["train"] = True
    assert "$.messages[0].role: is user, and only the assistant" in KINDS["demonstrations"].problem(row)


def test_a_row_whose_last_message_is_not_learnt_needs_another_that_is():
    row = conversation({}, {"weight": 0})
    assert learnt(row, True) == ["ONE"]
    with pytest.raises(UserError, match=r"rows.jsonl:1: nothing is learnt: .*set sft.assistant_only_loss: true"):
        learnt(row, False)
    with pytest.raises(UserError, match=r"rows.jsonl:1: nothing is learnt"):
        learnt(conversation({"weight": 0}, {"weight": 0}), True)


def test_an_answer_that_is_learnt_in_full_has_no_message_without_loss():
    answer = [{"role": "assistant", "content": "x", "weight": 0}]
    pair = {"prompt": "q", "chosen": answer, "rejected": [{"role": "assistant", "content": "y"}]}
    assert "$.chosen: has a message marked as not learnt" in KINDS["preferences"].problem(pair)
    labelled = {"prompt": "q", "completion": answer, "label": True}
    assert "$.completion: has a message marked as not learnt" in KINDS["unpaired"].problem(labelled)


@pytest.mark.parametrize(
    ("marks", "only_last", "problem"),
    [
        ([{}, {}], False, None),
        ([{"weight": 1}, {"weight": 1}], False, None),
        ([{"weight": 0}, {"weight": 1}], True, None),
        ([{"weight": 0}, {}], False, "messages\\[1\\] is marked as not learnt, but NeMo-RL learns every message"),
        ([{"weight": 1}, {}], True, "messages\\[1\\] is marked as learnt, but NeMo-RL learns the last message alone"),
    ],
)
def test_nemo_rl_which_reads_no_marks_gets_no_row_that_is_learnt_otherwise(marks, only_last, problem):
    stage = SimpleNamespace(sft={"only_unmask_final": only_last})
    messages = conversation(*marks)["messages"]
    if problem is None:
        check_marks(messages, stage)
        return
    with pytest.raises(UserError, match=problem):
        check_marks(messages, stage)


def test_places_follow_from_marks_alone_where_all_messages_have_one():
    messages = conversation({"weight": 1}, {"weight": 0}, {"weight": 1})["messages"]
    assert learnt_places(messages, False) == learnt_places(messages, True) == [1, 5]
