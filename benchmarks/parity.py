"""The table of benchmarks/parity.md, of what tests/nemo_rl/test_parity.py left where STAGECOACH_PARITY_REPORT said.

Usage: python benchmarks/parity.py REPORT.jsonl >> benchmarks/parity.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

START = {"reached": 4, "waits": False, "status": "0", "cause": None}
SMOKE = {"kind": "sync", "schedule": "5 batches", "Real": [START], "StandIn": [START | {"reached": 5}]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--smoke", action="store_true", help="the table of one made-up schedule")
    arguments = parser.parse_args()
    if not arguments.smoke and arguments.report is None:
        parser.error("name the report that tests/nemo_rl/test_parity.py left")
    lines = [json.dumps(SMOKE)] if arguments.smoke else arguments.report.read_text().splitlines()
    schedules = [json.loads(line) for line in lines]
    print("| loop | schedule | step reached by each start, and how it ended | cause that our reader finds | differ |")
    print("| --- | --- | --- | --- | --- |")
    for one in schedules:
        starts = one["Real"]
        ends = "; ".join(f"{start['reached']}, {_end(start)}" for start in starts)
        causes = "; ".join(start["cause"] or "-" for start in starts)
        differ = ", ".join(sorted(_different(one["StandIn"], starts))) or "nothing"
        print(f"| {one['kind']} | {one['schedule']} | {ends} | {causes} | {differ} |")
    differing = sum(one["StandIn"] != one["Real"] for one in schedules)
    print(f"\nSchedules: {len(schedules)}, starts: {sum(len(one['Real']) for one in schedules)}.", end=" ")
    print(f"Schedules that differ: {differing}.")


def _end(start: dict[str, Any]) -> str:
    if start["waits"]:
        return f"waits for ever ({start['status']} by the test)"
    return "killed" if start["status"] == "killed" else f"status {start['status']}"


def _different(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> set[str]:
    return {
        name
        for one, other in zip(ours, theirs, strict=True)
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    }


if __name__ == "__main__":
    main()
