"""Files of lm-eval's answers, as its command line writes them."""

import json
from pathlib import Path

import numpy as np

from scripts.files import sha256_text, write_json

DATE = "2026-11-23T16-01-38.179135"


def write_answers(folder: Path, by_task: dict[str, list[float]], group: str | None = None, **told: float) -> None:
    """Write results and samples of tasks with a score a document; `told` replaces figures, `group` adds their mean."""
    results = {name: figures(values, **told) for name, values in by_task.items()}
    if group:
        results[group] = figures([value for values in by_task.values() for value in values])
    config = {"dataset_path": "json", "test_split": "test"}
    found = {
        "results": results,
        "configs": dict.fromkeys(by_task, config),
        "versions": dict.fromkeys(results, "3.0"),
        "n-shot": {},
    }
    write_json(folder / "model" / f"results_{DATE}.json", found | {"chat_template": None})
    for name, values in by_task.items():
        rows = (
            {"doc_id": place, "doc_hash": f"{name} {place}", "filter": "none", "acc": value}
            | {"prompt_hash": sha256_text(f"{name} {place}?")}
            for place, value in enumerate(values)
        )
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "model" / f"samples_{name}_{DATE}.jsonl").write_text(text)


def figures(values: list[float], **told: float) -> dict[str, float | str]:
    """The figures of a task in results.json."""
    stderr = float(np.std(values, ddof=1) / len(values) ** 0.5)
    score = told.get("score", float(np.mean(values)))
    return {"alias": "a", "sample_len": len(values), "acc,none": score, "acc_stderr,none": told.get("stderr", stderr)}
