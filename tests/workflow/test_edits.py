"""The table of edits: which stages really train after each, by the run directories' own account."""

import os
import re
from collections import Counter

import pytest

from tests.workflow.edits import DOCUMENT, EDITS, document


def attempts(workflow) -> Counter:
    """How often each stage has begun to train, over its run directory and those set aside."""
    counts: Counter = Counter()
    for path in workflow.results.glob("*/run*/attempts.jsonl"):
        counts[path.parts[-3]] += path.read_text().count('"begin"')
    return counts


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_exactly_the_stages_of_the_table_train(copied, edit):
    edit.apply(copied)
    stages = re.findall(
        r"^  (\w+): *(?:\{algorithm.*)?$",
        (copied.root / "config/recipes/short.yaml").read_text().partition("stages:\n")[2],
        re.M,
    )
    targets = [f"results/short/{stage}/ckpt" for stage in stages]
    if edit.is_alike and not os.environ.get("STAGECOACH_ALL_EDITS"):
        assert copied.planned(*targets) == edit.trains
        return
    before = attempts(copied)
    kept = {path: path.read_bytes() for path in copied.results.glob("*/run/checkpoints/*/model.safetensors")}
    output = copied.snakemake(*targets)
    trained = {stage for stage, count in attempts(copied).items() if count > before[stage] or (stage not in before)}
    assert trained == edit.trains
    lost = [
        path
        for path, content in kept.items()
        if not any(
            other.read_bytes() == content for other in path.parents[3].glob("run*/checkpoints/*/model.safetensors")
        )
    ]
    assert lost == [], "nothing trained may be lost by an edit"
    assert "Nothing to be done" in output or "Nothing to be done" in copied.snakemake("--dry-run", *targets)


def test_the_documents_table_is_the_tests_own():
    assert DOCUMENT.read_text() == document(), "run: python -m tests.workflow.edits"
