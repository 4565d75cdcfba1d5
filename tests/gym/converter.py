"""Responses as NeMo-Gym's model server writes them for its resources servers, with its parser of reasoning.

Runs in an environment that holds nemo-gym (`make gym`). Reads JSON lines `{"content": ..., "reasoning": ...}`, of which
`reasoning` is what vLLM's parser of reasoning took apart (null: nothing), and writes the items of the output for each.
"""

import json
import sys

from nemo_gym.responses_converter import ResponsesConverter


def main() -> None:
    """Answer each line."""
    converter = ResponsesConverter(return_token_id_information=False, uses_reasoning_parser=True)
    for line in sys.stdin:
        given = json.loads(line)
        content = given["content"]
        if given["reasoning"]:
            content = converter._wrap_reasoning_in_think_tags([given["reasoning"]]) + content
        items = converter.postprocess_assistant_message_dict({"role": "assistant", "content": content})
        print(json.dumps([item.model_dump() for item in items]))


if __name__ == "__main__":
    main()
