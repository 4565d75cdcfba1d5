"""Wait until a Ray cluster has all its nodes and GPUs; say which have come, one JSON line at each change."""

import argparse
import json
import logging
import os
import time

from scripts.errors import run_program

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def main() -> int:
    """Command line: 0 once the cluster is whole, 1 when it was not in time.

    Each line is ``{host without its domain: {"address": ip, "port": of its node manager, "gpus": n}}``.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.slurm.ray_wait", description=__doc__)
    parser.add_argument("--address", required=True, help="ip:port of the head")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0, help="of each node")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds")
    arguments = parser.parse_args()
    until, shown = time.monotonic() + arguments.timeout, None
    import ray  # noqa: PLC0415  (takes a second, which --help need not)

    while time.monotonic() < until:
        try:
            if not ray.is_initialized():
                ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.CRITICAL)
            nodes = {
                node["NodeManagerHostname"].split(".")[0]: {
                    "address": node["NodeManagerAddress"],
                    "port": node["NodeManagerPort"],
                    "gpus": int(node["Resources"].get("GPU", 0)),
                }
                for node in ray.nodes()
                if node["Alive"]
            }
        except (ConnectionError, RuntimeError, ValueError):
            nodes = {}
        if nodes != shown:
            print(json.dumps(nodes), flush=True)
            shown = nodes
        if len(nodes) >= arguments.nodes and all(node["gpus"] >= arguments.gpus for node in nodes.values()):
            return 0
        time.sleep(0.3)
    return 1


if __name__ == "__main__":
    run_program(main)
