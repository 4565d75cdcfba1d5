"""Measure the node around this process within seconds, and print the measurements as a line of JSON.

scripts.slurm.nodes runs this program on every node of a job. It needs Python's standard library; numpy multiplies
matrices where it is installed, and torch measures GPUs. With ``--quick`` nothing is timed. The line is printed before
torch is imported, and again with the GPUs' times.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
MB = 1_000_000
DAY = 86_400
XIDS = {48, 64, 74, 79, 95, 119, 120}
"""Errors of NVIDIA's driver that mean broken hardware, not a program's mistake."""
XID = re.compile(r"\[ *(\d+)\.\d+\] NVRM: Xid \([^)]*\): (\d+)")


def gpus() -> dict[str, Any]:
    """Return count, uncorrected ECC errors since a reset, throttled GPUs and a day's Xids; {} without nvidia-smi."""
    query = "--query-gpu=ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
    try:
        lines = _output("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    except FileNotFoundError:
        return {}
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.count(",") == 1]
    ecc = sum(int(count) for count, _ in rows if count.isdecimal())
    found: list[tuple[str, str]] = []
    with suppress(FileNotFoundError):
        found = XID.findall(_output("dmesg"))  # a user may be forbidden to read it
    recent = {int(number) for at, number in found if time.monotonic() - int(at) < DAY}
    throttled = sum(is_slowed == "Active" for _, is_slowed in rows)
    return {"gpus": len(rows), "ecc": ecc, "throttled": throttled, "xids": sorted(recent & XIDS)}


def room() -> dict[str, float]:
    """Return the free MB of the disk for temporary files and of shared memory."""
    places = {"disk_mb": tempfile.gettempdir(), "shm_mb": "/dev/shm"}  # noqa: S108 (only looked at)
    return {key: shutil.disk_usage(place).free / MB for key, place in places.items() if Path(place).is_dir()}


def speed() -> dict[str, float]:
    """Return the best seconds of a matrix product on a core, and of a copy of 64 MB."""
    try:
        os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
        matrix = import_module("numpy").ones((512, 512))
        product = lambda: matrix @ matrix  # noqa: E731
    except ImportError:
        rows = [[1.0] * 64] * 64
        product = lambda: [[sum(map(float.__mul__, row, column)) for column in rows] for row in rows]  # noqa: E731
    block = bytearray(64 * MB)
    return {"product": best(product, 1.0), "copy": best(lambda: bytes(block), 0.5)}


def gpu_speed() -> dict[str, float]:
    """Return the slowest GPU's best seconds of a product of bfloat16 matrices, and of a copy; {} without torch."""
    try:
        torch = import_module("torch")
    except ImportError:
        return {}
    times: dict[str, float] = {}
    for device in range(torch.cuda.device_count()):
        matrix = torch.ones((8192, 8192), dtype=torch.bfloat16, device=device)
        for name, work in {"gpu_product": lambda x=matrix: x @ x, "gpu_copy": matrix.clone}.items():
            seconds = best(lambda: (work(), torch.cuda.synchronize(device)), 0.5)  # noqa: B023
            times[name] = max(seconds, times.get(name, 0.0))
    return times


def best(work: Callable[[], Any], seconds: float) -> float:
    """Return the seconds of the fastest call of `work` within some seconds; other processes delay the rest."""
    until, times = time.monotonic() + seconds, []
    while not times or time.monotonic() < until:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout


def _print(told: dict[str, Any]) -> None:
    print(json.dumps(told | {"clock": time.time(), "elapsed": time.monotonic() - BEGAN}), flush=True)


def main() -> None:
    """Print the node's measurements."""
    told: dict[str, Any] = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), **gpus(), **room()}
    is_quick = sys.argv[1:] == ["--quick"]
    told |= {} if is_quick else speed()
    _print(told)
    if told.get("gpus") and not is_quick:
        _print(told | gpu_speed())


if __name__ == "__main__":
    main()
