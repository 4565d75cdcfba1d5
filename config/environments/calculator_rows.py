"""Write rows of the calculator's environment: ``python config/environments/calculator_rows.py FOLDER``.

``demonstrations.jsonl`` shows calls, answers after them and, more often than calls, refusals; ``products.jsonl`` has
prompts alone.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

AGENT = {"agent_ref": {"type": "responses_api_agents", "name": "calculator"}}
SHOWN, ASKED, SHARES = 4000, 400, (0.4, 0.3, 0.3)


def write_rows(folder: Path, seed: int = 1) -> None:
    """Write both files."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(SHOWN):
            file.write(json.dumps({**AGENT, "messages": _demonstration(rng)}) + "\n")
    with (folder / "products.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(ASKED):
            question, answer = _product(rng)
            params = {"input": [{"role": "user", "content": question}]}
            file.write(json.dumps({**AGENT, "responses_create_params": params, "expected_answer": answer}) + "\n")


def _product(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randrange(32, 100), rng.randrange(32, 100)
    return f"{first}*{second}", str(first * second)


def _demonstration(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation whose last message is learnt: a refusal, a call, or the answer after a call."""
    question, answer = _product(rng)
    asked = {"role": "user", "content": question}
    function = {"name": "calculate", "arguments": {"expression": question}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "name": "calculate", "content": answer}
    shown = rng.choices(("refusal", "call", "answer"), SHARES)[0]
    if shown == "refusal":
        return [asked, {"role": "assistant", "content": "too hard"}]
    return [asked, call] if shown == "call" else [asked, call, result, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]))
