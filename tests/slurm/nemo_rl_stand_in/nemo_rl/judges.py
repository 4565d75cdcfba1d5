"""What Gym's servers ask of their judges: each whose settings name a base_url is asked about every row."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2


def judges_of(settings: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of Gym's servers that have a base_url, at any depth."""
    if isinstance(settings, dict):
        if settings.get("base_url"):
            yield settings
        for value in settings.values():
            yield from judges_of(value)


def verdict(judge: dict[str, Any], question: str) -> float:
    """Ask a judge for a score; an exception without one, as no reward is made up."""
    body = json.dumps({"model": judge["model"], "messages": [{"role": "user", "content": question}]}).encode()
    answer = httpx2.post(f"{judge['base_url']}/chat/completions", content=body, timeout=10, trust_env=False)
    return float(answer.raise_for_status().json()["choices"][0]["message"]["content"])
