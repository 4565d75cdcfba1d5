"""A response of thoughts and an answer reaches Gym's servers, and is judged here, as behind Gym's parser of reasoning.

NeMo-RL serves the policy by vLLM with a parser of reasoning, and Gym's model server splits what that hands over. Gym's
part is asked here; vLLM's part, which is not installed, is what its parsers deepseek_r1 and nemotron_v3 document: what
stands before the first </think> is reasoning.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.recipe.environment import Environment
from scripts.rewards.answers import answer_of
from scripts.rewards.gym import output_items
from scripts.rewards.registry import SPECS, scores
from tests.gym.responses import hard_responses
from tests.gym.rows import rows
from tests.gym.verify import PYTHON, gym_verify, needs_gym

CONVERTER = Path(__file__).with_name("converter.py")
RESPONSES = [
    "It is 5.",
    "<think>\nHm, 7?\n</think>\n\nIt is 5.",
    "<think>\n\n</think>\n\n5",
    "<think>a</think>",
    "<think>a</think>\n",
    "<think>a</think>b<think>c</think>d",
    "<think>a<think>b</think>c</think>d",
    "<think>a</think>b <think> c",
    "The tag <think> begins it.",
    " <think>a</think> b",
    "a <think>b</think> c",
]
BEHIND_VLLM = [
    "<think></think>5",
    "<think>Hm</think>5",
    "Hm, 7?\n</think>\n\nIt is 5.",
    "</think>5",
    "a</think>",
    "a</think>b<think>c</think>d",
]
THOUGHTS = '<think>\nFirst \\boxed{Z}, {"z": 0}, ```python\nprint(0)\n```, no.\n</think>\n\n'


def by_gym(given: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    lines = "\n".join(map(json.dumps, given))
    done = subprocess.run([PYTHON, CONVERTER], input=lines, text=True, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def told(items: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The kind and the texts of each item."""
    return [(item["type"], [part["text"] for part in item.get("summary") or item.get("content")]) for item in items]


@needs_gym
def test_thoughts_are_taken_apart_as_gyms_model_server_takes_them_apart():
    given = [{"content": response, "reasoning": None} for response in RESPONSES]
    for response in BEHIND_VLLM:
        reasoning, _, content = response.removeprefix("<think>").partition("</think>")
        given.append({"content": content, "reasoning": reasoning})
    theirs = by_gym(given)
    ours = [output_items(answer_of(response)) for response in (*RESPONSES, *BEHIND_VLLM)]
    for response, our, their in zip((*RESPONSES, *BEHIND_VLLM), ours, theirs, strict=True):
        assert told(our) == told(their), response


@needs_gym
@pytest.mark.parametrize(
    "name", [Environment.MCQA, Environment.STRUCTURED_OUTPUTS, Environment.INSTRUCTION_FOLLOWING, Environment.CODE_GEN]
)
def test_a_response_behind_thoughts_earns_here_what_gyms_server_pays_for_it(name):
    pairs = []
    for place, row in enumerate(each for each in rows() if each["agent_ref"]["name"] == name):
        tried = [SPECS[name].answer(row) or "1", *hard_responses(row).values()]
        pairs += [
            (row, THOUGHTS + text) for number, text in enumerate(tried) if number < 2 or (place + number) % 7 == 0
        ]
    sentences = "sentence"  # split by rules here, by a trained model there
    pairs = [pair for pair in pairs if sentences not in str(pair[0].get("instruction_id_list"))]
    verdicts = gym_verify([(row, output_items(answer_of(text))) for row, text in pairs])
    judged = [place for place, verdict in enumerate(verdicts) if verdict.reward is not None]
    if not judged:
        pytest.skip(", ".join({verdict.says for verdict in verdicts}))
    here = scores(pairs)
    for place in judged:
        assert here[place] == pytest.approx(verdicts[place].reward), (*pairs[place], verdicts[place])
    assert len({here[place] for place in judged}) > 1, "some earn and some do not"
