"""Time a stage in containers of NVIDIA's own pyxis and enroot beside the same stage on the hosts.

The stage is rlvr1 of the tests' chain, NeMo-RL's stand-in on two hosts with a sandbox, submitted by Snakemake to the
test Slurm. Runs alternate. usage: python benchmarks/containers.py
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, end_for_lack_of, head, row
from tests.slurm import containers
from tests.slurm.cluster import Cluster, reason_missing
from tests.slurm.nemo_rl_chain import NemoRlChain
from tests.slurm.test_pyxis import ContainerChain

WAYS = {"the double of pyxis: processes of the host": NemoRlChain, "pyxis 0.24 and enroot 4.1": ContainerChain}


def measure(way: type[NemoRlChain], directory: Path) -> dict[str, float]:
    """Return the seconds of an attempt, of the look at the nodes, and to the first step."""
    built = {"containers": containers.build()} if way is ContainerChain else {"pyxis": True}
    with Cluster(directory / "slurm", hosts=2, **built) as cluster:
        (directory / "tree").mkdir()
        chain = way(directory / "tree", cluster)
        chain.train("results/double/sft/hf")
        began = time.monotonic()
        chain.train("results/double/rlvr1/ckpt")
        seconds = time.monotonic() - began
        (attempt,) = chain.attempts("rlvr1")
        (to_step,) = json.loads((chain.results / "rlvr1/run/startup.json").read_text())["seconds"]
    whole = attempt["ended"] - attempt["time"]
    return {"call": seconds, "attempt": whole, "look": attempt["sniff"]["seconds"], "start": to_step}


def main() -> None:
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    if reason := reason_missing() or containers.reason_missing():
        end_for_lack_of(reason)
    if arguments.smoke:
        print(containers.build().plugin)
        return
    runs, loads = {name: [] for name in WAYS}, []
    for _ in range(arguments.times):
        for name, way in WAYS.items():
            loads.append(os.getloadavg()[0])
            with tempfile.TemporaryDirectory(prefix="pyxis-") as directory:
                runs[name].append(measure(way, Path(directory)))
    print(f"Made by `python benchmarks/containers.py`, {os.cpu_count()} CPU cores (load {min(loads):.1f} to", end=" ")
    print(f"{max(loads):.1f}), {arguments.times} runs each, seconds: median and range. The image has 1 MB; an image of")
    print("NeMo-RL takes minutes to unpack.\n")
    columns = {"call": "call of Snakemake", "attempt": "attempt", "look": "look at the nodes", "start": "Ray to step 1"}
    print(head("containers", *columns.values()))
    for name, measured in runs.items():
        figures = [[run[column] for run in measured] for column in columns]
        print(row(name, *(f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in figures)))


if __name__ == "__main__":
    main()
