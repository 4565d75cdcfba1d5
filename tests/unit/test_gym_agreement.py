"""Our verifiers give the published example rollouts of NeMo-Gym the rewards that NeMo-Gym gave them.

STAGECOACH_NEMO_GYM names a checkout of https://github.com/NVIDIA-NeMo/Gym. The rows that the rollouts answer are
beside them; those of structured_outputs have been replaced since and come from its history. Those of
workplace_assistant never were published, so there the expected calls themselves are the response.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.recipe.models import Environment
from scripts.rewards import math
from scripts.rewards.registry import VERIFIERS

CHECKOUT = os.environ.get("STAGECOACH_NEMO_GYM")
TOOL_USE = "single_step_tool_use_with_argument_comparison"
ROLLOUTS = [
    (Environment.MATH, "math_with_judge", ""),
    (Environment.MCQA, "mcqa", ""),
    (Environment.MCQA, "mcqa", "_with_template_metadata"),
    (Environment.INSTRUCTION_FOLLOWING, "instruction_following", ""),
    (Environment.STRUCTURED_OUTPUTS, "structured_outputs", ""),
    (Environment.CODE_GEN, "code_gen", ""),
    (Environment.CALENDAR, "calendar", ""),
    (Environment.TOOL_USE, TOOL_USE, ""),
    (Environment.REASONING_GYM, "reasoning_gym", ""),
    (Environment.STRING_MATCH, "string_match", ""),
]
# Rollouts older than NeMo-Gym's rule: a box that holds "C: the option's text" is the letter C now.
CHANGED_SINCE = {("mcqa", "", 2): 1.0}
OLD_STRUCTURED_OUTPUTS = "45f090fb3:resources_servers/structured_outputs/data/example.jsonl"
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="STAGECOACH_NEMO_GYM names no checkout of NeMo-Gym")


def rows(folder: str, name: str) -> list[dict]:
    path = Path(CHECKOUT) / "resources_servers" / folder / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tasks(folder: str, suffix: str) -> dict[str, dict]:
    """The example rows by their question."""
    if folder == "structured_outputs":
        command = ["git", "-C", CHECKOUT, "show", OLD_STRUCTURED_OUTPUTS]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            pytest.skip(f"the checkout's history lacks {OLD_STRUCTURED_OUTPUTS}")
        examples = [json.loads(line) for line in shown.stdout.splitlines()]
    else:
        examples = rows(folder, f"example{suffix}")
    return {question_of(row): row for row in examples}


def question_of(row: dict) -> str:
    """The last message of a user."""
    items = row["responses_create_params"]["input"]
    contents = [item["content"] for item in items if item.get("role") == "user"]
    return contents[-1] if isinstance(contents[-1], str) else "".join(part["text"] for part in contents[-1])


def text_of(rollout: dict) -> str:
    """What the policy answered, its tool calls in the notation that is read from a text."""
    parts = []
    for item in rollout["response"]["output"]:
        if item["type"] == "message":
            parts += [content["text"] for content in item["content"]]
        elif item["type"] == "function_call":
            call = {"name": item["name"], "arguments": json.loads(item["arguments"])}
            parts.append(f"<tool_call>{json.dumps(call)}</tool_call>")
    return "".join(parts)


@pytest.mark.parametrize(("environment", "folder", "suffix"), ROLLOUTS)
def test_published_rollouts_get_their_published_rewards(environment, folder, suffix, monkeypatch):
    monkeypatch.setattr(math, "SECONDS", 60.0)  # one comparison takes seconds, more on a busy machine
    verifier, examples = VERIFIERS[environment], tasks(folder, suffix)
    for number, rollout in enumerate(rows(folder, f"example_rollouts{suffix}")):
        row = examples.get(question_of(rollout), {}) | rollout
        assert verifier.check(row) is None, number
        published = CHANGED_SINCE.get((folder, suffix, number), rollout["reward"])
        assert verifier.verify(row, text_of(rollout)) == published, number


def test_workplace_rows_reward_the_expected_calls_and_no_others():
    verifier = VERIFIERS[Environment.WORKPLACE]
    for row in rows("workplace_assistant", "example"):
        calls = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in row["ground_truth"]]
        assert verifier.check(row) is None
        assert verifier.verify(row, as_text(calls)) == 1.0
        assert verifier.verify(row, "done") == 0.0
        assert verifier.verify(row, as_text(calls[1:])) == 0.0
        for name in calls[0]["arguments"]:
            changed = calls[0]["arguments"] | {name: "12345678"}
            assert verifier.verify(row, as_text([calls[0] | {"arguments": changed}, *calls[1:]])) == 0.0, name


def as_text(calls: list[dict]) -> str:
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
