"""Fields of the rows of each kind, to which a recipe's `columns` map published columns."""

CONVERSATIONS = ("messages", "conversations")
ASKED = ("prompt", "question", "instruction")
ANSWERED = ("completion", "answer", "output")
SYSTEM = ("system", "system_prompt")
TOOLS = ("tools", "tool_defs", "functions")
PICTURES = ("images", "image")
BEFORE_ANSWER = (*ASKED, "input", "history", *SYSTEM, *TOOLS, *PICTURES)
FIELDS = {
    "prompts": frozenset(
        {*CONVERSATIONS, *BEFORE_ANSWER, *ANSWERED, "expected_answer", "agent_ref", "responses_create_params"}
    ),
    "demonstrations": frozenset({*CONVERSATIONS, *BEFORE_ANSWER, *ANSWERED, "reasoning", "agent_ref"}),
    "preferences": frozenset({*BEFORE_ANSWER, "chosen", "rejected", "context", "completions"}),
    "unpaired": frozenset({*BEFORE_ANSWER, *ANSWERED, "reasoning", "label"}),
}
"""The fields that rows of a kind are made of. Prompts have the fields of their environment besides."""
