"""A conversation in items of the Responses API reaches a chat template in full: calls, results, thoughts, instructions."""

import json
from importlib.util import find_spec

import pytest

from scripts.rows.chat_format import SHIPPED, read_template
from scripts.rows.kinds import KINDS
from scripts.rows.messages import messages_of, tools_of
from scripts.rows.prompts import prompt_of, render_prompt
from tests.pretrained import tokenizer

ASKS = {"role": "user", "content": "Weather in Oslo?"}
SAYS = {"role": "assistant", "content": "I look."}
THINKS = {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Use the tool."}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
OTHER = {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "minus three"}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object"},
    "strict": None,
}


def row_of(*items: dict, **request) -> dict:
    agent = {"type": "responses_api_agents", "name": "some_agent"}
    return {"agent_ref": agent, "responses_create_params": {"input": [*items], **request}}


def called(*calls: dict) -> list[dict]:
    return [
        {
            "id": call["call_id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"] or "{}"},
        }
        for call in calls
    ]


TOLD = {"role": "tool", "tool_call_id": "c1", "content": "minus three"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([ASKS, SAYS, ASKS], [ASKS, SAYS, ASKS]),
        ([ASKS, CALL, RESULT], [ASKS, {"role": "assistant", "content": "", "tool_calls": called(CALL)}, TOLD]),
        ([ASKS, SAYS, CALL, OTHER, RESULT], [ASKS, SAYS | {"tool_calls": called(CALL, OTHER)}, TOLD]),
        (
            [ASKS, THINKS, SAYS, CALL, RESULT, SAYS],
            [ASKS, SAYS | {"reasoning_content": "Use the tool.", "tool_calls": called(CALL)}, TOLD, SAYS],
        ),
        (
            [ASKS, THINKS, THINKS, CALL],
            [
                ASKS,
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "Use the tool.\nUse the tool.",
                    "tool_calls": called(CALL),
                },
            ],
        ),
        ([ASKS, SAYS, SAYS, CALL], [ASKS, SAYS, SAYS | {"tool_calls": called(CALL)}]),
        ([ASKS, CALL, THINKS, OTHER], None),
    ],
)
def test_items_of_the_assistant_are_one_message_until_another_speaks(items, messages):
    row = row_of(*items)
    assert KINDS["prompts"].problem(row) is None
    if messages is None:
        assert [message.get("reasoning_content") for message in messages_of(row)] == [None, None, "Use the tool."]
    else:
        assert messages_of(row) == messages


def test_plain_messages_are_the_rows_own():
    items = [ASKS, SAYS, ASKS]
    assert all(made is given for made, given in zip(messages_of(row_of(*items)), items, strict=True))


def test_instructions_are_the_system_message_or_stand_in_front_of_its_text():
    assert messages_of(row_of(ASKS, instructions="Be brief.")) == [{"role": "system", "content": "Be brief."}, ASKS]
    system = {"role": "developer", "content": "Use tools."}
    assert messages_of(row_of(system, ASKS, instructions="Be brief."))[0]["content"] == "Be brief.\n\nUse tools."
    assert messages_of({"responses_create_params": {"input": "q", "instructions": None}}) == [
        {"role": "user", "content": "q"}
    ]


def test_tools_have_the_form_of_chat_templates():
    function = {key: value for key, value in TOOL.items() if key != "type"}
    nested = {"type": "function", "function": function}
    assert tools_of(row_of(ASKS, tools=[TOOL, nested])) == [nested, nested]
    assert tools_of(row_of(ASKS, tools=[])) is None


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL ships the templates")
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "glm4moe"])
def test_templates_with_tools_print_every_text_of_the_items(name):
    if not (SHIPPED / f"{name}.jinja").is_file():
        pytest.skip("not in this TRL")
    row = row_of(ASKS, CALL, RESULT, ASKS, instructions="Be brief.", tools=[TOOL])
    shown = render_prompt(row, tokenizer(chat_template=read_template(name)))
    for text in ("Be brief.", "of a city", "Weather in Oslo?", "weather", "Oslo", "minus three"):
        assert text in shown
    assert json.loads(json.dumps(prompt_of(row)[2]["tool_calls"][0]["function"]["arguments"])) == {"city": "Oslo"}
