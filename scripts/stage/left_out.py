"""Which nodes the next training is not to get, by the attempts of all trainings of the store within a day."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from scripts.stage.attempts import read_attempts
from scripts.stage.paths import STORE

DAY = 86_400.0
FAILURES = 2
INNOCENT = ("finished", "unfinished", "exhausted")


def left_out(root: Path) -> dict[str, str]:
    """Return nodes to leave out, by name, with the reason and the age; `root` holds the results of all runs.

    A node is left out for a day after it was found sick or slow, or after two attempts that it failed without a good
    one since. Attempts fail by a lost node or a standstill; the node named by the message has failed, else all nodes.
    Where all nodes of such attempts are equally suspect, none is left out.
    """
    now, found, failed, suspects = time.time(), {}, defaultdict(list), []
    for attempt in _attempts_since(root, now - DAY):
        since, hosts = attempt["time"], set(attempt["hosts"])
        for kind in ("sick", "slow"):
            for node, why in (attempt["sniff"] or {}).get(kind, {}).items():
                found[node] = f"{kind} {(now - since) / 3600:.1f} h ago: {why}"
        if attempt["outcome"] in INNOCENT:
            for node in hosts:
                failed.pop(node, None)
        elif attempt["outcome"] in ("lost", "stalled"):
            blamed = set(attempt["blamed"] or hosts)
            for node in blamed:
                failed[node].append(f"{attempt['outcome']} {(now - since) / 3600:.1f} h ago")
            suspects += [hosts] if blamed == hosts and len(hosts) > 1 else []
    often = {node: f"failed {len(times)} attempts: {', '.join(times)}" for node, times in failed.items()}
    often = {node: why for node, why in often.items() if len(failed[node]) >= FAILURES}
    alike = set().union(*(hosts for hosts in suspects if hosts <= often.keys()))
    return {node: why for node, why in often.items() if node not in alike} | found


def _attempts_since(root: Path, since: float) -> list[dict[str, Any]]:
    files = [path for path in (root / STORE).glob("*/attempts.jsonl") if path.stat().st_mtime >= since]
    attempts = [attempt for path in files for attempt in read_attempts(path.parent)]
    return sorted((it for it in attempts if it["hosts"] and it["time"] >= since), key=lambda it: it["time"])
