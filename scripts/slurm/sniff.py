"""Measure the node around this process within seconds, in lines of JSON, the last complete (``--quick``: no timings).

scripts.slurm.nodes runs this program on every node of a job. Python's standard library is enough; numpy multiplies
matrices where it is installed, and so does torch where there are GPUs.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

BEGAN = time.monotonic()
MB = 1_000_000
BROKEN = {48, 64, 74, 79, 95, 119, 120}
"""Xids, errors of NVIDIA's driver, that mean hardware and not a program's mistake."""
XID = re.compile(r"\[ *(\d+)\.\d+\] NVRM: Xid \([^)]*\): (\d+)")
GPU_QUERY = "--query-gpu=ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"


def gpus() -> dict[str, Any]:
    """Return the count of GPUs, uncorrected ECC errors since a reset, throttled GPUs, and a day's Xids of hardware."""
    lines = output("nvidia-smi", GPU_QUERY, "--format=csv,noheader,nounits").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.count(",") == 1]
    ecc = sum(int(count) for count, _ in rows if count.isdecimal())
    recent = {int(xid) for at, xid in XID.findall(output("dmesg")) if time.monotonic() - int(at) < 86_400}
    throttled = sum(is_slowed == "Active" for _, is_slowed in rows)
    return {"gpus": len(rows), "ecc": ecc, "throttled": throttled, "xids": sorted(recent & BROKEN)}


def output(*command: str) -> str:
    """Return a command's output; empty where the command is missing, refused or silent."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    return ""


def speeds(has_gpus: bool) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a matrix product and a copy on a CPU core, then on each GPU."""
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    block = bytearray(64 * MB)
    yield "copy", best(lambda: bytes(block))
    with suppress(ImportError):
        matrix = import_module("numpy").ones((512, 512))
        yield "product", best(lambda: matrix @ matrix)
    with suppress(ImportError):
        torch = import_module("torch") if has_gpus else None
        for device in range(torch.cuda.device_count() if torch else 0):
            tensor = torch.ones((8192, 8192), dtype=torch.bfloat16, device=device)
            yield "gpu_product", best(lambda: (tensor @ tensor, torch.cuda.synchronize(device)))  # noqa: B023
            yield "gpu_copy", best(lambda: (tensor.clone(), torch.cuda.synchronize(device)))  # noqa: B023


def best(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of half a second's calls; other processes delay the rest."""
    until, times = time.monotonic() + 0.5, []
    while not times or time.monotonic() < until:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print the node's measurements; of GPUs the slowest one's."""
    told = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), **gpus()}
    for name, place in {"disk_mb": "/tmp", "shm_mb": "/dev/shm"}.items():  # noqa: S108
        told[name] = shutil.disk_usage(place).free / MB
    for name, seconds in [("", 0.0)] if sys.argv[1:] == ["--quick"] else speeds(told["gpus"] > 0):
        told[name] = max(seconds, told.get(name, 0.0))
        print(json.dumps(told | {"clock": time.time(), "elapsed": time.monotonic() - BEGAN}), flush=True)


if __name__ == "__main__":
    main()
