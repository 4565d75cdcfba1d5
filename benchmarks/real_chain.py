"""The table of benchmarks/real_chain.md, of what test_nemo_rl_real.py left where STAGECOACH_CHAIN_REPORT said.

Usage: python benchmarks/real_chain.py REPORT.json >> benchmarks/real_chain.md
"""

import argparse
import json
from pathlib import Path

ATTEMPT = {"from": 0, "to": 4, "time": 0, "ended": 60, "outcome": "published"}
SMOKE = {"rlvr": {"planned": 5, "reach": {}, "attempts": [ATTEMPT], "record": {"step": 4}}}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--smoke", action="store_true", help="the table of one made-up stage")
    arguments = parser.parse_args()
    if not arguments.smoke and arguments.report is None:
        parser.error("name the report that tests/slurm/test_nemo_rl_real.py left")
    stages = SMOKE if arguments.smoke else json.loads(arguments.report.read_text())
    print("| stage | attempt | from step | to step | aimed at | ended | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for stage, told in stages.items():
        for number, one in enumerate(told["attempts"], 1):
            aimed = told["reach"].get(str(one["from"]), {"step": told["planned"]})["step"]
            minutes = f"{(one['ended'] - one['time']) / 60:.1f}" if one.get("ended") else "?"
            steps = f"{one['from']} | {one.get('to', '?')} | {aimed}"
            print(f"| {stage} | {number} | {steps} | {one['outcome']} | {minutes} |")
    for stage, told in stages.items():
        skipped = told["record"].get("data_ended", {}).get("rows_skipped", 0)
        print(f"\n{stage}: published at step {told['record']['step']} of {told['planned']}, rows skipped: {skipped}.")


if __name__ == "__main__":
    main()
