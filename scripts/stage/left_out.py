"""Nodes that the next Slurm jobs leave out, by what the attempts of all trainings tell of them."""

import time
from collections import Counter
from pathlib import Path

from scripts.stage.paths import STORE
from scripts.stage.training_folder import TrainingFolder

DAY = 86_400.0
FAILURES = 2


def left_out(root: Path) -> dict[str, str]:
    """Return nodes to leave out, with reasons; `root` holds the results of all runs.

    A node is left out for a day after it was found sick or slow, and after two attempts that were lost or stood still,
    without a good attempt since. The nodes named by an attempt's message have failed, else all of them; of those, none
    is left out that nothing tells from the rest.
    """
    since, found, failed, suspects = time.time() - DAY, {}, Counter(), []
    files = [path for path in (root / STORE).glob("[!.]*/attempts.jsonl") if path.stat().st_mtime >= since]
    trainings = [TrainingFolder(path.parent) for path in files]
    attempts = [attempt for training in trainings for attempt in training.attempts if attempt["time"] >= since]
    for attempt in sorted(attempts, key=lambda attempt: attempt["time"]):
        hosts, at = {*(attempt["hosts"] or ())}, time.strftime("%m-%d %H:%M", time.localtime(attempt["time"]))
        for kind in ("slow", "sick"):
            nodes = (attempt["sniff"] or {}).get(kind, {})
            found |= {node: f"{kind} on {at}: {why}" for node, why in nodes.items()}
        if attempt["outcome"] in ("lost", "stalled"):
            failed.update(blamed := {*attempt["blamed"]} or hosts)
            suspects.append(blamed if len(blamed) > 1 else set())
        elif attempt["outcome"] in ("finished", "unfinished", "exhausted"):
            failed = Counter({node: times for node, times in failed.items() if node not in hosts})
    often = {node for node, times in failed.items() if times >= FAILURES}
    often -= set().union(*(nodes for nodes in suspects if nodes <= often))
    return {node: f"failed {failed[node]} attempts" for node in sorted(often)} | found
