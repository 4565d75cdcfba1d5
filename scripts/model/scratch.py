"""Special tokens and chat templates of a fresh model, with a token for each byte besides."""

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
IMAGE, TOOL, CALL, CALL_END = "<|image|>", "<|tool|>", "<tool_call>", "</tool_call>"
SPECIALS = (PAD, END, USER, ASSISTANT, SYSTEM, IMAGE, TOOL, CALL, CALL_END)
CHAT_TEMPLATE = (
    "{% macro said(content) %}"
    "{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{{ '<|image|>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% endmacro %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ said(message['content']) + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ said(message['content']) + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOOLS_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% generation %}{{ said(message['content']) + '<|end|>' }}{% endgeneration %}",
    "{% generation %}{{ said(message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] + call['function']['arguments'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endgeneration %}",
)
