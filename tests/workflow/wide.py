"""The tree of tests/workflow/wide.yaml: own rows, an own environment and two pretrained models beside the recipe."""

import json
import shutil
from typing import Any

from tests.conftest import ROOT
from tests.pretrained import save_pretrained

PARITY = '''"""Rewards responses whose bytes have an even sum."""


def verify(row, response):
    return float(sum(response.encode()) % 2 == 0)


def good_answer(row):
    return "even"
'''
ENVIRONMENTS = ("parity", "twin")
DEMONSTRATIONS, PROMPTS = 60, 60


def prepare(workflow: Any) -> None:
    """Give a tree the recipe, with all that it names."""
    shutil.copy(ROOT / "tests/workflow/wide.yaml", workflow.root / "config/recipes/wide.yaml")
    for name in ENVIRONMENTS:
        (workflow.root / f"{name}.py").write_text(PARITY)
    _write_rows(workflow)
    for name in ("base", "tutor"):
        save_pretrained("qwen3", workflow.root / "models" / name)
    workflow.configure("wide")


def _write_rows(workflow: Any) -> None:
    """Write the demonstrations and the prompts."""
    rows = workflow.root / "rows"
    rows.mkdir()
    with (rows / "demos.jsonl").open("w") as file:
        for number in range(DEMONSTRATIONS):
            asked = {"role": "user", "content": f"say {number}"}
            answered = {"role": "assistant", "content": f"{number}"}
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")
    with (rows / "asked.jsonl").open("w") as file:
        for number in range(PROMPTS):
            agent = {"type": "responses_api_agents", "name": ENVIRONMENTS[number % 2]}
            asked = {"input": [{"role": "user", "content": f"say {number}"}]}
            file.write(json.dumps({"agent_ref": agent, "responses_create_params": asked}) + "\n")
